"""`forge-profiling run`: a script runs as it does without, and each of its Trainers has our callbacks."""

import importlib
import json
import logging
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from importlib.metadata import entry_points
from inspect import signature
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.tuner import Tuner

import lightning_forge_profiling
from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.callbacks import timed_callback
from lightning_forge_profiling.callbacks.timed_callback import TimedCallback
from lightning_forge_profiling.entry_point import RUN_OPTIONS
from lightning_forge_profiling.run.fit_results import FITS
from tests.models import Classifier, loader
from tests.outcomes import HANGS_S, SCRIPTS, recorded_steps, tables, the_trace, traces, wait_for_processes_of
from tests.ports import free_port

GROUPS = {
    "lightning.pytorch": "lightning.pytorch.callbacks_factory",
    "pytorch_lightning": "pytorch_lightning.callbacks_factory",
}
COMMAND = [sys.executable, "-m", "lightning_forge_profiling", "run"]
INSTALLED = Path(sys.executable).with_name("forge-profiling")
BOTH = [ForgeProfilerCallback, ThroughputCallback]

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals"),
    pytest.mark.usefixtures("_signals_act"),
]


@pytest.fixture(scope="module", autouse=True)
def _installed():
    """Lightning finds the callbacks by the installed package's metadata, which a PYTHONPATH does not bring."""
    for group in GROUPS.values():
        ours = [found for found in entry_points(group=group) if found.value.startswith("lightning_forge_profiling")]
        assert len(ours) == 1, (
            f"{len(ours)} entry points of this package in {group}: install it anew, "
            "pip install --no-deps --no-build-isolation --editable ."
        )


def output_of(command, cwd, **options):
    environment = {**os.environ, "COLUMNS": "80"}
    return subprocess.run(
        [str(part) for part in command],
        **{"cwd": cwd, "capture_output": True, "timeout": HANGS_S, "env": environment, **options},
        check=False,
    )


def forge_run(*arguments, cwd, **options):
    return output_of([*COMMAND, *arguments], cwd, **{"text": True, **options})


# --- the script is as it would be without ----------------------------------------------------------------------------

TELLS = """
import sys
print(__name__, sys.argv, sys.path[0], sys.warnoptions, sys.stdout.write_through)
sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1] + b"\\xff\\r\\n")
sys.stderr.write("complains\\n")
sys.exit(EXITS)
"""


@pytest.fixture
def tells(tmp_path):
    """Writes a script that tells how it was started."""

    def write(exits="0"):
        (tmp_path / "tells.py").write_text(TELLS.replace("EXITS", exits))

    return write


def without_and_with(interpreter, target, cwd, **options):
    without = output_of([*interpreter, *target], cwd, **options)
    command = [*interpreter, "-m", "lightning_forge_profiling", "run", *target]
    return without, output_of(command, cwd, **options)


@pytest.mark.parametrize(
    "target",
    [
        ["tells.py"],
        ["./tells.py", "--window", "1:2", "-m", "x", "--help", "--version", "--", "-1", "", "a b", "*", "é"],
        ["tells.py", "--", "--window", "1:2"],
        ["-m", "tells", "--trainer.max_epochs=1", "-m", "tells", "--no-window"],
    ],
    ids=["plain", "arguments", "dashes", "module"],
)
def test_the_script_gets_its_own_arguments_input_and_output(tmp_path, tells, target):
    tells()
    without, with_run = without_and_with([sys.executable], target, tmp_path, input=b"1\r\n\x00\xfe")
    assert b"tells.py" in without.stdout
    assert with_run.stdout == without.stdout
    first, *others, last = with_run.stderr.splitlines()
    assert first.startswith(b"forge-profiling: adding ForgeProfilerCallback() and ThroughputCallback() to every ")
    assert others == without.stderr.splitlines()
    assert last == b"forge-profiling: no Trainer was fitted, so nothing was profiled"
    assert with_run.returncode == without.returncode == 0


def test_the_script_gets_the_options_of_the_interpreter(tmp_path, tells):
    tells()
    interpreter = [sys.executable, "-u", "-W", "error::UserWarning"]
    without, with_run = without_and_with(interpreter, ["tells.py"], tmp_path, input=b"")
    assert b"['error::UserWarning'] True" in without.stdout
    assert with_run.stdout == without.stdout


@pytest.mark.parametrize(("exits", "code"), [("3", 3), ("'so it goes'", 1), ("1 / 0", 1), ("None", 0)])
def test_the_exit_code_is_the_scripts(tmp_path, tells, exits, code):
    tells(exits)
    without, with_run = without_and_with([sys.executable], ["tells.py"], tmp_path, input=b"")
    assert with_run.returncode == without.returncode == code
    said = [line for line in with_run.stderr.splitlines() if not line.startswith(b"forge-profiling: ")]
    assert said == without.stderr.splitlines()


@pytest.mark.smoke
def test_the_installed_command_does_the_same(tmp_path, tells):
    tells("3")
    done = output_of([INSTALLED, "run", "tells.py"], tmp_path, input=b"x")
    assert done.returncode == 3
    assert done.stdout.endswith(b"x\xff\r\n")


@contextmanager
def started(command, cwd, **options):
    process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


WAITS = """
import signal, sys
HANDLER
print("here", flush=True)
while True:
    signal.pause()
"""
HANDLER = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))"


@pytest.mark.parametrize(
    ("sent", "handler", "code"),
    [(signal.SIGINT, "", -signal.SIGINT), (signal.SIGTERM, "", -signal.SIGTERM), (signal.SIGTERM, HANDLER, 5)],
    ids=["SIGINT", "SIGTERM", "handled"],
)
def test_signals_reach_the_script(tmp_path, sent, handler, code):
    (tmp_path / "waits.py").write_text(WAITS.replace("HANDLER", handler))
    with started([*COMMAND, "waits.py"], tmp_path) as process:
        assert process.stdout.readline() == b"here\n"
        process.send_signal(sent)
        _, err = process.communicate(timeout=HANGS_S)
    assert process.returncode == code, err


@pytest.mark.slow
def test_ctrl_c_ends_a_training_with_its_trace_and_table(tmp_path):
    script = [str(SCRIPTS / "interrupted.py"), "without", "9", "unused"]
    command = [*COMMAND, "--window", "2:5", *script]
    with started(command, tmp_path, text=True) as process:
        assert "here" in iter(lambda: process.stdout.readline().strip(), "")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=HANGS_S)
    assert process.returncode == 1, err
    assert "went on" not in out
    assert tables(err) == 1
    wait_for_processes_of(tmp_path)
    assert recorded_steps(the_trace(tmp_path)) == [2, 3, 4]


HAS_MESSAGES = """
import logging, warnings
import PACKAGE as L
from PACKAGE.demos.boring_classes import BoringModel

class Warns(BoringModel):
    def training_step(self, *args):
        warnings.warn("as Python shows it")
        return super().training_step(*args)

logging.getLogger("PACKAGE").setLevel(logging.ERROR)
for _ in range(2):
    trainer = L.Trainer(max_epochs=1, limit_train_batches=4, limit_val_batches=0, enable_progress_bar=False)
    trainer.fit(Warns())
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < (2, 13), reason="an older torch warns itself, and that has to be silenced")
@pytest.mark.parametrize("package", GROUPS)
def test_warnings_come_once_and_lightning_says_no_more_than_it_may(tmp_path, package):
    (tmp_path / "fits.py").write_text(HAS_MESSAGES.replace("PACKAGE", package))
    done = forge_run("--window", "1:2", "fits.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert tables(done.stderr) >= 1
    assert done.stderr.count("UserWarning: as Python shows it") == 1
    assert "GPU available" not in done.stderr
    assert "CPUAllocator" not in done.stderr, "PyTorch does not complain of blocks that are older than the window"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("does", "lines"),
    [
        (("fit", "12"), 1),  # after the window, from when on Kineto has a thread
        (("fit", "6"), 1),  # in a recorded step
        (("further", "12"), 3),  # which has a line, and the process an overview
        (("loop", "12"), 1),
        (("session", "6"), 1),  # a profiler of the script's
    ],
    ids=["after", "within", "further", "loop", "session"],
)
def test_a_process_forked_in_a_step_ends_as_without_us_and_says_nothing(tmp_path, does, lines):
    done = forge_run("--window", "5:8", SCRIPTS / "fork_in_step.py", *does, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "ended with 3\n"), done.stderr
    assert tables(done.stderr) == (does[0] != "session")
    assert done.stderr.count("forge-profiling: ") == lines, done.stderr
    assert "Error" not in done.stderr
    assert recorded_steps(the_trace(tmp_path)) == [5, 6, 7]


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["missing.py"], "missing.py: no such file"),
        (["examples/missing.py"], "examples/missing.py: no such file"),
        (["python", "tells.py"], "Give the script without `python`"),
        (["--no-window", "--window", "1:2", "tells.py"], "not allowed with argument"),
        (["--window", "8:5", "tells.py"], "'8:5' is not a range of steps such as 5:8"),
        (["--epochs", "3", "tells.py"], "unknown option '--epochs'"),
        ([], "required: SCRIPT"),
        (["-m"], "required: SCRIPT"),
    ],
    ids=str,
)
def test_wrong_input_is_said_and_nothing_runs(tmp_path, tells, arguments, complaint):
    tells()
    done = forge_run(*arguments, cwd=tmp_path, input="")
    assert done.returncode == 2
    assert done.stdout == ""
    assert complaint in done.stderr
    assert "adding" not in done.stderr


@pytest.mark.parametrize("target", [["-m", "missing"], ["folder"], ["broken.py"]], ids=str)
def test_what_python_refuses_it_refuses_in_its_own_words(tmp_path, target):
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken.py").write_text("print(")
    without, with_run = without_and_with([sys.executable], target, tmp_path)
    assert with_run.returncode == without.returncode == 1
    said = [line for line in with_run.stderr.splitlines() if not line.startswith(b"forge-profiling: ")]
    assert said == without.stderr.splitlines()


def test_a_package_that_lightning_cannot_find_is_refused(tmp_path, tells):
    tells()
    package = Path(lightning_forge_profiling.__file__).parent
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / package.name).symlink_to(package)
    program = (
        f"import sys; sys.path.append({str(tmp_path / 'path')!r})\n"
        f"from {package.name}.cli.main import main\nsys.exit(main(['run', 'tells.py']))"
    )
    done = output_of([sys.executable, "-I", "-S", "-c", program], tmp_path, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "not installed" in done.stderr


def test_the_help_names_the_defaults_that_the_callbacks_have(tmp_path):
    shown = " ".join(forge_run("--help", cwd=tmp_path).stdout.split())
    profiler = signature(ForgeProfilerCallback).parameters
    assert profiler["start_step"].default is profiler["end_step"].default is None
    assert "record steps A to B-1 (default: six of a steady run)" in shown


# --- what it runs ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_command_of_this_environment_is_found_by_its_name(tmp_path):
    done = forge_run("torchrun", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: torchrun")
    done = forge_run("torchrunn", cwd=tmp_path)
    assert done.returncode == 2
    assert "torchrunn: no such file, and no command of this environment" in done.stderr


SAYS_LEVEL = """
import os, sys
import lightning as L
sys.path.insert(0, CHECKOUT)
from tests.models import Classifier, loader, quiet_trainer
quiet_trainer(max_epochs=2).fit(Classifier(), loader(48))
quiet_trainer(max_epochs=2).fit(Classifier(), loader(48))
print(os.environ.get("KINETO_LOG_LEVEL"))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "window", "left"), [(None, "2:4", "None"), (None, "200:201", "None"), ("4", "2:4", "4")]
)
def test_kineto_is_quiet_unless_the_user_sets_its_level(tmp_path, given, window, left):
    (tmp_path / "fit.py").write_text(SAYS_LEVEL.replace("CHECKOUT", repr(str(SCRIPTS.parents[1]))))
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    given = {} if given is None else {"KINETO_LOG_LEVEL": given}
    done = forge_run("--window", window, "fit.py", cwd=tmp_path, env=environment | given)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{left}\n"
    assert ("profiler_start" in done.stderr) == bool(given)
    assert done.stderr.count("from entry point") == 1


VALIDATES = """
import sys
import lightning as L
sys.path.insert(0, CHECKOUT)
from tests.models import Classifier, loader, quiet_trainer
getattr(quiet_trainer(), sys.argv[1])(Classifier(), loader())
"""


@pytest.mark.slow
@pytest.mark.parametrize("does", ["validate", "fit"])
def test_a_script_that_only_validates_is_told_that_nothing_was_profiled(tmp_path, does):
    (tmp_path / "validates.py").write_text(VALIDATES.replace("CHECKOUT", repr(str(SCRIPTS.parents[1]))))
    done = forge_run("validates.py", does, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines().count("forge-profiling: no Trainer was fitted, so nothing was profiled")
    assert said == (does == "validate")


SHOWS_PATHS = "import os, sys; print(sys.path[1:], os.environ.get('PYTHONPATH')); getattr(sys, 'other', print)()"


@pytest.mark.parametrize("given", [None, "", "one{0}two", "other"])
def test_a_script_without_a_trainer_is_told_so_and_has_its_own_paths(tmp_path, given):
    (tmp_path / "shows.py").write_text(SHOWS_PATHS)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text("import sys; sys.other = lambda: print('customized')")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if given is not None:
        environment["PYTHONPATH"] = given.format(os.pathsep)
    plain = output_of([sys.executable, "shows.py"], tmp_path, env=environment, text=True)
    done = output_of([INSTALLED, "run", "shows.py"], tmp_path, env=environment, text=True)
    assert done.returncode == plain.returncode == 0, done.stderr
    assert done.stdout == plain.stdout.replace("] \n", "] None\n"), "an empty one is none"
    assert ("customized" in done.stdout) == (given == "other")
    assert done.stderr.splitlines()[1:] == ["forge-profiling: no Trainer was fitted, so nothing was profiled"]


def test_switched_off_the_script_runs_alone(tmp_path, tells):
    tells()
    environment = {**os.environ, "FORGE_PROFILING": "0"}
    done = forge_run("tells.py", cwd=tmp_path, env=environment, input=b"", text=False)
    said = b"forge-profiling: FORGE_PROFILING=0: tells.py runs without profiling"
    assert done.stderr.splitlines() == [said, b"complains"]


def test_switched_off_callbacks_do_nothing_and_say_so_once(tmp_path, make_trainer, monkeypatch, caplog):
    monkeypatch.setenv("FORGE_PROFILING", "0")
    timed_callback._say_off.cache_clear()  # another test of this process may have been told
    forge, throughput = ForgeProfilerCallback(2, 4), ThroughputCallback(warmup_steps=1)
    for _ in range(2):
        make_trainer(forge, throughput).fit(Classifier(), loader(48))
    assert (throughput.summary(), throughput.ledger(), forge.trace_report()) == ({}, None, None)
    assert not [path for path in tmp_path.rglob("*") if "forge" in path.name]
    said = [record.message for record in caplog.records if "FORGE_PROFILING" in record.message]
    assert said == ["FORGE_PROFILING=0: nothing is profiled in this process."]


# --- without `run` the entry point costs nothing ---------------------------------------------------------------------


@pytest.mark.parametrize("group", [*GROUPS.values(), "lightning.fabric.callbacks_factory"])
def test_without_run_the_entry_point_imports_nothing_else(tmp_path, group):
    program = (
        "import sys\nfrom importlib.metadata import entry_points\n"
        f"[found] = [each for each in entry_points(group={group!r}) if each.name == 'forge_profiling']\n"
        "before = set(sys.modules)\nassert found.load()() == []\nprint(*sorted(set(sys.modules) - before))"
    )
    environment = {name: value for name, value in os.environ.items() if name != RUN_OPTIONS}
    done = output_of([sys.executable, "-c", program], tmp_path, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    package = "lightning_forge_profiling"
    assert set(done.stdout.split()) <= {package, f"{package}.entry_point", f"{package}.lazy"}


def ours(trainer):
    return [type(callback) for callback in trainer.callbacks if isinstance(callback, TimedCallback)]


@pytest.mark.parametrize("package", GROUPS)
def test_each_trainer_of_either_package_has_one_of_each(monkeypatch, tmp_path, package):
    trainer_of = importlib.import_module(package).Trainer
    options = {"accelerator": "cpu", "logger": False, "default_root_dir": tmp_path}
    assert ours(trainer_of(**options)) == []
    monkeypatch.setenv(RUN_OPTIONS, json.dumps({kind.__name__: {} for kind in BOTH}))
    assert ours(trainer_of(**options)) == ours(trainer_of(**options)) == BOTH


# --- what each Trainer does with them --------------------------------------------------------------------------------


@pytest.fixture
def under_run(monkeypatch):
    """The environment of a script that `run` started."""

    def set_options(**options):
        window = {"start_step": 2, "end_step": 4}
        chosen = {"ForgeProfilerCallback": window, "ThroughputCallback": {"warmup_steps": 1}, **options}
        monkeypatch.setenv(RUN_OPTIONS, json.dumps(chosen))

    monkeypatch.setattr(FITS, "_done", [])  # of other tests in this process
    set_options()
    return set_options


@pytest.mark.usefixtures("under_run")
def test_the_table_is_on_standard_error_and_names_the_trace(tmp_path, make_trainer, capsys):
    make_trainer().fit(Classifier(), loader(48))
    out, err = capsys.readouterr()
    assert tables(out) == 0
    assert tables(err) == 1
    assert f"forge-profiling view {tmp_path / 'csv' / 'version_0'}\n" in err
    assert recorded_steps(the_trace(tmp_path)) == [2, 3]


class Kept(Logger):
    """A logger of the script's own."""

    name, version = "kept", 0

    def __init__(self):
        super().__init__()
        self.metrics = []

    def log_metrics(self, metrics, step=None):
        self.metrics.append(set(metrics))

    def log_hyperparams(self, *_):
        pass


@pytest.mark.slow
@pytest.mark.usefixtures("under_run")
def test_the_scripts_loggers_are_its_own(make_trainer, tmp_path):
    kept = Kept()
    make_trainer(logger=kept, log_every_n_steps=1).fit(Classifier(), loader(48))
    assert not any("throughput/steps_per_sec" in metrics for metrics in kept.metrics)
    [record] = tmp_path.rglob("rank0.jsonl")
    assert "throughput/steps_per_sec" in record.read_text(), "the record has them anyway"


@pytest.mark.usefixtures("under_run")
def test_the_scripts_own_callbacks_stay_and_print_where_they_always_do(tmp_path, make_trainer, capsys):
    forge, throughput = ForgeProfilerCallback(5, 6), ThroughputCallback(warmup_steps=1)
    make_trainer(forge, throughput).fit(Classifier(), loader(48))
    out, err = capsys.readouterr()
    assert (tables(out), tables(err)) == (1, 0)
    assert recorded_steps(the_trace(tmp_path)) == [5]
    assert throughput.summary()["throughput/steps_per_sec"] > 0


@pytest.mark.usefixtures("under_run")
@pytest.mark.parametrize(
    ("own", "steps"),
    [(ThroughputCallback(warmup_steps=3), [2, 3]), (ForgeProfilerCallback(5, 6), [5])],
    ids=["throughput", "profiler"],
)
def test_what_the_script_lacks_is_added_to_what_it_has(tmp_path, make_trainer, capsys, own, steps):
    make_trainer(own).fit(Classifier(), loader(48))
    out, err = capsys.readouterr()
    assert (tables(out), tables(err)) == (1, 0)
    assert "throughput" in out
    assert recorded_steps(the_trace(tmp_path)) == steps


class Subclass(ForgeProfilerCallback):
    pass


@pytest.mark.slow
@pytest.mark.usefixtures("under_run")
@pytest.mark.parametrize(
    ("own", "steps"),
    [(Subclass(5, 6), [5]), (ForgeProfilerCallback(enabled=False), [2, 3])],
    ids=["subclass", "disabled"],
)
def test_a_subclass_counts_and_a_disabled_callback_does_not(tmp_path, make_trainer, own, steps):
    make_trainer(own).fit(Classifier(), loader(48))
    assert recorded_steps(the_trace(tmp_path)) == steps


@pytest.mark.slow
@pytest.mark.usefixtures("under_run")
def test_callbacks_that_the_module_configures_stay(tmp_path, make_trainer, capsys):
    class Configures(Classifier):
        def configure_callbacks(self):
            return [ForgeProfilerCallback(5, 6), ThroughputCallback(warmup_steps=1)]

    make_trainer().fit(Configures(), loader(48))
    assert tables(capsys.readouterr().out) == 1
    assert recorded_steps(the_trace(tmp_path)) == [5]


@pytest.mark.slow
@pytest.mark.usefixtures("under_run")
def test_trainers_that_share_a_list_of_callbacks_each_have_one_table(tmp_path, capsys):
    shared = []  # Lightning extends it in place
    for run, kind in enumerate((Classifier, type("Other", (Classifier,), {}))):
        shared.append(L.Callback())
        trainer = L.Trainer(
            accelerator="cpu", logger=False, max_epochs=1, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=shared, default_root_dir=tmp_path / str(run),
        )  # fmt: skip
        trainer.fit(kind(), loader(48))
        assert tables(capsys.readouterr().err) == 1
        assert len(traces(tmp_path / str(run))) == 1
    assert ours(trainer) == BOTH * 2


@pytest.mark.usefixtures("under_run")
@pytest.mark.parametrize("what", ["validate", "test", "predict"])
def test_without_a_fit_there_is_nothing_to_show(tmp_path, make_trainer, capsys, what):
    getattr(make_trainer(), what)(Classifier(), loader())
    out, err = capsys.readouterr()
    assert tables(out) == tables(err) == 0
    assert traces(tmp_path) == []


@pytest.mark.usefixtures("under_run")
def test_a_trial_run_records_nothing(tmp_path, make_trainer):
    trainer = make_trainer(fast_dev_run=True)
    trainer.fit(Classifier(), loader())
    assert trainer.global_step == 1
    assert traces(tmp_path) == []


@pytest.mark.slow
@pytest.mark.usefixtures("under_run")
def test_a_tuner_leaves_the_window_to_the_fit(tmp_path, make_trainer, capsys):
    class Tunable(Classifier):
        lr = 1e-2

    trainer, model = make_trainer(), Tunable()
    Tuner(trainer).lr_find(model, loader(48), num_training=8)
    assert traces(tmp_path) == []
    trainer.fit(model, loader(48))
    assert tables(capsys.readouterr().err) == 1
    assert recorded_steps(the_trace(tmp_path)) == [2, 3]


@pytest.mark.slow
def test_weights_and_checkpoint_are_those_without(tmp_path, make_trainer, monkeypatch, under_run):
    saved = []
    for options in (None, os.environ[RUN_OPTIONS]):
        monkeypatch.delenv(RUN_OPTIONS) if options is None else monkeypatch.setenv(RUN_OPTIONS, options)
        L.seed_everything(1)
        trainer = make_trainer()
        trainer.fit(Classifier(), loader(48))
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        saved.append(torch.load(tmp_path / "last.ckpt", weights_only=False))
    without, with_run = saved
    assert with_run.keys() == without.keys()
    assert with_run["callbacks"] == without["callbacks"]
    assert all(with_run["state_dict"][name].equal(weight) for name, weight in without["state_dict"].items())


def test_a_folder_that_cannot_be_written_does_not_stop_the_script(make_trainer, under_run, capsys):
    under_run(ForgeProfilerCallback={"start_step": 2, "end_step": 4, "trace_dir": "/dev/null"})
    model = Classifier()
    make_trainer().fit(model, loader(48))
    assert model.seen == 12
    err = capsys.readouterr().err
    assert tables(err) == 1
    assert "no trace" in err


@pytest.mark.parametrize(
    "options",
    ["not JSON", "[]", '{"ForgeProfilerCallback": {"start_step": 5, "end_step": 2}}', '{"Unknown": {}}', "{}"],
)
def test_options_of_another_version_do_not_stop_the_script(make_trainer, monkeypatch, caplog, options):
    monkeypatch.setenv(RUN_OPTIONS, options)
    with caplog.at_level(logging.WARNING, logger="lightning_forge_profiling"):
        trainer = make_trainer()
    assert ours(trainer) == []
    assert ("Nothing will be profiled" in caplog.text) == (options != "{}")


# --- several processes, and other ways to start them -----------------------------------------------------------------


@pytest.mark.slow
def test_it_changes_nothing_in_a_script_for_lightnings_command_line(tmp_path):
    fit = [SCRIPTS / "cli.py", "fit", "--trainer.max_epochs", "1", "--trainer.accelerator", "cpu"]
    done = forge_run("--window", "2:4", *fit, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tables(done.stdout), tables(done.stderr)) == (0, 1)
    assert recorded_steps(the_trace(tmp_path)) == [2, 3]
    [config] = tmp_path.rglob("config.yaml")
    assert "Forge" not in config.read_text()


LAUNCHER = [sys.executable, "-m", "torch.distributed.run"]
TWO = ["--standalone", "--nproc-per-node", "2"]
STARTS = {
    "by Lightning": COMMAND,
    "run, then the launcher": [*COMMAND, *LAUNCHER[1:], *TWO],
    "the launcher, then run": [*LAUNCHER, *TWO, *COMMAND[1:]],
    "the launcher, then the command": [*LAUNCHER, *TWO, "--no-python", INSTALLED, "run"],
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="starts processes that find each other with gloo")
@pytest.mark.parametrize("start", STARTS)
def test_every_rank_is_profiled_and_one_says_so(tmp_path, start):
    training = [SCRIPTS / "distributed.py", "ddp", tmp_path, "plain"]
    environment = {**os.environ, "MASTER_PORT": str(free_port())}
    done = output_of([*STARTS[start], *training], tmp_path, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2
    assert done.stderr.count("forge-profiling: adding") == 1
    assert (tables(done.stdout), tables(done.stderr)) == (0, 1)
    for rank in range(2):
        assert recorded_steps(the_trace(tmp_path, rank)) == [*range(3, 9)]
