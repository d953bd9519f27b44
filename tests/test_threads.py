"""Fits and regions in several threads: each fit has its own regions, and no thread disturbs another's."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_forge_profiling import ForgeProfilerCallback, region
from lightning_forge_profiling.timing.region import set_region_sink
from tests.models import Classifier, Samples, every_step, loader, quiet_trainer
from tests.outcomes import HANGS_S, logged, recorded_steps, tables, the_trace, warnings_of
from tests.test_region import Sink

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")


def user_regions(callback):
    return set(callback.analysis().run.timing.user_regions)


def in_threads(*functions):
    """Run each in a thread of its own, to the end."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [running.result(HANGS_S) for running in [pool.submit(function) for function in functions]]


class Meets(Classifier):
    """Is in its region while the other one is in its own, in every step."""

    def __init__(self, name, barrier):
        super().__init__()
        self.name, self.barrier = name, barrier

    def training_step(self, batch):
        self.barrier.wait(HANGS_S)
        with region(self.name), region("both"):
            self.barrier.wait(HANGS_S)
            loss = super().training_step(batch)
            self.barrier.wait(HANGS_S)
        self.barrier.wait(HANGS_S)
        return loss


def test_fits_in_two_threads_have_their_own_regions_and_one_of_them_records(tmp_path, make_trainer, capsys, caplog):
    barrier = threading.Barrier(2)
    callbacks = {
        name: (ForgeProfilerCallback(2, 4, trace_dir=tmp_path / name), every_step(warmup_steps=0)) for name in "ab"
    }

    def fit(name):
        make_trainer(*callbacks[name], logger=False).fit(Meets(name, barrier), loader())

    in_threads(lambda: fit("a"), lambda: fit("b"))
    for name, (_, throughput) in callbacks.items():
        assert user_regions(throughput) == {name, "both", "attention"}
        assert {"time/both_ms", f"time/{name}_ms"} <= throughput.summary().keys()
    reports = sorted((forge.trace_report() for forge, _ in callbacks.values()), key=lambda report: report.status)
    assert [report.status for report in reports] == ["skipped", "written"], "PyTorch has one profiler"
    assert "another fit in this process" in reports[0].message
    assert len(warnings_of(caplog)) == 1
    assert recorded_steps(the_trace(tmp_path)) == [2, 3]
    assert tables(capsys.readouterr().out) == 2


@pytest.mark.slow
def test_fits_in_two_threads_record_one_after_the_other(tmp_path, make_trainer):
    callbacks = [ForgeProfilerCallback(2, 4, trace_dir=tmp_path / name) for name in "ab"]
    for callback in callbacks:
        in_threads(lambda: make_trainer(callback, logger=False).fit(Classifier(), loader()))  # noqa: B023  (at once)
    assert [callback.trace_report().status for callback in callbacks] == ["written", "written"]


class Pools(Classifier):
    """Calls a pool of threads in each of its steps, all of them in the same region at the same time."""

    def __init__(self):
        super().__init__()
        self.part = region("part")
        self.pool, self.barrier = ThreadPoolExecutor(3), threading.Barrier(4)

    def helps(self):
        with self.part, region("theirs"):
            self.barrier.wait(HANGS_S)
            self.barrier.wait(HANGS_S)

    def training_step(self, batch):
        helping = [self.pool.submit(self.helps) for _ in range(3)]
        with self.part:
            self.barrier.wait(HANGS_S)
            loss = super().training_step(batch)
        self.barrier.wait(HANGS_S)
        for each in helping:
            each.result(HANGS_S)
        return loss

    def on_train_end(self):
        self.pool.shutdown()


def test_regions_in_helper_threads_are_skipped_and_disturb_nothing(tmp_path, make_trainer, caplog):
    throughput = every_step(warmup_steps=0)
    make_trainer(throughput).fit(Pools(), loader())
    assert warnings_of(caplog) == []
    assert user_regions(throughput) == {"part", "attention"}
    assert len(logged(tmp_path)) >= 7
    assert all(0 < row["time/part_ms"] <= row["time/forward_ms"] for row in logged(tmp_path))


class Nested(torch.autograd.Function):
    """Runs a backward pass inside its backward, as reentrant checkpointing does, `depth` times.

    From 60 on PyTorch goes on in threads of its own, as it does from the start for the part of a GPU.
    """

    threads = None

    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with region("backward of mine"):
            if Nested.threads is not None:
                Nested.threads.add(threading.get_ident())
            if ctx.depth:
                with torch.enable_grad():
                    Nested.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).sum().backward()
        if ctx.depth == 0:
            with region("the innermost"):
                pass
        return gradient, None


class NestedBackward(Classifier):
    def training_step(self, batch):
        return Nested.apply(super().training_step(batch), 70)


def test_a_region_in_backward_is_the_fits_in_autograds_own_threads_too(make_trainer, caplog, monkeypatch):
    monkeypatch.setattr(Nested, "threads", set())
    throughput = every_step(warmup_steps=0)
    make_trainer(throughput, logger=False).fit(NestedBackward(), loader())
    assert len(Nested.threads) > 1, "autograd has used a thread of its own"
    assert user_regions(throughput) == {"backward of mine", "the innermost", "attention"}
    assert warnings_of(caplog) == []


def test_a_backward_pass_of_another_thread_is_not_the_fits(make_trainer):
    class Beside(Classifier):
        def training_step(self, batch):
            in_threads(lambda: Nested.apply(torch.ones(1, requires_grad=True), 0).sum().backward())
            return super().training_step(batch)

    throughput = every_step(warmup_steps=0)
    make_trainer(throughput, logger=False).fit(Beside(), loader())
    assert user_regions(throughput) == {"attention"}


def test_with_two_fits_a_region_in_a_thread_of_autograds_is_neithers(make_trainer):
    barrier = threading.Barrier(2)

    class Waits(NestedBackward):
        def on_before_backward(self, loss):
            barrier.wait(HANGS_S)

        def on_after_backward(self):
            barrier.wait(HANGS_S)

    callbacks = [every_step(warmup_steps=0) for _ in range(2)]
    in_threads(*(lambda each=each: make_trainer(each, logger=False).fit(Waits(), loader()) for each in callbacks))
    # the outer ones are in the fit's own thread
    assert [user_regions(callback) for callback in callbacks] == [{"attention", "backward of mine"}] * 2


@contextmanager
def sent_to(sink):
    before = set_region_sink(sink)
    yield sink
    set_region_sink(before)


def test_one_region_object_may_be_open_in_two_threads():
    part, barrier = region("part"), threading.Barrier(2)

    def use():
        with sent_to(Sink()) as sink, part:
            barrier.wait(HANGS_S)
            assert sink.seen == ["+part"]
        barrier.wait(HANGS_S)
        return sink.seen

    assert in_threads(use, use) == [["+part", "-part"]] * 2


class Asks(Samples):
    """Its samples say which process made them, and whether a region there was sent anywhere."""

    sink = None

    def __getitem__(self, i):
        before = len(self.sink.seen)
        with region("augment"):
            pass
        return torch.tensor([os.getpid(), len(self.sink.seen) - before])


@pytest.mark.linux
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_worker_of_a_loader_times_nothing():
    data = Asks(8)
    with sent_to(Sink()) as sink:
        data.sink = sink
        made = list(DataLoader(data, 4, num_workers=1, multiprocessing_context="fork"))
        assert [sent for batch in made for pid, sent in batch.tolist() if pid != os.getpid()] == [0] * 8
        assert [sent for batch in DataLoader(data, 4) for _, sent in batch.tolist()] == [2] * 8


@pytest.mark.gpu
def test_regions_in_the_backward_pass_of_a_gpu_are_the_fits(tmp_path, caplog):
    """A function's own backward, and a forward that checkpointing runs again there: in a thread of autograd's."""
    computed_in = set()

    class Checkpointed(Classifier):
        def block(self, x):
            computed_in.add(threading.get_ident())
            with region("block"):
                return self.inner(x).relu()

        def forward(self, x):
            return self.head(checkpoint(self.block, x, use_reentrant=False))

        def training_step(self, batch):
            return Nested.apply(super().training_step(batch), 0)

    throughput = every_step(warmup_steps=1)
    quiet_trainer(throughput, accelerator="gpu", default_root_dir=tmp_path).fit(Checkpointed(), loader())
    assert computed_in > {threading.get_ident()}, "autograd has a thread of its own"
    assert user_regions(throughput) == {"block", "backward of mine", "the innermost"}
    assert throughput.summary()["time/block_ms"] > 0
    assert warnings_of(caplog) == []
