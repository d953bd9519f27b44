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
from lightning_forge_profiling.names import GC_FULL, STEPS
from lightning_forge_profiling.report.text import digits
from lightning_forge_profiling.timing.garbage import GarbageTimer
from tests.models import Classifier, loader
from tests.outcomes import HANGS_S, SCRIPTS, tables
from tests.test_ledger_findings import evidence

pytestmark = pytest.mark.usefixtures("_signals_act")

SLOW_STEP = 33


@pytest.fixture(scope="module")
def _many_objects():
    objects = [[number] for number in range(1_000_000)]
    yield
    objects.clear()
    gc.collect()


class Collects(Classifier):
    """Collects all garbage in its training step: once in every step, or several times in a single one."""

    def __init__(self, only=None):
        super().__init__()
        self.only, self.took_s, self.times = only, 0.0, 0

    def training_step(self, batch):
        if self.only in (None, self.trainer.fit_loop.epoch_loop.batch_idx):
            for _ in range(1 if self.only is None else 3):
                began = time.perf_counter()
                gc.collect()
                self.took_s += time.perf_counter() - began
                self.times += 1
        return super().training_step(batch)


@pytest.mark.usefixtures("_many_objects")
@pytest.mark.parametrize("overhead", [None, 1e-6], ids=["every step split", "most steps plain"])
def test_collections_leave_the_part_in_which_they_happen(make_trainer, overhead):
    ours, model = ThroughputCallback(warmup_steps=0, overhead=overhead), Collects()
    make_trainer(ours, logger=False).fit(model, loader(128))
    ledger = ours.ledger()
    assert ledger.counts[GC_FULL] >= model.times == 32
    assert ledger.parts[GC_FULL] == pytest.approx(model.took_s, rel=0.1)
    assert 0 < ledger.parts[STEPS] < ledger.parts[GC_FULL]
    assert sum(ledger.parts.values()) + ledger.unexplained_s == pytest.approx(ledger.wall_s, abs=1e-8)
    assert sum(span.count for span in ledger.spans if span.part == GC_FULL) >= 32
    assert ours.summary()["run/gc_pct"] > ours.summary()["run/steps_pct"]


@pytest.mark.usefixtures("_many_objects")
@pytest.mark.parametrize("overhead", [None, 1e-6], ids=["every step split", "most steps plain"])
def test_a_step_that_a_collection_makes_slow_names_it(make_trainer, capsys, overhead):
    ours, model = ThroughputCallback(warmup_steps=3, overhead=overhead), Collects(only=SLOW_STEP)
    make_trainer(ours, logger=False).fit(model, loader(800))
    slowest = ours.analysis().run.slowest[0]
    assert slowest.step == SLOW_STEP
    assert slowest.parts_ms[GC_FULL] == pytest.approx(1e3 * model.took_s, rel=0.1)
    said = " ".join(capsys.readouterr().out.split())
    assert f"step {SLOW_STEP}: {digits(slowest.ms)} ms" in said
    assert f"of it {GC_FULL}" in said


@pytest.mark.usefixtures("_many_objects")
def test_a_run_that_mostly_collects_is_told_so(make_trainer, capsys):
    ours = ThroughputCallback(warmup_steps=3)
    make_trainer(ours, logger=False).fit(Collects(), loader(128))
    analysis = ours.analysis()
    assert analysis.verdict == "gc-bound"
    assert "garbage collection of generation 2 takes" in analysis.verdict_text
    assert "gc.freeze()" in analysis.verdict_text
    assert "gc-bound" in capsys.readouterr().out


@pytest.mark.usefixtures("_many_objects")
def test_collections_between_the_regions_are_not_named_twice(make_trainer):
    class CollectsBetween(Classifier):
        def on_train_batch_start(self, *_):
            gc.collect()

    ours = ThroughputCallback(warmup_steps=3)
    make_trainer(ours, logger=False).fit(CollectsBetween(), loader(128))
    assert ours.analysis().verdict == "gc-bound"
    assert "between-regions" not in {found.code for found in ours.analysis().findings}


@pytest.mark.parametrize(
    ("drained_pct", "each_s", "costs_s"),
    [(100.0, 0.02, 2.0), (0.0, 0.02, None), (0.0, 0.3, 25.0), (50.0, 0.1, 5.0)],
    ids=["the GPU waits anyway", "hidden behind a step", "longer than a step", "half of the time"],
)
def test_on_a_gpu_a_collection_costs_what_the_queue_does_not_hide(drained_pct, each_s, costs_s):
    run = evidence(**{GC_FULL: 100 * each_s}, counts={GC_FULL: 100}, drained_pct=drained_pct)
    found = [found for found in combine(None, run).findings if found.code == "gc-bound"]
    assert [one.evidence["seconds"] for one in found] == ([] if costs_s is None else [costs_s])


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


def test_ctrl_c_in_a_collection_ends_the_run(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import gc, sys\n"
        "from lightning.pytorch import Trainer\n"
        "from lightning_forge_profiling import ThroughputCallback\n"
        "from tests.models import Classifier, loader\n"
        "objects = [[number] for number in range(5_000_000)]\n"
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
        seen = 0
        for line in process.stdout:
            seen += line.strip() == "here"
            if seen == 3:
                break
        process.send_signal(signal.SIGINT)  # a collection takes some 0.3 s
        out, err = process.communicate(timeout=HANGS_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1, err
    assert "went on" not in out
    assert out.count("here") <= 2, "it ended within a step or two"
    assert tables(out) == 1
    assert GC_FULL in out


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
