"""Programs of other packages under `forge-profiling run`: results, output and files are as without.

`make programs` installs the packages and runs these. A program is run in turns with and without, in folders of its own.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightning_forge_profiling.record.reader import read_run, records_at
from tests.outcomes import HANGS_S, tables

HERE = Path(__file__).parent
COMMANDS = Path(sys.executable).parent
ROUNDS = 2

pytestmark = [pytest.mark.programs, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Program:
    package: str  # that it needs, by the name to import
    command: tuple[str, ...]
    fits: int = 1


PROGRAMS = {
    "scvi-tools": Program("scvi", ("scvi_cells.py",)),
    "darts": Program("darts", ("darts_backtest.py",), fits=3),
    "pytorch-forecasting": Program("pytorch_forecasting", ("forecasting_tft.py",)),
    "peft": Program("peft", ("peft_lora.py",)),
    "optuna": Program("optuna", ("optuna_trials.py",), fits=4),
    "chemprop": Program(
        "chemprop",
        ("chemprop", "train", "--data-path", "molecules.csv", "--task-type", "regression", "--output-dir", "out",
         "--epochs", "3", "--batch-size", "8", "--accelerator", "cpu", "--data-seed", "0", "--pytorch-seed", "0"),
    ),
    "anomalib": Program("anomalib", ("anomalib_fastflow.py",)),
    "kornia": Program("kornia", ("kornia_augmented.py",)),
    "lightly": Program("lightly", ("lightly_simclr.py",)),
    "monai": Program("monai", ("monai_spheres.py",)),
    "neuralforecast": Program("neuralforecast", ("neuralforecast_models.py",), fits=2),
    "pyg": Program("torch_geometric", ("pyg_graphs.py",)),
    "torchgeo": Program("torchgeo", ("torchgeo_land_cover.py",)),
}  # fmt: skip

# what `run` may add to standard error; the first is Lightning's line on them
ADDED = re.compile(
    r"Adding 2 callbacks from entry point 'forge_profiling'"
    r"|forge-profiling: (adding ForgeProfilerCallback\(\) and ThroughputCallback\(\) to|fit \d+ of|\d+ fits of) "
    r"|Where a step\b.* goes"
    r"|(.* )?cpu$"  # the rest of that title, where the module's name is long
    r"|(sampled \d+ (in|of) \d+)? +share +mean ms$"  # the heading of a table
    r"|[a-z]+( [a-z]+)? {2,}\S"  # a row of it
    r"| {12}\S"  # the rest of such a row
    r"|$"
)
TIMES = re.compile(r"\d:\d\d|\dit/s")  # as in a progress bar
STAMP = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(,\d+)?")  # before a message of a log
OURS = re.compile(r"(?:^|/)(?:forge_record(?:\.\d+)?|profiler_traces)/")


@dataclass(frozen=True)
class Outcome:
    folder: Path
    exit_code: int
    out: list[str]
    err: str

    def err_lines(self):
        return comparable(self.err, self.folder)

    def files(self):
        found = (path for path in self.folder.rglob("*") if path.is_file())
        # the name of TensorBoard's file has the time and the process
        named = {re.sub(r"(tfevents)\..*", r"\1", str(path.relative_to(self.folder))): path for path in found}
        return {name: path for name, path in named.items() if not OURS.search(name)}


def comparable(text, folder):
    """Lines without their times, and without those that are all times."""
    lines = (STAMP.sub("TIME", line).replace(str(folder), "FOLDER").rstrip() for line in text.splitlines())
    return [line for line in lines if not TIMES.search(line)]


def molecules():
    ends = ("", "O", "N", "Cl", "Br", "F", "C(=O)O", "c1ccccc1", "C#N", "S")
    rows = (("C" * length + end, 25 * length + 20 * len(end)) for length in range(1, 9) for end in ends)
    return "\n".join(["smiles,boiling", *(f"{smiles},{boiling}" for smiles, boiling in rows)])


def outcome(program, folder, *, profiled):
    folder.mkdir()
    (folder / "molecules.csv").write_text(molecules())
    first, *others = program.command
    script = first.endswith(".py")
    if profiled:
        command = [COMMANDS / "forge-profiling", "run", HERE / first if script else first]
    else:
        command = [COMMANDS / "python", HERE / first] if script else [COMMANDS / first]
    done = subprocess.run(
        [*command, *others],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        env={**os.environ, "COLUMNS": "200"},  # so that nothing is wrapped where a time has more digits
        check=False,
    )
    return Outcome(folder, done.returncode, comparable(done.stdout, folder), done.stderr)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_as_it_is_without(tmp_path, name):
    program = PROGRAMS[name]
    if find_spec(program.package) is None:
        pytest.skip(f"{name} is not installed; `make programs` does that")
    for turn in range(ROUNDS):
        plain, profiled = (
            outcome(program, tmp_path / f"{turn}-{kind}", profiled=kind == "profiled") for kind in ("plain", "profiled")
        )
        the_same(plain, profiled)
        says_what_it_should(plain, profiled)
        leaves_a_record(profiled, program.fits)


def the_same(plain, profiled):
    assert (plain.exit_code, profiled.exit_code) == (0, 0), plain.err + profiled.err
    assert profiled.out == plain.out
    assert any(line.startswith("digest ") for line in plain.out) or (plain.folder / "out").exists()
    files, without = profiled.files(), plain.files()
    assert sorted(files) == sorted(without)
    for name, path in files.items():
        if path.suffix in {".csv", ".yaml", ".json", ".toml"}:  # the package's own results and settings
            assert path.read_bytes() == without[name].read_bytes(), name
        elif path.suffix in {".pt", ".ckpt"}:
            assert weights(path) == weights(without[name]), name
        assert b"forge" not in path.read_bytes().lower(), name


def weights(path):
    """The weights in a checkpoint, bit by bit."""
    import torch  # noqa: PLC0415  (not where the packages are not installed)

    state = torch.load(path, weights_only=False)["state_dict"]
    return {name: (values.dtype, values.numpy().tobytes()) for name, values in state.items()}


def says_what_it_should(plain, profiled):
    lines, without = Counter(profiled.err_lines()), Counter(plain.err_lines())
    assert without - lines == Counter()
    assert [line for line in lines - without if not ADDED.match(line)] == []
    assert tables(profiled.err) >= 1
    assert re.search(r"^throughput +[\d,.]+ samples/s", profiled.err, re.MULTILINE)
    assert re.search(r"^verdict +\S", profiled.err, re.MULTILINE)


def leaves_a_record(profiled, fits):
    runs = [read_run(record) for record in records_at(profiled.folder)]
    assert 1 <= len(runs) <= fits  # a short fit that is like one before has none
    assert all(rank.state is not None for run in runs for rank in run.ranks)
