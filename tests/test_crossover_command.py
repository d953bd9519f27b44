"""`forge-profiling crossover` as users have it: what it prints and writes, and what it refuses."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_forge_profiling.cli import commands, shared
from lightning_forge_profiling.cli.main import main
from lightning_forge_profiling.crossover import sweep as operations
from lightning_forge_profiling.crossover.curves import read_crossover
from lightning_forge_profiling.errors import ConfigurationError
from tests.outcomes import HANGS_S
from tests.test_cli import COMMAND, ENVIRONMENT, fails, forge

H200 = Path(__file__).parent / "data" / "crossover_h200.json"
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
QUICK = ("--max-time", "0.05")
ONE_POINT = ("--ops", "add", "--sizes", "8", *QUICK)


@pytest.fixture
def crossover(capsys):
    """The command in this process."""

    def run(*arguments):
        code = main(["crossover", *map(str, arguments)])
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    return run


def test_the_names_of_choices_are_those_of_the_operations():
    assert tuple(operations.OPERATIONS) == shared.OPERATIONS
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in commands.DTYPES)


@pytest.mark.slow
def test_without_a_gpu_it_says_so_and_gives_the_cpus_times():
    done = forge(
        "crossover", "--ops", "add,softmax", "--sizes", "16:64", "--dtype", "bfloat16", *QUICK,
        environment={**NO_GPU, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no GPU") == 1
    assert "sum of two n by n matrices" in done.stdout
    assert re.search(r"^ *32 +~?[\d.]+ [nµm]s", done.stdout, re.MULTILINE)
    assert "1 thread\n" in done.stdout


@pytest.mark.slow
def test_json_is_alone_on_stdout():
    options = ("--ops", "add,softmax", "--sizes", "16:64", "--dtype", "bfloat16", *QUICK)
    done = forge("crossover", *options, "--format", "json", environment=NO_GPU)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["setting"]["dtype"], found["setting"]["gpu"]) == ("bfloat16", "")
    assert [operation["name"] for operation in found["operations"]] == ["add", "softmax"]
    assert [point["size"] for point in found["operations"][0]["curves"][0]["points"]] == [16, 32, 64]


def test_what_was_measured_elsewhere_is_shown_from_its_file(crossover, tmp_path):
    done = crossover("--from", H200)
    assert done.returncode == 0, done.stderr
    assert "NVIDIA H200" in done.stdout
    assert "16 threads" in done.stdout
    assert "off for products, on for convolutions" in done.stdout
    assert re.search(r"^matmul +with copies +faster from about 790 on$", done.stdout, re.MULTILINE)
    assert re.search(r"^conv2d +one call +faster at every size, 64 to 8192$", done.stdout, re.MULTILINE)
    assert re.search(r"^ *128 +2\.38 µs +5\.08 µs +12\.7 µs +66\.1 µs", done.stdout, re.MULTILINE)
    assert re.search(r"^ *2048 +116 µs +13\.5 µs \* +23\.5 µs \* +2\.98 ms", done.stdout, re.MULTILINE)
    copy = tmp_path / "copy.json"
    copy.write_text(crossover("--from", H200, "--format", "json").stdout, encoding="utf-8")
    assert read_crossover(copy) == read_crossover(H200)


def test_a_noisy_time_and_a_single_sample_are_marked_in_the_table(crossover, tmp_path):
    content = json.loads(H200.read_text(encoding="utf-8"))
    points = content["operations"][0]["curves"][1]["points"]
    points[3].update(us=1630.0, low_us=1500.0, high_us=3300.0)
    points[4].update(us=1000.0, low_us=910.0, high_us=1090.0)
    points[5].update(us=2000.0, low_us=2000.0, high_us=2000.0, samples=1)
    path = tmp_path / "c.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    done = crossover("--from", path)
    rows = dict(re.findall(r"^ *(\d+) +[\d.]+ [mµ]s +(\S+ [mµ]s)", done.stdout.split("add:")[0], re.MULTILINE))
    assert (rows["512"], rows["1024"], rows["2048"]) == ("~1.63 ms", "1.00 ms", "~2.00 ms")
    assert done.stdout.count("~ known to no better than 10 %, or a single sample\n") == 1


@pytest.mark.slow
def test_torch_is_loaded_to_measure_alone():
    program = (
        "import sys; from lightning_forge_profiling.cli.main import main; main(sys.argv[1:]);"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    for arguments, needed in ((("--from", H200), "False"), (ONE_POINT, "True")):
        line = [sys.executable, "-c", program, "crossover", *map(str, arguments)]
        done = subprocess.run(line, capture_output=True, text=True, check=True, env={**ENVIRONMENT, **NO_GPU})
        assert done.stderr.splitlines()[-1] == needed


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--ops", "matmul,fft"], "'fft' is not one of matmul, add, softmax, layernorm, conv2d"),
        (["--ops", ""], "'' is not one of"),
        (["--sizes", "64-128"], "'64-128' is not a size from 1 to 1000000000"),
        (["--sizes", "128:64"], "'128:64' is not a range of sizes such as 64:8192"),
        (["--sizes", "0:64"], "'0' is not a size"),
        (["--sizes", "64,"], "'' is not a size"),
        (["--sizes", "1:2:3"], "'2:3' is not a size"),
        (["--sizes", f"64,1{'0' * 400}", "--ops", "add"], "is not a size from 1 to 1000000000"),
        (["--sizes", f"64:{'9' * 5000}"], "argument --sizes: '99999"),
        (["--sizes", "1000000001"], "argument --sizes: '1000000001' is not a size from 1 to 1000000000"),
        (["--sizes", "\u0660,64"], "is not a size"),
        (["--max-time", "0"], "'0' is not a number above zero"),
        (["--max-time", "nan"], "'nan' is not a number above zero"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--format", "html"], "invalid choice: 'html'"),
    ],
)
def test_arguments_that_cannot_work_are_refused_with_what_can(crossover, arguments, complaint):
    done = crossover(*arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_is_shown_as_it_was_measured(crossover):
    assert fails(crossover("--from", H200, "--sizes", "64"), "--from measures nothing")


@pytest.mark.slow
def test_the_largest_size_is_one_that_does_not_fit():
    done = forge("crossover", "--ops", "add", "--sizes", "8,16,1000000000", *QUICK, environment=NO_GPU)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^CPU: no larger size: .*1000000000", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_a_first_call_that_takes_too_long_ends_its_curve():
    done = forge("crossover", "--ops", "add", "--sizes", "2048,4096", "--max-time", "1e-6", environment=NO_GPU)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^CPU: no larger size: a call at 2048 took [\d.]+ [mµ]s$", done.stdout, re.MULTILINE)
    assert not re.search(r"^ *4096 ", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found["setting"].pop("cpu"),
        lambda found: found.update(schema_version=99),
        lambda found: found.pop("schema_version"),
        lambda found: found.update(operations=[]),
        lambda found: found["operations"][0]["curves"][0].update(way="sideways"),
        lambda found: found["operations"][0]["curves"][0]["points"].reverse(),
        lambda found: found["operations"][0]["curves"][0]["points"][0].update(us=-1.0),
        lambda found: found["operations"][0]["curves"][0]["points"][0].update(size="64"),
        lambda found: found["operations"][0]["curves"][0]["points"][-1].update(size=2**70),
        lambda found: found["operations"][0]["curves"][0]["points"][0].update(us=1e-320, low_us=1e-320),
        lambda found: found["operations"][0]["curves"][0]["points"][0].update(us=1e300, high_us=1e300),
        lambda found: found["operations"][0]["curves"][0]["points"][0].update(samples=-5),
        lambda found: found["setting"].update(threads=-5),
    ],
)
def test_a_file_that_is_something_else_is_refused(change, tmp_path):
    found = json.loads(H200.read_text(encoding="utf-8"))
    change(found)
    path = tmp_path / "c.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"c\.json: not what crossover --format json wrote"):
        read_crossover(path)


def test_a_file_that_is_missing_or_no_json_is_one_line(crossover, tmp_path):
    assert fails(crossover("--from", tmp_path / "none.json"), "none.json")
    (tmp_path / "c.json").write_bytes(b"\xff\xfe")
    assert fails(crossover("--from", tmp_path / "c.json"), "not what crossover --format json wrote")


@pytest.mark.slow
@pytest.mark.usefixtures("_signals_act")
def test_control_c_exits_with_130():
    line = [
        *COMMAND,
        "crossover",
        "--ops",
        "matmul",
        "--sizes",
        "64:4096",
        "--max-time",
        "60",
    ]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env={**ENVIRONMENT, **NO_GPU}) as process:
        assert "of 7)" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=HANGS_S) == 130
        assert "Traceback" not in process.stderr.read()


@pytest.mark.slow
def test_a_terminal_gets_one_line_that_counts():
    terminal, end = pty.openpty()
    line = [*COMMAND, "crossover", "--ops", "add,softmax", "--sizes", "8:16", "--max-time", "0.5"]
    environment = {**ENVIRONMENT, **NO_GPU, "TERM": "xterm"}
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=end, env=environment) as process:
        os.close(end)
        shown = b""
        while part := read_from(terminal):
            shown += part
        assert process.wait(timeout=HANGS_S) == 0
    os.close(terminal)
    counts = [int(count) for count in re.findall(rb"(\d) of 4", shown)]
    assert counts
    assert all(first <= second for first, second in pairwise(counts))
    assert b"\n" not in shown, "each in the place of the last"
    assert shown.endswith(b"\r\x1b[K"), "and at the end it is gone"


def read_from(terminal):
    try:
        return os.read(terminal, 4096)
    except OSError:  # Linux says so where the other end is closed
        return b""
