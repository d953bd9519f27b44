"""Python's garbage collections in the ledger: their time, steps they make slow, their finding, Ctrl-C in one."""

import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import types

import pytest

from lightning_forge_profiling import ThroughputCallback
from lightning_forge_profiling.diagnosis.combine import combine
from lightning_forge_profiling.names import GC_FULL, GC_YOUNG, PROFILER, STEPS
from lightning_forge_profiling.report.wording import digits
from lightning_forge_profiling.timing.garbage import GarbageTimer
from lightning_forge_profiling.timing.ledger import LedgerClock
from tests.models import Classifier, loader
from tests.outcomes import HANGS_S, SCRIPTS, summary_of, tables
from tests.test_ledger_findings import evidence

pytestmark = pytest.mark.usefixtures("_signals_act")

MS = 1_000_000
SLOW_STEP = 33


class Collector:
    """A garbage collector by hand: what it collects takes the time that it is given."""

    def __init__(self):
        self.ns, self.callbacks = 0, []
        self.ledger = LedgerClock(0, clock_ns=self.now)
        self.timer = GarbageTimer(self.now, self.callbacks)
        self.ledger.note_garbage(self.timer)

    def now(self):
        return self.ns

    def passes(self, ms):
        self.ns += ms * MS

    def collects(self, ms, generation=2):
        for phase, took_ms in (("start", 0), ("stop", ms)):
            self.passes(took_ms)
            for callback in self.callbacks:
                callback(phase, {"generation": generation, "collected": 0, "uncollectable": 0})

    def read(self):
        """The ledger, with its times in milliseconds."""
        ledger = self.ledger.read()
        assert sum(ledger.parts.values()) + ledger.unexplained_s == pytest.approx(ledger.wall_s)
        return ledger, {part: round(1e3 * seconds, 6) for part, seconds in ledger.parts.items() if seconds}


def test_collections_after_the_end_of_a_part_are_time_of_the_next_one():
    run = Collector()
    run.ledger.enter(STEPS)
    run.passes(100)
    run.collects(30)
    over_ns = run.ns
    run.passes(400)
    run.collects(70)
    run.ledger.turn_to("teardown", over_ns)
    run.passes(50)
    _, parts = run.read()
    assert parts == {STEPS: 100, GC_FULL: 30, "teardown": 400 + 70 + 50}


def test_collections_leave_the_part_in_which_they_happen():
    run = Collector()
    run.ledger.enter("steps")
    run.passes(10)
    run.collects(3)
    run.passes(2)
    run.collects(4)
    run.passes(1)
    run.ledger.exit("steps")
    ledger, parts = run.read()
    assert parts == {"steps": 13, GC_FULL: 7}
    assert (ledger.counts[GC_FULL], ledger.first_s[GC_FULL], ledger.first_s["steps"]) == (2, 0.003, 0.013)
    assert [(span.start_s, span.end_s) for span in ledger.spans if span.part == GC_FULL] == [
        (0.01, 0.013),
        (0.015, 0.019),
    ]


def test_the_first_collection_is_that_of_its_generation():
    run = Collector()
    run.ledger.enter("steps")
    for generation, ms in ((0, 1), (2, 5), (1, 2), (2, 9)):
        run.collects(ms, generation)
        run.ledger.exit("steps")
        run.ledger.enter("steps")
    ledger, parts = run.read()
    assert parts == {GC_YOUNG: 3, GC_FULL: 14}
    assert (ledger.first_s[GC_YOUNG], ledger.first_s[GC_FULL]) == (0.001, 0.005)
    assert (ledger.counts[GC_YOUNG], ledger.counts[GC_FULL]) == (2, 2)


def test_a_collection_in_the_profilers_own_work_is_the_profilers():
    run = Collector()
    run.ledger.enter("steps")
    with run.ledger.inside(PROFILER):
        run.passes(1)
        run.collects(5)
    run.passes(2)
    run.ledger.exit("steps")
    assert run.read()[1] == {PROFILER: 6, "steps": 2}


def test_a_collection_outside_of_all_parts_is_its_own_part():
    run = Collector()
    run.ledger.enter("steps")
    run.passes(2)
    run.ledger.exit("steps")
    run.passes(1)
    run.collects(5)
    run.passes(1)
    ledger, parts = run.read()
    assert parts == {"steps": 2, GC_FULL: 5}
    assert ledger.unexplained_s == pytest.approx(0.002)


@pytest.mark.parametrize(
    ("part", "inside", "explains"),
    [(STEPS, "", True), (STEPS, "data_loader", True), (STEPS, "validation", False), ("startup/fit", "", False)],
)
def test_a_step_that_collections_make_slow_names_them(part, inside, explains):
    run = Collector()
    run.ledger.enter(part)
    for step in range(1, 4):
        run.ledger.begin_step(step)
        run.passes(1)
        if inside:
            run.ledger.enter(inside)
        if step == 2:
            run.collects(4)
            run.collects(3)
        if inside:
            run.ledger.exit(inside)
    run.ledger.begin_step(4)
    _, parts = run.read()
    assert parts == {part: 3, GC_FULL: 7}
    assert run.ledger.long_parts() == ({2: {GC_FULL: 0.007}} if explains else {})


class Collects(Classifier):
    """Collects all garbage in its training step: once in every step, or several times in a single one."""

    def __init__(self, only=None):
        super().__init__()
        self.only, self.took_s = only, 0.0

    def training_step(self, batch):
        if self.only in (None, self.trainer.fit_loop.epoch_loop.batch_idx):
            for _ in range(1 if self.only is None else 3):
                began = time.perf_counter()
                gc.collect()
                self.took_s += time.perf_counter() - began
        return super().training_step(batch)


@pytest.fixture
def _some_objects():
    """So many that a collection takes longer than a step, and all the others left out."""
    gc.collect()
    gc.freeze()
    objects = [[number] for number in range(400_000)]
    yield
    objects.clear()
    gc.unfreeze()


@pytest.fixture(params=[False, True], ids=["", "with a callback in Python"])
def _another_callback(request):
    """A callback in Python, as Hypothesis has one: a signal that arrives in a collection is handled in it."""

    def callback(phase, info):
        pass

    if request.param:
        gc.callbacks.append(callback)
    yield
    if request.param:
        gc.callbacks.remove(callback)


@pytest.mark.slow
@pytest.mark.usefixtures("_some_objects", "_another_callback")
@pytest.mark.parametrize("overhead", [None, 1e-6], ids=["every step split", "most steps unsplit"])
def test_a_run_that_mostly_collects_is_told_so(make_trainer, capsys, overhead):
    ours, model = ThroughputCallback(warmup_steps=3, overhead=overhead), Collects()
    make_trainer(ours, logger=False).fit(model, loader(128))
    ledger, analysis = ours.ledger(), ours.analysis()
    assert ledger.counts[GC_FULL] >= 32
    assert ledger.parts[GC_FULL] > ledger.parts[STEPS]
    assert sum(ledger.parts.values()) + ledger.unexplained_s == pytest.approx(ledger.wall_s, abs=1e-8)
    assert ours.summary()["run/gc_pct"] > ours.summary()["run/steps_pct"]
    assert analysis.verdict == "slow-call", "the line that asks for them, and not all collections"
    assert "go to gc.collect() at tests/test_garbage.py:" in analysis.verdict_text
    assert "gc-bound" not in {finding.code for finding in analysis.findings}, "they are the call's"
    assert "slow-call" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("_some_objects")
@pytest.mark.parametrize("overhead", [None, 1e-6], ids=["every step split", "most steps unsplit"])
def test_a_slow_step_of_a_fit_names_the_collections_in_it(make_trainer, tmp_path, overhead):
    gc.unfreeze()  # all objects are in the one step that is to be the slowest
    ours, model = ThroughputCallback(warmup_steps=3, overhead=overhead), Collects(only=SLOW_STEP)
    make_trainer(ours, logger=False).fit(model, loader(160))
    slow = next(slow for slow in ours.analysis().run.timing.slowest if slow.step == SLOW_STEP)
    assert 0.5 * slow.ms < slow.parts_ms[GC_FULL] <= min(slow.ms, 1e3 * model.took_s)
    output = summary_of(tmp_path)
    assert f"step {SLOW_STEP}: {digits(slow.ms)} ms" in output
    assert f"of it {GC_FULL}" in output


@pytest.mark.usefixtures("_some_objects")
def test_collections_between_the_regions_are_not_named_twice(make_trainer):
    class CollectsBetween(Classifier):
        def on_train_batch_start(self, *_):
            gc.collect()

    ours = ThroughputCallback(warmup_steps=3)
    make_trainer(ours, logger=False).fit(CollectsBetween(), loader(64))
    first, *others = ours.analysis().findings
    assert "go to gc.collect() at tests/test_garbage.py:" in first.title
    assert first.evidence["seconds"] == pytest.approx(ours.ledger().parts[GC_FULL], rel=0.2)
    assert not {"gc-bound", "between-regions"} & {finding.code for finding in others}


class DueAtTheStart(Classifier):
    """A full collection is due when training begins: a third more objects than before have survived eleven others."""

    def on_fit_start(self):
        self.thresholds, self.in_steps = gc.get_threshold(), []
        gc.collect()
        gc.set_threshold(10**6, *self.thresholds[1:])  # nothing is collected until training begins
        self.survivors = [[] for _ in range(len(gc.get_objects()) // 3)]
        for _ in range(self.thresholds[2] + 1):
            gc.collect(1)

    def on_train_start(self):
        gc.set_threshold(*self.thresholds)
        gc.callbacks.append(self.note)

    def training_step(self, batch):
        self.activations = [[] for _ in range(2 * self.thresholds[0])]  # young objects, to collect
        return super().training_step(batch)

    def on_train_end(self):
        gc.callbacks.remove(self.note)

    def note(self, phase, info):
        if phase == "stop":
            self.in_steps.append(info["generation"])


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 collects in small pieces")
def test_what_was_allocated_before_training_brings_no_full_collection_into_a_step(make_trainer):
    with_us, plain = DueAtTheStart(), DueAtTheStart()
    make_trainer(ThroughputCallback(), logger=False).fit(with_us, loader(128))
    make_trainer(logger=False).fit(plain, loader(128))
    assert 2 in plain.in_steps  # the plant
    assert with_us.in_steps
    assert 2 not in with_us.in_steps


@pytest.mark.parametrize("untouched", [gc.disable, gc.freeze])
def test_a_collector_that_the_user_switched_off_or_froze_is_left_alone(make_trainer, untouched):
    class Looks(Classifier):
        def on_fit_start(self):
            untouched()
            self.frozen = gc.get_freeze_count()

        def on_train_start(self):
            self.after = gc.isenabled(), gc.get_freeze_count()

    module = Looks()
    try:
        make_trainer(ThroughputCallback(), logger=False).fit(module, loader(32))
    finally:
        gc.enable()
        gc.unfreeze()
    assert module.after[0] is (untouched is gc.freeze)
    assert module.after[1] >= 0.9 * module.frozen  # the frozen are freed where nothing refers to them any more


@pytest.mark.parametrize(
    ("gpu_starved_pct", "each_s", "costs_s"),
    [(100.0, 0.02, 2.0), (0.0, 0.02, None), (0.0, 0.3, 25.0), (50.0, 0.1, 5.0)],
    ids=["the GPU waits anyway", "hidden behind a step", "longer than a step", "half of the time"],
)
def test_on_a_gpu_a_collection_costs_what_the_queue_does_not_hide(gpu_starved_pct, each_s, costs_s):
    run = evidence(**{GC_FULL: 100 * each_s}, counts={GC_FULL: 100}, gpu_starved_pct=gpu_starved_pct)
    findings = [finding for finding in combine(None, run).findings if finding.code == "gc-bound"]
    assert [finding.evidence["seconds"] for finding in findings] == ([] if costs_s is None else [costs_s])


def test_only_functions_of_c_run_in_a_collection_and_none_is_left(make_trainer):
    """Python prints and drops what a callback of the collector raises, and so would drop Ctrl-C."""
    before, during = list(gc.callbacks), []

    class Looks(Classifier):
        def training_step(self, batch):
            during.extend(each for each in gc.callbacks if each not in before)
            assert self.trainer.global_step < 3, "planted"
            return super().training_step(batch)

    with pytest.raises(AssertionError, match="planted"):
        make_trainer(ThroughputCallback(), logger=False).fit(Looks(), loader(32))
    assert during
    for callback in during:
        assert isinstance(callback, functools.partial)
        assert callback.func is setattr
        setters = {getattr(type(callback.args[0]), end, None) for end in ("start", "stop")} - {None}
        assert all(not isinstance(setter.fset, types.FunctionType) for setter in setters)
    assert gc.callbacks == before


@pytest.mark.slow
def test_ctrl_c_in_a_collection_ends_the_run(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import gc, sys\n"
        "from lightning.pytorch import Trainer\n"
        "from lightning_forge_profiling import ThroughputCallback\n"
        "from tests.models import Classifier, loader\n"
        "objects = [[number] for number in range(1_000_000)]\n"
        "class Collects(Classifier):\n"
        "    def training_step(self, batch):\n"
        "        print('here', flush=True)\n"
        "        gc.collect()\n"
        "        return super().training_step(batch)\n"
        "trainer = Trainer(callbacks=[ThroughputCallback(warmup_steps=0)], max_epochs=1, logger=False,\n"
        "    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, accelerator='cpu')\n"
        "trainer.fit(Collects(), loader(400))\n"
        "print('went on')\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SCRIPTS.parents[1])},
    )
    try:
        steps = 0
        for line in process.stdout:
            steps += line.strip() == "here"
            if steps == 3:
                break
        process.send_signal(signal.SIGINT)  # a collection takes some 0.1 s
        out, err = process.communicate(timeout=HANGS_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1, err
    assert "went on" not in out
    assert out.count("here") <= 2, "it ended within a step or two"
    assert tables(out) == 1
    assert GC_FULL in summary_of(tmp_path)


@pytest.mark.slow
def test_collections_of_other_threads_are_not_this_threads():
    gc.collect()  # so that no collection of this thread's own falls due meanwhile
    timer = GarbageTimer()
    other = threading.Thread(target=gc.collect, args=(1,))
    other.start()
    other.join()
    gc.collect(2)
    timer.close()
    taken = timer.take()
    assert 1 not in {collection.generation for collection in taken}
    assert 2 in {collection.generation for collection in taken}
    gc.collect()
    assert not timer.pending


def test_noting_that_begins_within_a_collection_drops_it_and_goes_on():
    timers = []

    class Finalized:
        def __del__(self):
            timers.append(GarbageTimer())

    one = Finalized()
    one.itself = one
    del one
    gc.collect()
    [timer] = timers
    assert timer.take() == []
    gc.collect(1)
    assert [collection.generation for collection in timer.take()] == [1]
    timer.close()
