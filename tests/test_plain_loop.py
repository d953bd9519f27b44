"""`with step():` in loops without a Trainer, Fabric's hooks, and what is seen of such a loop without its help."""

import contextlib
import os
import subprocess
import sys
import threading
import time
import weakref
from importlib.metadata import entry_points

import pytest
import torch
from lightning.fabric import Fabric
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, default_collate
from torch.utils.data.dataloader import _BaseDataLoaderIter

import lightning_forge_profiling as forge
from lightning_forge_profiling.callbacks.timed_callback import TimedCallback
from lightning_forge_profiling.cli.main import main as cli
from lightning_forge_profiling.entry_point import RUN_OPTIONS
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.record.reader import read_run, records_at
from tests.models import SLOW_MS, Classifier, Stream, busy, every_step, loader, quiet_trainer
from tests.outcomes import HANGS_S, PARTITION, SCRIPTS, recorded_steps, script, tables, the_trace, unwrapped

PLANTED_MS = 20.0
LONG_MS = 400.0
"""Where steps have to be shorter than what is planted between them, also on a busy machine."""
FABRIC = "lightning.fabric.callbacks_factory"


class Model:
    """A small classifier, its optimizer, and the steps that it was trained for."""

    def __init__(self, *, slow=""):
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.slow, self.steps = slow, 0

    def train(self, batch, *, update=True):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        if self.slow == "forward":
            busy()
        loss.backward()
        if update:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.slow == "other":
            busy()
        self.steps += 1

    def fit(self, batches, epochs=1, *, between=lambda: None):
        for _ in range(epochs):
            for batch in batches:
                with forge.step():
                    self.train(batch)
            between()

    def weights(self):
        return [parameter.detach().clone() for parameter in self.net.parameters()]


def fails_after(batches, error):
    yield from batches
    raise error


def evaluate(batches):
    """Returns the milliseconds that it took."""
    began = time.perf_counter()
    for _ in batches:
        time.sleep(PLANTED_MS / 1e3)
    return 1e3 * (time.perf_counter() - began)


@pytest.fixture
def profiled(tmp_path):
    """The block to profile, and the callback that has its results."""
    callback = every_step(warmup_steps=2)
    return forge.profile(callback, log_dir=tmp_path), callback


def the_record(folder):
    [rank] = read_run(records_at(folder)[0]).ranks
    return rank


def regions_of(callback):
    return {name: region.device_ms for name, region in callback.analysis().run.timing.regions.items()}


# -- what a user gets ----------------------------------------------------------------------------------------------


def test_a_slow_loader_is_the_verdict_of_a_loop_that_only_marks_its_steps(profiled, capfd):
    block, callback = profiled
    with block:
        Model().fit(loader(160, slow="data"))
    assert callback.analysis().verdict == "input-bound"
    assert regions_of(callback)["data"] >= 4 * SLOW_MS  # four samples a batch
    out, err = capfd.readouterr()
    assert tables(err) == 1
    assert "input-bound: training waits" in err
    assert not out
    assert callback.summary()["throughput/samples_per_sec"] < 1e3 / SLOW_MS


def test_the_regions_of_a_step_are_seen_or_named_and_sum_to_it(profiled):
    block, callback = profiled
    with block:
        model = Model(slow="forward")
        for batch in loader(80):
            with forge.step():
                with forge.region("transfer"):
                    busy()
                model.train(batch)
                with forge.region("other words"):
                    busy()
    times = regions_of(callback)
    assert min(times["transfer"], times["forward"], times["other"]) >= SLOW_MS
    assert 0 < times["optimizer"] < SLOW_MS
    assert 0 < times["backward"] < SLOW_MS
    assert times["other words"] >= SLOW_MS
    assert sum(times[name] for name in PARTITION) == pytest.approx(callback.analysis().run.timing.step_ms.mean)


def test_the_padding_of_a_loop_s_batches_is_known_though_not_of_the_first(profiled):
    block, callback = profiled
    ids, mask = torch.zeros(8, dtype=torch.long), (torch.arange(8) < 2).long()
    model = torch.nn.Embedding(4, 4)
    with block:
        for batch in DataLoader([{"input_ids": ids, "attention_mask": mask}] * 64, 4):
            with forge.step():
                model(batch["input_ids"]).sum().backward()
    assert callback.analysis().run.settings.switches.padding_pct == 75.0


def test_a_progress_bar_that_a_loop_does_not_have_is_no_trouble(tmp_path, caplog):
    callback = every_step(warmup_steps=2, prog_bar=True)
    with forge.profile(callback, log_dir=tmp_path):
        Model().fit(loader(160), epochs=2)
    assert not [record for record in caplog.records if "switched off" in record.getMessage()]
    assert callback.summary()["throughput/steps_per_sec"] > 0


def test_the_record_is_that_of_a_fit(profiled, tmp_path, capsys):
    block, _ = profiled
    with block:
        Model().fit(loader(80))
    rank = the_record(tmp_path)
    assert (rank.end.outcome, rank.end.step, rank.state.step) == ("finished", 20, 20)
    assert rank.begin.settings["strategy"] == "PlainLoop"
    assert rank.state.report.analysis.run.settings.loader.batch_size == 4
    capsys.readouterr()
    assert cli(["show", str(tmp_path / "forge_record")]) == 0
    assert "finished " in capsys.readouterr().out


def test_weights_and_random_numbers_are_those_of_the_loop_alone(profiled):
    alone = Model()
    for batch in loader(80, shuffle=True):
        alone.train(batch)
    drawn = torch.rand(3)
    model = Model()
    with profiled[0]:
        model.fit(loader(80, shuffle=True))
    assert all(map(torch.equal, model.weights(), alone.weights()))
    assert torch.equal(torch.rand(3), drawn)


@pytest.mark.slow
def test_a_window_is_recorded_and_analysed(tmp_path):
    forged = forge.ForgeProfilerCallback(start_step=3, end_step=5)
    with forge.profile(forged, log_dir=tmp_path):
        Model().fit(loader(48))
    assert recorded_steps(the_trace(tmp_path)) == [3, 4]
    report = forged.trace_report()
    assert report.status == "written"
    assert report.summary_path.parent.joinpath("report.html").exists()
    assert forged.analysis().ranks


def test_gradient_accumulation_counts_each_batch_and_each_update(profiled):
    block, callback = profiled
    with block:
        model = Model()
        for number, batch in enumerate(loader(160)):
            with forge.step():
                model.train(batch, update=number % 4 == 3)
    rates = callback.summary()
    assert rates["throughput/optimizer_steps_per_sec"] == pytest.approx(rates["throughput/steps_per_sec"] / 4, rel=0.1)


def test_a_closure_is_forward_and_backward_and_the_rest_the_optimizer(profiled):
    block, callback = profiled
    with block:
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
        for x, _ in loader(80):

            def closure(x=x):
                optimizer.zero_grad()
                loss = model(x).pow(2).sum()
                busy()
                loss.backward()
                return loss

            with forge.step():
                optimizer.step(closure)
    times = regions_of(callback)
    assert times["forward"] >= SLOW_MS > max(times["optimizer"], times["backward"])


def test_without_a_backward_nothing_is_called_forward(profiled):
    block, callback = profiled
    with block:
        for _ in range(20):
            with forge.step(samples=3):
                busy()
    times = regions_of(callback)
    assert times["forward"] == 0
    assert times["other"] >= SLOW_MS
    assert callback.summary()["throughput/samples_per_sec"] <= 3e3 / SLOW_MS


# -- loaders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("validates_on", ["another dataset", "the same dataset"])
def test_validation_between_steps_is_no_part_of_them_and_no_fault_of_the_loader(profiled, validates_on):
    block, callback = profiled
    training = loader(48)
    validation = loader(16, slow="data") if validates_on == "another dataset" else DataLoader(training.dataset, 12)
    took = []
    with block:
        Model().fit(training, epochs=4, between=lambda: took.append(evaluate(validation)))
    assert callback.ledger().counts["validation"] == 4
    ledger = callback.ledger()
    assert ledger.wholes["validation"] * 1e3 == pytest.approx(sum(took), rel=0.1)
    is_slow = 1e3 * ledger.parts["validation/data"] >= 4 * 16 * SLOW_MS
    assert is_slow == (validates_on == "another dataset")
    assert regions_of(callback)["data"] < PLANTED_MS / 2
    assert callback.analysis().run.settings.validation_loader.batch_size == validation.batch_size


def make_loaders(kind, epoch_of={}):  # noqa: B006  (the loader of all epochs)
    """The training batches of an epoch: 48 slow samples in batches of four."""
    if kind == "one for each epoch":
        return loader(48, slow="data")
    if kind == "two at once":
        return zip(epoch_of.setdefault("a", loader(48, slow="data")), epoch_of.setdefault("b", loader(48)), strict=True)
    if kind == "of unknown length":
        return epoch_of.setdefault("stream", DataLoader(Stream(48, slow="data"), 4))
    return epoch_of.setdefault("workers", loader(48, slow="data", num_workers=1))


@pytest.mark.parametrize("kind", ["one for each epoch", "two at once", "of unknown length", "with a worker"])
def test_each_fetch_of_training_is_data_however_the_loader_is_made(profiled, kind):
    block, callback = profiled
    model, fetched, loaders = Model(), [], {}
    with block:
        for _ in range(3):
            batches = make_loaders(kind, loaders)
            batches = iter(batches)
            while True:
                began = time.perf_counter()
                batch = next(batches, None)
                fetched.append(1e3 * (time.perf_counter() - began))
                if batch is None:
                    break
                with forge.step():
                    model.train(batch[0] if kind == "two at once" else batch)
            evaluate(loader(8))
    run = callback.analysis().run
    assert run.timing.regions["data"].device_ms * run.timing.steps >= 0.9 * (sum(fetched[3:-1]) - max(fetched))
    assert callback.ledger().counts["validation"] == 3
    assert run.settings.loader.loaders == (2 if kind == "two at once" else 1)
    assert (run.settings.loader.num_workers, run.settings.loader.unsplit) == (
        kind == "with a worker",
        kind == "of unknown length",
    )


def test_a_fetch_inside_of_the_step_is_data_too(profiled):
    block, callback = profiled
    with block:
        batches, model = iter(loader(80, slow="data")), Model()
        for _ in range(20):
            with forge.step():
                model.train(next(batches))
    times = regions_of(callback)
    assert times["data"] >= SLOW_MS > times["forward"]


def test_the_fetches_of_another_iterable_are_data_with_batches(profiled):
    block, callback = profiled

    def stream():
        for batch in loader(80):
            busy()
            yield batch

    with block:
        Model().fit(forge.batches(map(tuple, stream())))
    assert regions_of(callback)["data"] >= SLOW_MS


def test_named_validation_and_checkpoints_are_no_part_of_a_step(profiled):
    block, callback = profiled
    with block:
        model = Model()
        for number, batch in enumerate(loader(80)):
            with forge.step():
                model.train(batch)
            for name in ("validation", "checkpoint") if number == 9 else ():
                with forge.region(name):
                    model.train(batch)  # on whatever it likes
                    time.sleep(LONG_MS / 1e3)
    parts = callback.ledger().parts
    assert min(parts["validation"], parts["checkpoint"]) >= LONG_MS / 1e3
    assert callback.analysis().run.timing.step_ms.max < LONG_MS


# -- how loops end ---------------------------------------------------------------------------------------------------


def test_an_exception_is_the_scripts_own_and_on_record(profiled, tmp_path, capfd):
    error, model = ValueError("no such batch"), Model()
    with pytest.raises(ValueError, match="no such batch") as raised, profiled[0]:
        model.fit(fails_after(loader(40), error))
    assert raised.value is error
    assert model.steps == 10
    assert the_record(tmp_path).end.outcome == "failed"
    assert the_record(tmp_path).end.exception == "ValueError: no such batch"
    assert tables(capfd.readouterr().err) == 1


def test_a_step_that_fails_and_is_caught_is_no_step(profiled, tmp_path):
    block, callback = profiled
    model = Model()
    with block:
        for number, batch in enumerate(loader(80)):
            try:
                with forge.step():
                    model.train(None if number % 5 == 4 else batch)
            except TypeError:
                continue
    assert (the_record(tmp_path).end.outcome, the_record(tmp_path).end.step) == ("failed", 16)  # the last one did
    assert callback.analysis().run.timing.all_steps == 16


def test_a_step_that_fails_and_is_caught_keeps_nothing_alive(profiled):
    kept = []

    def allocates():
        large = torch.ones(8)
        kept.append(weakref.ref(large))
        raise MemoryError

    with profiled[0]:
        Model().fit(loader(40))
        with contextlib.suppress(MemoryError), forge.step():
            allocates()
        assert kept[0]() is None


def test_loops_one_after_another_have_a_record_each_and_leave_torch_as_it_was(tmp_path, capfd):
    def replaced():
        return _BaseDataLoaderIter.__next__, DataLoader.__iter__, torch.autograd.backward

    before, model = replaced(), Model()
    hooks = [len(optimizers._global_optimizer_pre_hooks), len(optimizers._global_optimizer_post_hooks)]
    block = forge.profile(log_dir=tmp_path)
    for _ in range(2):
        with block:
            for batch in loader(40):
                with forge.step():
                    model.train(batch)
                if model.steps % 10 == 8:
                    break
            assert replaced() != before
        assert replaced() == before
    assert hooks == [len(optimizers._global_optimizer_pre_hooks), len(optimizers._global_optimizer_post_hooks)]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["forge_record", "forge_record.2"]
    assert tables(capfd.readouterr().err) == 2
    assert TimedCallback.loop is None


def test_a_fit_ends_the_loop_before_it_and_step_does_nothing_in_it(profiled, tmp_path, capfd, caplog):
    class Marked(Classifier):
        def training_step(self, batch):
            with forge.step():
                return super().training_step(batch)

    fitted = every_step(warmup_steps=2)
    with profiled[0]:
        Model().fit(loader(40))
        quiet_trainer(fitted, default_root_dir=tmp_path / "fit").fit(Marked(), loader(40))
    assert the_record(tmp_path / "forge_record").end.step == 10
    assert the_record(tmp_path / "fit").end.step == 10
    assert fitted.analysis().run.timing.all_steps == 10
    said = [record.message for record in caplog.records if "step() does nothing" in record.message]
    assert len(said) <= 1  # once in a process
    out, err = capfd.readouterr()
    assert (tables(out), tables(err)) == (1, 1)


def test_the_steps_of_another_thread_are_left_out(profiled):
    block, callback = profiled
    with block:
        Model().fit(loader(40))
        other = threading.Thread(target=Model().fit, args=[loader(40)])
        other.start()
        other.join()
        Model().fit(loader(40))
    assert callback.analysis().run.timing.all_steps == 20


def compiled_graphs():
    """How often an update was compiled in a loop, and what interrupted its graph."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    @torch.compile(backend="eager")
    def update():
        optimizer.step()

    for x, _ in loader(40):
        with forge.step():
            model(x).sum().backward()
            update()
    counters = {name: dict(torch._dynamo.utils.counters[name]) for name in ("stats", "graph_break")}
    torch._dynamo.reset()
    return counters


@pytest.mark.slow
def test_a_compiled_update_is_compiled_as_without(profiled, monkeypatch):
    with profiled[0]:
        found = compiled_graphs()
    monkeypatch.setenv("FORGE_PROFILING", "0")
    with forge.profile():
        assert compiled_graphs() == found
    assert profiled[1].analysis().run.timing.all_steps == 10


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: forge.step(samples="4"), "samples must be a number of samples, got '4'"),
        (lambda: forge.step(samples=-1), "got -1"),
        (lambda: forge.step(samples=True), "got True"),
        (lambda: forge.profile(5), "profile takes ForgeProfilerCallback and ThroughputCallback objects"),
        (lambda: forge.profile(forge.ThroughputCallback(), forge.ThroughputCallback()), "one callback of each kind"),
        (lambda: forge.profile(log_dir=3), "log_dir must be a path, got 3"),
    ],
)
def test_what_cannot_be_meant_is_refused_where_it_is_written(made, says):
    with pytest.raises(ConfigurationError, match=says):
        made()


def test_a_step_within_a_step_and_a_block_within_a_block_are_refused(profiled):
    steps, blocks = r"step\(\) inside of step\(\)", r"profile\(\) inside of profile\(\)"
    with pytest.raises(ConfigurationError, match=steps), profiled[0], forge.step(), forge.step():
        pass
    with pytest.raises(ConfigurationError, match=blocks), forge.profile(), forge.profile():
        pass


def test_a_folder_that_cannot_be_written_is_refused_at_the_first_step(tmp_path):
    (tmp_path / "file").touch()
    block = forge.profile(forge.ForgeProfilerCallback(trace_dir=tmp_path / "file"), log_dir=tmp_path)
    with pytest.raises(ConfigurationError, match="file"), block, forge.step():
        pass
    assert TimedCallback.loop is None


def test_built_in_names_are_skipped_in_a_trainers_fit_with_a_warning(tmp_path, caplog):
    class Names(Classifier):
        def training_step(self, batch):
            with forge.region("forward"):
                return super().training_step(batch)

    callback = every_step(warmup_steps=2)
    quiet_trainer(callback, default_root_dir=tmp_path).fit(Names(), loader(40))
    assert "forward" not in callback.analysis().run.timing.user_regions
    assert [record.message for record in caplog.records if "forward" in record.message] == [
        "region('forward') is not timed in a Trainer's fit: Lightning announces the built-in regions."
    ]


def test_a_block_without_steps_and_functions_without_a_batch_say_so(tmp_path, caplog):
    with forge.profile(log_dir=tmp_path):
        Model()
    with forge.profile(forge.ThroughputCallback(tokens_fn=len), log_dir=tmp_path):
        for _ in range(3):
            with forge.step():
                pass
    said = [record.message for record in caplog.records]
    assert "Nothing was profiled: no step() began inside of profile()." in said
    [of_tokens] = [message for message in said if "tokens_fn" in message]
    assert of_tokens.startswith("tokens_fn needs the batch, which no DataLoader gave: pass it, `with step(batch=")


def test_switched_off_a_step_does_nothing(profiled, tmp_path, monkeypatch):
    monkeypatch.setenv("FORGE_PROFILING", "0")
    with profiled[0]:
        Model().fit(loader(40))
    assert not [*tmp_path.iterdir()]
    assert profiled[1].analysis() is None


# -- Fabric ------------------------------------------------------------------------------------------------------------


def fabric_fit(fabric, *, hooks=("on_train_batch_start", "on_train_batch_end"), marks=False, epochs=1):
    model = Model()
    model.net, model.optimizer = fabric.setup(model.net, model.optimizer)
    for _ in range(epochs):
        for number, batch in enumerate(fabric.setup_dataloaders(loader(80, slow="data"))):
            for hook in hooks[:-1]:
                fabric.call(hook, batch, number)
            if marks:
                with forge.step():
                    model.train(batch)
            else:
                model.train(batch)
            fabric.call(hooks[-1], None, batch, number)
    fabric.call("on_train_end")


@pytest.mark.parametrize(
    ("hooks", "marks"),
    [
        (("on_train_batch_start", "on_train_batch_end"), False),
        (("on_train_batch_start", "on_train_batch_end"), True),
        (("on_train_batch_end",), False),
    ],
)
def test_fabrics_hooks_delimit_the_steps(tmp_path, capfd, hooks, marks):
    callback = every_step(warmup_steps=2)
    fabric = Fabric(
        accelerator="cpu", devices=1, callbacks=[forge.profile(callback, log_dir=tmp_path), forge.profile()]
    )
    fabric_fit(fabric, hooks=hooks, marks=marks)
    assert the_record(tmp_path).end.step == 20
    times = regions_of(callback)
    assert times["data"] >= 3 * SLOW_MS  # four samples a batch
    assert 0 < times["backward"] < SLOW_MS
    assert callback.summary()["throughput/samples_per_sec"] > 0
    assert tables(capfd.readouterr().err) == 1
    assert TimedCallback.loop is None


def test_the_copy_that_fabrics_loader_makes_is_the_transfer(tmp_path):
    class Slow(torch.Tensor):
        def to(self, *arguments, **options):
            busy()
            return super().to(*arguments, **options)

    callback = every_step(warmup_steps=2)
    fabric, model = Fabric(accelerator="cpu", devices=1), Model()
    batches = fabric.setup_dataloaders(
        loader(80, collate_fn=lambda samples: [each.as_subclass(Slow) for each in default_collate(samples)])
    )
    with forge.profile(callback, log_dir=tmp_path):
        model.fit([x.as_subclass(torch.Tensor), y.as_subclass(torch.Tensor)] for x, y in batches)
    times = regions_of(callback)
    assert times["transfer"] >= SLOW_MS > times["data"]


def test_fabrics_validation_hooks_leave_validation_out(tmp_path):
    callback = every_step(warmup_steps=2)
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=[forge.profile(callback, log_dir=tmp_path)])
    model = Model()
    for number, batch in enumerate(loader(80)):
        fabric.call("on_train_batch_start", batch, number)
        model.train(batch)
        fabric.call("on_train_batch_end", None, batch, number)
        if number == 9:
            fabric.call("on_validation_start")
            time.sleep(LONG_MS / 1e3)
            fabric.call("on_validation_end")
    fabric.call("on_train_end")
    assert callback.ledger().parts["validation"] >= LONG_MS / 1e3
    assert callback.analysis().run.timing.step_ms.max < LONG_MS


# -- processes of their own ------------------------------------------------------------------------------------------


def forge_run(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "lightning_forge_profiling", "run", *arguments],
        cwd=cwd, capture_output=True, text=True, timeout=HANGS_S, check=False,
        env={**os.environ, "COLUMNS": "100"},
    )  # fmt: skip


@pytest.mark.slow
def test_a_script_without_a_block_prints_its_table_when_it_ends(tmp_path):
    done = script("plain_loop.py", "nothing", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("weights ")
    assert tables(done.stderr) == 1
    assert "input-bound" in done.stderr
    assert the_record(tmp_path).end.outcome == "finished"
    alone = script("plain_loop.py", "nothing", cwd=tmp_path, env={**os.environ, "FORGE_PROFILING": "0"})
    assert (alone.stdout, tables(alone.stderr)) == (done.stdout, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "steps", "says"),
    [("fail", 20, "ValueError: no such batch"), ("fail later", 24, "ValueError: no such file")],
)
def test_a_script_that_fails_does_so_as_without_and_has_its_table(tmp_path, does, steps, says):
    done = script("plain_loop.py", does, cwd=tmp_path)
    assert done.returncode == 1
    assert says in done.stderr.splitlines()
    assert tables(done.stderr) == 1
    end = the_record(tmp_path).end
    assert (end.outcome, end.exception, end.step) == ("failed", says, steps)


@pytest.mark.slow
def test_a_script_that_is_gone_at_once_keeps_its_exit_code(tmp_path):
    done = script("plain_loop.py", "leave", cwd=tmp_path)
    assert done.returncode == 3
    assert the_record(tmp_path).end is None


@pytest.mark.slow
def test_run_records_the_window_of_a_plain_loop(tmp_path):
    done = forge_run("--window", "8:10", str(SCRIPTS / "plain_loop.py"), "nothing", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert recorded_steps(the_trace(tmp_path)) == [8, 9]
    assert tables(done.stderr) == 1
    assert the_record(tmp_path).end.outcome == "finished"


@pytest.fixture
def _fabric_finds_us():
    [found] = [each for each in entry_points(group=FABRIC) if each.value.startswith("lightning_forge_profiling")] or [0]
    assert found, "install this package anew: pip install --no-deps --no-build-isolation --editable ."


@pytest.mark.slow
@pytest.mark.usefixtures("_fabric_finds_us")
@pytest.mark.parametrize("does", ["hooks", "step"])
def test_run_profiles_a_fabric_loop_that_announces_its_steps(tmp_path, does):
    done = forge_run(str(SCRIPTS / "fabric_loop.py"), does, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert recorded_steps(the_trace(tmp_path)) == [*range(10, 16)]
    assert (the_record(tmp_path).end.step, tables(done.stderr)) == (24, 1)


@pytest.mark.slow
@pytest.mark.parametrize("announced", ["hooks", "step"])
def test_the_callback_that_a_fabric_is_given_profiles_its_steps(tmp_path, announced):
    done = script("fabric_loop.py", "given", announced, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert recorded_steps(the_trace(tmp_path)) == [5, 6, 7]
    assert tables(done.stderr) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("_fabric_finds_us")
@pytest.mark.parametrize("does", ["", "child"])
def test_run_says_what_to_do_in_a_fabric_loop_that_does_not(tmp_path, does):
    done = forge_run(str(SCRIPTS / "fabric_loop.py"), does, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Put each step in `with forge.step():`" in unwrapped(done.stderr)
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
@pytest.mark.usefixtures("_fabric_finds_us")
def test_run_leaves_it_to_the_ranks_that_a_fabric_starts_to_say_what_they_did(tmp_path):
    done = forge_run("--no-window", str(SCRIPTS / "fabric_loop.py"), "forked", "step", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert tables(done.stderr) == 1
    assert "no step of the Fabric loop" not in done.stderr


def test_without_run_fabric_gets_nothing_from_us(monkeypatch):
    monkeypatch.delenv(RUN_OPTIONS, raising=False)
    assert not [one for one in Fabric(accelerator="cpu", devices=1)._callbacks if "forge" in type(one).__module__]


@pytest.mark.slow
def test_two_ranks_share_a_record_and_one_table(tmp_path):
    done = script("fabric_loop.py", "step", "two", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [record] = records_at(tmp_path)
    run = read_run(record)
    assert [(rank.begin.rank, rank.begin.world_size, rank.end.outcome) for rank in run.ranks] == [
        (0, 2, "finished"), (1, 2, "finished"),
    ]  # fmt: skip
    assert tables(done.stderr) == 1
    assert len(run.works) == 2


@pytest.mark.slow
def test_the_line_that_waits_is_named_also_where_few_steps_are_timed_by_region(tmp_path):
    callback = forge.ThroughputCallback(warmup_steps=2, overhead=1e-4)
    with forge.profile(callback, log_dir=tmp_path):
        Model().fit(loader(400, slow="data"))
    run = callback.analysis().run
    assert run.timing.split_steps < run.timing.steps, "most steps are timed as a whole"
    assert run.lines["data"][0].function == "busy"
