"""`forge-profiling try` starts an unchanged script, changes it from outside, and leaves nothing of it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_forge_profiling.cli.main import main
from tests.outcomes import HANGS_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(4 * HANGS_S),  # a busy machine needs more pairs of runs
    pytest.mark.skipif(sys.platform == "win32", reason="needs process groups"),
]

SCRIPT = """
import os, sys, time, warnings
from pathlib import Path
import torch, lightning as L
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset, get_worker_info
warnings.filterwarnings("ignore"); torch.set_num_threads(1)

class Slow(Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        if "no-workers" in sys.argv and get_worker_info() is not None:
            raise RuntimeError("this dataset takes no workers")
        time.sleep(0.004 if "slow" in sys.argv else 0)
        return torch.full((8,), index / 4000)

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(30))
    def train_dataloader(self):
        return DataLoader(Slow(), 4, shuffle=True)
    def training_step(self, batch, index):
        for layer in self.layers:
            batch = torch.tanh(layer(batch))
        loss = batch.pow(2).mean()
        self.log("loss", loss)
        self.logger.experiment.add_scalar("mine", 1.0)
        self.logger.experiment["a"].append(2)
        return loss
    def validation_step(self, batch, index):
        self.log("val_loss", batch.mean())
    def val_dataloader(self):
        return DataLoader(torch.rand(8, 8), 4)
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
    def on_train_end(self):
        Path("at_train_end").touch()

if "broken" in sys.argv:
    raise ValueError("a broken script")
trainer = L.Trainer(
    max_epochs=4, accelerator="cpu", logger=CSVLogger("csv"), enable_progress_bar=False, enable_model_summary=False,
    detect_anomaly="anomaly" in sys.argv,
    callbacks=[ModelCheckpoint("saved", every_n_train_steps=10), EarlyStopping("val_loss"), LearningRateMonitor()],
)
trainer.fit(Module())
trainer.save_checkpoint("last.ckpt")
Path("after_fit").touch()
"""


def forge(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "lightning_forge_profiling", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=3 * HANGS_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "forge_trials" not in path.parts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tried")
    (folder / "train.py").write_text(SCRIPT)
    return folder


@pytest.fixture(scope="module")
def tried(folder):
    """A script with a slow loader and anomaly detection, tried once."""
    done = forge("try", "--yes", "--only", "anomaly,workers", "train.py", "slow", "anomaly", cwd=folder)
    assert done.returncode == 0, done.stderr
    [result] = folder.glob("forge_trials/*/try.json")
    return done, json.loads(result.read_text())


def state_of(result):
    return {each["name"]: each["state"] for each in result["tried"]}


def test_what_helps_is_kept_with_the_line_to_change(folder, tried):
    done, result = tried
    assert {"anomaly": "kept", "workers": "kept"}.items() <= state_of(result).items()
    kept = {each["name"]: each for each in result["tried"] if each["state"] == "kept"}
    line = next(number for number, text in enumerate(SCRIPT.splitlines(), 1) if "Slow(), 4" in text)
    assert kept["workers"]["places"] == [f"{folder / 'train.py'}:{line}"]
    assert f"train.py:{line}" in done.stdout
    assert result["ratio"]["high"] < 0.7
    assert result["before_ms"] > 16 > result["after_ms"]  # four items of 4 ms each


def test_the_losses_are_bit_identical(tried):
    _, result = tried
    assert {each["losses"] for each in result["tried"] if each["state"] == "kept"} == {"losses bit-identical"}


def test_the_script_leaves_nothing_and_nothing_after_fit_is_done(folder, tried):
    assert files_of(folder) == ["train.py"]


def test_each_trial_has_a_record_that_other_commands_read(folder, tried):
    trials = sorted(path.parent for path in folder.glob("forge_trials/*/*/facts.json"))
    assert [each.name for each in trials[:3]] == ["00-diagnosis", "01-baseline", "02-anomaly"]
    compared = forge("compare", trials[1], trials[2], "--anyway", cwd=folder)
    assert compared.returncode == 0
    assert "step, mean ms" in compared.stdout
    shown = forge("show", trials[1], cwd=folder)
    assert "failed" not in shown.stdout
    assert forge("show", "--predictions", "forge_trials", cwd=folder).returncode == 0


def test_a_trial_that_fails_is_a_result(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    arguments = ("--yes", "--only", "workers", "--format", "json")
    done = forge("try", *arguments, "train.py", "slow", "no-workers", cwd=tmp_path)
    [failed] = json.loads(done.stdout)["tried"]
    assert (failed["name"], failed["state"], failed["text"][:13]) == ("workers", "failed", "RuntimeError:")
    assert done.returncode == 0
    again = json.loads(forge("try", *arguments, "train.py", "slow", "no-workers", cwd=tmp_path).stdout)
    assert again["tried"] == []
    assert [text[:20] for text in again["not_tried"].values()] == ["tried before: failed"]


def test_a_change_that_does_not_help_is_left_out(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = forge("try", "--yes", "--only", "workers", "--format", "json", "train.py", cwd=tmp_path)
    result = json.loads(done.stdout)
    assert "kept" not in state_of(result).values()
    assert result["ratio"] is None


def test_a_script_that_fails_is_bad_input(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = forge("try", "--yes", "train.py", "broken", cwd=tmp_path)
    assert done.returncode == 2
    assert "the script cannot be tried: ValueError: a broken script" in done.stderr


def test_a_call_is_measured_by_leaving_it_out(tmp_path):
    script = SCRIPT.replace('self.logger.experiment.add_scalar("mine", 1.0)', "time.sleep(0.02)")
    (tmp_path / "train.py").write_text(script)
    line = next(number for number, text in enumerate(script.splitlines(), 1) if "sleep(0.02)" in text)
    done = forge("try", "--yes", "--ablate", f"train.py:{line}", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "without time.sleep(0.02)" in done.stdout
    assert "times as fast" in done.stdout
    assert "changes what is learned or logged" in done.stdout
    assert "ms of each step are that call's" in done.stdout


def test_a_call_in_a_file_that_is_not_run_costs_nothing_that_is_known(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "other.py").write_text("print(1)")
    done = forge("try", "--yes", "--ablate", "other.py:1", "train.py", cwd=tmp_path)
    assert f"could not be applied: the file of {tmp_path / 'other.py'}:1 was not run" in done.stdout
    assert "that call's" not in done.stdout


def test_ctrl_c_shows_what_is_known_and_ends_the_script(tmp_path):
    (tmp_path / "train.py").write_text(f"import os\nprint(os.getpid(), file=open('pids', 'a'))\n{SCRIPT}")
    process = subprocess.Popen(
        [sys.executable, "-m", "lightning_forge_profiling", "try", "--yes", "train.py", "anomaly"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    said = []
    for line in process.stderr:  # until what bounds the script after the first change is known, and the next one begins
        said.append(line)
        if "what bounds it now" in "".join(said[:-1]):
            break
    runs = len([line for line in said if line.startswith(("baseline", "run "))])
    while len((tmp_path / "pids").read_text().split()) < runs:  # the process of that run is there
        assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=3 * HANGS_S)
    assert process.returncode == 130
    assert "detect_anomaly=False" in output
    assert "interrupted: this is what was known by then" in output
    [again] = tmp_path.glob("forge_trials/*/*-diagnosis-anomaly")
    assert "verdict" in forge("show", again, cwd=tmp_path).stdout
    started = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(started) >= 4
    for pid in started:  # only those that the script wrote down itself
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


ODD = """
import os, sys, time
import torch, lightning as L
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
print(os.getpid(), file=open("pids", "a")); torch.set_num_threads(1)

class Draws(Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.rand(3, 8, 8)

class Split(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        return map(Draws().__getitem__, range(400) if worker is None else range(worker.id, 400, worker.num_workers))

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization, self.lr = "manual" not in sys.argv, 0.1
    def configure_model(self):
        self.net = torch.nn.Conv2d(3, 4, 3)
    def configure_callbacks(self):
        return [ModelCheckpoint("saved", monitor="val_loss"), EarlyStopping("val_loss")]
    def training_step(self, batch, index):
        loss = self.net(batch).pow(2).mean()
        self.trainer.loggers[-1 if self.automatic_optimization else 1].experiment.log_metrics({"a": 1.0})
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
    def validation_step(self, batch, index):
        self.log("val_loss", self.net(batch).mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)

options = {"devices": 2, "strategy": "ddp"} if "ranks" in sys.argv else {}
trainer = L.Trainer(
    max_epochs=9, accelerator="cpu", logger=[CSVLogger("a"), CSVLogger("b")], enable_progress_bar=False,
    enable_model_summary=False, check_val_every_n_epoch=3, limit_val_batches=0.5, **options,
    callbacks=[] if "manual" in sys.argv or options else [LearningRateFinder(num_training_steps=5)],
)
trainer.fit(Module(), DataLoader(Split() if "split" in sys.argv else Draws(), 4), DataLoader(torch.rand(8, 3, 8, 8), 4))
"""


@pytest.mark.parametrize("kind", ["", "manual", "split"])
def test_what_scripts_do_otherwise_is_no_failure(tmp_path, kind):
    """A model built in a hook, callbacks of the module, a tuner, unknown losses, a dataset that splits itself."""
    (tmp_path / "odd.py").write_text(ODD)
    arguments = ("--yes", "--only", "workers", "--format", "json", "odd.py")
    done = forge("try", *arguments, *kind.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    by_name = {each["name"]: each for each in json.loads(done.stdout)["tried"]}
    assert by_name["workers"]["state"] == "kept"
    assert by_name["workers"]["losses"] == ("losses unknown" if kind == "manual" else "different random numbers")
    assert files_of(tmp_path) == ["odd.py", "pids"]


def test_a_launcher_is_started_anew_and_no_rank_is_left(tmp_path):
    (tmp_path / "odd.py").write_text(ODD)
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", 2, "odd.py", "ranks")
    done = forge("try", "--yes", "--only", "workers", "--budget", "4m", "--format", "json", *launcher, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {each["state"] for each in json.loads(done.stdout)["tried"]} & {"kept", "left out"}
    started = (tmp_path / "pids").read_text().split()
    assert len(started) > 3
    assert [pid for pid in started if is_running(pid)] == []


def is_running(pid):
    """Whether a process is there that has not ended; one that has stays for its parent to ask."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in {"Z", "X"}


def test_a_terminal_is_asked(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)

    class Terminal:
        def isatty(self):
            return True

        def readline(self):
            return "n\n"

    monkeypatch.setattr(sys, "stdin", Terminal())
    assert main(["try", "train.py"]) == 2
    said = capsys.readouterr().err
    assert "go on? [y/N]" in said
    assert "nothing was started" in said
