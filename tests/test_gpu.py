"""On a real GPU: nothing waits, and the numbers agree with a trace of the same steps."""

import gc
import gzip
import json
import logging
import math
import os
import statistics
import time
from bisect import bisect_left
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from random import Random

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from benchmarks.workloads import GPT, SmallKernels, random_tokens, trainer
from lightning_forge_profiling import CUDATimer, CUDATimerCollection, ForgeProfilerCallback, ThroughputCallback, region
from lightning_forge_profiling.diagnosis.machine_rules import largest_batch
from lightning_forge_profiling.pipeline import analyze
from lightning_forge_profiling.timing.events import DeviceEventSource
from tests.entered_steps import watch
from tests.outcomes import script

pytestmark = pytest.mark.gpu

SYNCS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cuCtxSynchronize")
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


class Trace:
    """The few things these tests read off a trace, in milliseconds."""

    def __init__(self, path):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        self.events = [event for event in events if event.get("ph") == "X"]
        launches = {
            event["args"]["correlation"]: event["ts"] / 1e3
            for event in self.events
            if event.get("cat") in {"cuda_runtime", "cuda_driver"} and "correlation" in event.get("args", {})
        }
        self.gpu = sorted(
            (event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3, launches.get(event["args"].get("correlation"), 0.0))
            for event in self.events
            if event.get("cat") in GPU_WORK
        )

    def spans(self, name):
        return sorted(
            (event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3)
            for event in self.events
            if event["name"] == name and event.get("cat") == "user_annotation"
        )

    def longest_gap_ms(self, start, end):
        """The longest time in [start, end] in which nothing ran on the GPU.

        While the queue is still being worked off, the microseconds between two kernels are nobody's wait: summed over
        some 15 ms they were 0.5 ms.
        """
        longest, reached = 0.0, start
        for begin, finish, _ in self.gpu:
            longest = max(longest, min(begin, end) - reached)
            reached = max(reached, min(finish, end))
        return max(longest, end - reached)

    def region_ms_per_step(self, steps):
        """By region: between its boundaries on the GPU's timeline, and how far those are unsure; means per step.

        The GPU reaches a boundary once the host has, and once all work launched before it has ended: where the GPU
        waits for a slow host, the wait ends a region that the host was still in and begins one that it had entered.
        The host has once it records the event there, which on a slow one is some 20 us after the span's edge; an idle
        GPU takes it up to 10 us later. So a boundary that an idle GPU waits for is unsure by that much.
        """
        recorded = sorted(event["ts"] / 1e3 for event in self.events if event["name"].startswith("cudaEventRecord"))
        edges = [(*span, name) for name in ("forward", "backward", "optimizer") for span in self.spans(f"forge.{name}")]
        at = {}
        times = sorted({time for start, end, _ in edges for time in (start, end)})
        for edge, following in pairwise([*times, math.inf]):
            mark = next(iter(recorded[bisect_left(recorded, edge) :]), math.inf)
            at[edge] = mark if mark < min(following, edge + 0.2) else edge  # else it has none of its own
        spans = [(at[start], at[end], name) for start, end, name in edges]
        boundaries = sorted({time for start, end, _ in spans for time in (start, end)})
        recording = {boundary: boundary - edge + 0.01 for edge, boundary in at.items()}
        ended, works = 0.0, iter(sorted((launch, end) for _, end, launch in self.gpu if launch))
        reached = []
        work = next(works, None)
        for boundary in boundaries:
            while work is not None and work[0] < boundary:
                ended, work = max(ended, work[1]), next(works, None)
            reached.append(max(boundary, ended))
        totals, unsure = defaultdict(float), defaultdict(float)
        for (left, right), (begin, finish) in zip(pairwise(boundaries), pairwise(reached), strict=True):
            around = [(start, name) for start, end, name in spans if start <= left and right <= end]
            if around:
                _, name = max(around)  # the innermost is the latest to start
                totals[name] += finish - begin
                unsure[name] += sum(recording[edge] for edge, at in ((left, begin), (right, finish)) if edge == at)
        return {name: (total / steps, unsure[name] / steps) for name, total in totals.items()}


class Keep(Callback):
    """Keep the recorder's step times, which the callbacks drop at the end, and stamp the steps by itself."""

    def __init__(self):
        self.times = {}
        self.ends = []

    def on_train_batch_end(self, *_):
        self.ends.append(torch.cuda.Event(enable_timing=True))
        self.ends[-1].record()

    def step_ms(self, steps):
        """Mean step by the stamps."""
        torch.cuda.synchronize()
        return self.ends[steps.start - 1].elapsed_time(self.ends[steps.stop - 1]) / len(steps)

    def on_train_start(self, trainer, module):
        watch(trainer.profiler.step_timer, lambda times, *_: self.times.__setitem__(times.step, times))

    def mean(self, name, steps):
        return statistics.fmean(self.times[step].device_ms[name] for step in steps)


def train(tmp_path, module, loader, steps, callbacks, **options):
    run = trainer(str(tmp_path), steps, callbacks=callbacks, **options)
    run.fit(module, loader)
    return run


def test_a_timer_agrees_with_a_known_amount_of_gpu_work():
    work = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        work @ work
    torch.cuda.synchronize()
    timer, timers = CUDATimer(), CUDATimerCollection(["matmul"])
    assert timer.on_device
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        torch.cuda._sleep(10_000_000)  # so that the matmuls follow each other without waiting for the host
        with timer, timers.region("matmul"):
            for _ in range(50):
                work @ work
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if "spin" not in event.name and event.device_type.name == "CUDA"]
    truth = (max(k.time_range.end for k in kernels) - min(k.time_range.start for k in kernels)) / 1e3
    assert timer.elapsed_ms() == pytest.approx(truth, rel=0.02)
    assert timers.elapsed_ms("matmul") == pytest.approx(truth, rel=0.02)


class Syncs(Callback):
    """Count the synchronizing calls of some steady steps with a profiler of its own."""

    def __init__(self, first, last, folder):
        self.first, self.last, self.path = first, last, folder / "syncs.json"
        self.profiler = torch.profiler.profile()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == self.first:
            self.profiler.prepare_trace()
            self.profiler.start_trace()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == self.last:
            with torch.profiler.record_function("the end"):
                pass
            self.profiler.stop_trace()
            self.profiler.export_chrome_trace(str(self.path))

    def count(self):
        events = json.loads(self.path.read_text())["traceEvents"]
        end = next(event["ts"] for event in events if event.get("name") == "the end")
        return sum(event.get("name") in SYNCS and event["ts"] < end for event in events)


@pytest.mark.parametrize("workload", [GPT, SmallKernels])
def test_the_training_path_has_as_many_synchronizations_as_without_us(tmp_path, workload):
    counts = []
    for callbacks in ([], [ThroughputCallback(warmup_steps=2), ForgeProfilerCallback(10**6, 10**6 + 1)]):
        loader = random_tokens(40) if workload is GPT else torch.utils.data.DataLoader(torch.randn(40, 1, 64), None)
        syncs = Syncs(20, 30, tmp_path)
        precision = "bf16-true" if workload is GPT else 32
        train(tmp_path, workload(), loader, 35, [*callbacks, syncs], precision=precision)
        counts.append(syncs.count())
    print(f"{workload.__name__}: synchronizing calls in 10 steps without and with us: {counts}")
    assert counts[1] == counts[0]


def test_nothing_of_ours_waits_while_training(tmp_path, monkeypatch):
    training = []

    class NoWaiting:
        """An event that must not be waited for."""

        def __init__(self, event):
            self.event = event
            self.record, self.query = event.record, event.query

        def synchronize(self):
            assert not training, "an event of ours was waited for during training"
            self.event.synchronize()

        def elapsed_time(self, later):
            return self.event.elapsed_time(later.event)

    class Watch(Callback):
        def on_train_start(self, *_):
            training.append(True)

        def on_train_end(self, *_):
            training.clear()

    def refuse(*_):
        raise AssertionError("torch.cuda.synchronize during training")

    new_event = DeviceEventSource.new_event
    monkeypatch.setattr(DeviceEventSource, "new_event", lambda self: NoWaiting(new_event(self)))
    original = torch.cuda.synchronize
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: refuse() if training else original(*a))
    ours = ThroughputCallback(warmup_steps=2)
    run = train(
        tmp_path, SmallKernels(), torch.utils.data.DataLoader(torch.randn(40, 1, 64), None), 40, [Watch(), ours]
    )
    assert run.global_step == 40
    assert ours.summary()["time/step_ms"] > 0


def test_region_times_agree_with_the_kernels_of_the_same_steps(tmp_path):
    keep, forge = Keep(), ForgeProfilerCallback(20, 26, profile_memory=False, record_shapes=False)
    every = ThroughputCallback(overhead=None)
    train(tmp_path, GPT(), random_tokens(40), 32, [forge, every, keep], precision="bf16-true")
    truth = Trace(forge.trace_report().path).region_ms_per_step(6)
    ours = {name: keep.mean(name, range(20, 26)) for name in truth}
    for name, (kernels, unsure) in truth.items():
        off = 100 * (ours[name] / kernels - 1)
        print(f"{name}: kernels {kernels:.3f} +- {unsure:.3f} ms, ours {ours[name]:.3f} ms, {off:+.2f} %")
    for name in ("forward", "backward", "optimizer"):
        kernels, unsure = truth[name]
        assert abs(ours[name] - kernels) <= 0.02 * kernels + unsure


def test_the_data_region_is_the_gpus_idle_gap_around_the_fetch(tmp_path):
    steady = {}
    for seconds in (0.0, 0.025):
        keep = Keep()
        forge = ForgeProfilerCallback(20, 26, profile_memory=False, record_shapes=False)
        every = ThroughputCallback(overhead=None)  # the regions of each step are compared
        train(tmp_path, GPT(), random_tokens(60, seconds=seconds), 50, [forge, every, keep], precision="bf16-true")
        steady[seconds] = keep
    trace = Trace(forge.trace_report().path)
    fetches = trace.spans("forge.data")
    gaps = [trace.longest_gap_ms(*fetch) for fetch in fetches]
    gap = statistics.fmean(gaps)
    ours = keep.mean("data", range(20, 26))
    analysed = analyze(forge.trace_report().path).analysis.ranks[0].idle["data"].ms_per_step
    print(f"GPU idle during the fetch {gap:.3f} ms, data region {ours:.3f} ms, by the analysis {analysed:.3f} ms")
    assert len(fetches) == 6
    assert ours == pytest.approx(gap, rel=0.05)
    assert analysed == pytest.approx(statistics.fmean(gaps[1:]), rel=0.05), "the first recorded step does not count"
    after = range(32, 48)
    grown = {}
    for name in ("data", "transfer", "forward", "backward", "optimizer", "other"):
        grown[name] = steady[0.025].mean(name, after) - steady[0.0].mean(name, after)
    step = {seconds: keep.step_ms(after) for seconds, keep in steady.items()}
    growth = step[0.025] - step[0.0]
    print(f"steps {step}, growth {growth:.3f} ms, of all regions {sum(grown.values()):.3f}: {grown}")
    assert sum(grown.values()) == pytest.approx(growth, rel=0.05)


class Captured(SmallKernels):
    """Captures its forward and backward as a CUDA graph in the fourth step and replays it from then on."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.graph = None

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        if batch_idx == 3:
            self.static = batch.clone()
            self.graph = torch.cuda.CUDAGraph()
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph):
                with region("captured"):
                    loss = self.layers(self.static).square().mean()
                self.manual_backward(loss)
        elif self.graph is not None:
            self.static.copy_(batch)
            with region("replayed"):
                self.graph.replay()
        else:
            optimizer.zero_grad()
            self.manual_backward(self.layers(batch).square().mean())
        optimizer.step()


def test_cuda_graph_capture_survives_us(tmp_path):
    ours = ThroughputCallback(warmup_steps=5)
    module = Captured()
    run = train(tmp_path, module, torch.utils.data.DataLoader(torch.randn(40, 1, 64), None), 30, [ours])
    assert run.global_step == 30
    assert module.graph is not None
    summary = ours.summary()
    assert summary["time/replayed_ms"] > 0
    assert "time/captured_ms" not in summary


class Compiled(SmallKernels):
    def __init__(self):
        super().__init__()
        self.compiled = torch.compile(self.body, mode="reduce-overhead", fullgraph=True)

    def body(self, x):
        with region("inside"):
            return self.layers(x).square().mean()

    def training_step(self, batch, batch_idx):
        with region("around"):
            return self.compiled(batch)


def test_reduce_overhead_survives_us_and_trains_the_same(tmp_path):
    losses = []
    for callbacks in ([], [ThroughputCallback(warmup_steps=8), ForgeProfilerCallback(10, 12)]):
        L.seed_everything(1, verbose=False)
        module = Compiled()
        torch._dynamo.reset()
        loader = torch.utils.data.DataLoader(torch.randn(30, 16, 64), None)
        train(tmp_path, module, loader, 25, callbacks)
        losses.append([parameter.detach().cpu() for parameter in module.layers.parameters()])
    assert callbacks[0].summary()["time/around_ms"] > 0
    assert "time/inside_ms" not in callbacks[0].summary()
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


def test_training_is_bit_identical_with_and_without_us(tmp_path):
    weights = []
    for callbacks in ([], [ForgeProfilerCallback(5, 8), ThroughputCallback()]):
        L.seed_everything(7, verbose=False)
        module = GPT(layers=2, width=256)
        train(tmp_path, module, random_tokens(20, batch_size=2), 15, callbacks, precision="bf16-mixed")
        weights.append(([p.detach().cpu() for p in module.parameters()], torch.cuda.get_rng_state()))
    assert all(torch.equal(a, b) for a, b in zip(weights[0][0], weights[1][0], strict=True))
    assert torch.equal(weights[0][1], weights[1][1])


class SmallBatch(GPT):
    """Launches are too slow for 128 tokens, and most of them are those of an update in a loop over the parameters."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4, foreach=False)


# so much for the GPU to do that a host half as fast is ahead of it as well, also from an empty queue
TWICE = {"batch_size": 32}


@pytest.mark.parametrize(
    ("module", "options", "verdict", "drained"),
    [
        (SmallKernels, None, "launch-bound", (90, 100)),
        (SmallBatch, {"batch_size": 1, "length": 128}, "slow-optimizer", (90, 100)),  # and then launches
        (GPT, TWICE, "compute-bound", (0, 5)),
        (GPT, {**TWICE, "seconds": 0.08}, "input-bound", (0, 5)),
    ],
    ids=["small kernels", "small batch", "GPT", "slow loader"],
)
def test_the_run_alone_tells_what_bounds_it(tmp_path, module, options, verdict, drained):
    ours = ThroughputCallback(warmup_steps=12)
    small = torch.utils.data.DataLoader(torch.randn(70, 1, 64), None)
    loader = small if options is None else random_tokens(70, **options)
    precision = 32 if options is None else "bf16-true"
    train(tmp_path, module(), loader, 60, [ours], precision=precision)
    analysis = ours.analysis()
    print(
        f"{analysis.verdict_text} Drained at {analysis.run.timing.gpu_starved_pct:.0f} % of "
        f"{analysis.run.timing.steps} batch ends."
    )
    assert analysis.verdict == verdict
    assert drained[0] <= analysis.run.timing.gpu_starved_pct <= drained[1]


class ReadsLoss(Callback):
    """Waits each step for what the GPU has queued, as a progress bar that shows the loss; `idle_s` longer than that."""

    idle_s = 0.0

    def on_train_batch_end(self, trainer, module, outputs, *_):
        outputs["loss"].item()
        time.sleep(self.idle_s)


class LeavesIdle(ReadsLoss):
    idle_s = 0.02


@pytest.mark.parametrize("reads", [ReadsLoss, LeavesIdle])
def test_a_callback_that_waits_for_queued_work_costs_what_the_gpu_idles(tmp_path, reads):
    ours = ThroughputCallback(warmup_steps=12)
    train(tmp_path, GPT(), random_tokens(70, **TWICE), 60, [ours, reads()], precision="bf16-true")
    run, part = ours.analysis().run, f"callback/{reads.__name__}.on_train_batch_end"
    in_loop_s = run.ledger.parts["steps"] + run.ledger.parts[part]
    idled_s = in_loop_s - run.ledger.goodput * run.ledger.fit_s
    print(
        f"{part} {run.ledger.parts[part]:.2f} of {in_loop_s:.2f} s in the loop, of which the GPU idled {idled_s:.2f} s"
    )
    findings = ours.analysis().findings
    named = {found.evidence.get("part"): found.saves.ms_per_step for found in findings if found.saves is not None}
    if reads.idle_s:
        assert 60 * reads.idle_s <= idled_s < 60 * reads.idle_s + 0.2 * in_loop_s
        assert named[part] == pytest.approx(1e3 * reads.idle_s, rel=0.3)
    else:
        assert run.ledger.parts[part] > 0.3 * in_loop_s, "the host waits there"
        assert idled_s < 0.2 * in_loop_s
        assert part not in named


@pytest.mark.parametrize("kind", [SmallKernels, GPT])
def test_a_steady_window_has_light_steps_that_steps_with_operators_explain(tmp_path, kind):
    model, loader = SmallKernels(), torch.utils.data.DataLoader(torch.randn(60, 64, 64), None)
    if kind is GPT:
        model, loader = GPT(4, 256, 256, 1024), random_tokens(60, batch_size=4, length=256, vocabulary=1024)
    forge = ForgeProfilerCallback(trace_dir=tmp_path)
    precision = "bf16-mixed" if kind is GPT else "32-true"
    trainer(tmp_path, 60, precision=precision, callbacks=[forge, ThroughputCallback()]).fit(model, loader)
    [rank] = analyze(forge.trace_report().path).analysis.ranks
    assert [step.light for step in rank.per_step] == [True] * 6 + [False] * 2
    assert [step.counted for step in rank.per_step] == [False] + [True] * 5 + [False] * 2
    assert {region.name for region in rank.regions} >= {"data", "forward", "backward", "optimizer"}
    assert any("mm" in operator.name for operator in rank.operators)
    assert rank.kinds["matmul"].calls_per_step >= 8
    light, named = ([step.host_ms for step in rank.per_step[1:] if step.light is part] for part in (True, False))
    print(f"{kind.__name__}: {statistics.median(light):.2f} ms light, {statistics.median(named):.2f} ms with operators")
    assert statistics.median(light) < statistics.median(named)


def test_what_the_model_keeps_is_what_a_snapshot_has(tmp_path):
    """By address, in the allocator's own list of blocks, read after a step."""

    class TakesSnapshot(Callback):
        found = None

        def on_train_batch_end(self, trainer, module, *_):
            if trainer.global_step == 30:
                sizes = {
                    block["address"]: block["size"]
                    for segment in torch.cuda.memory_snapshot()
                    for block in segment["blocks"]
                    if block["state"] == "active_allocated"
                }
                parameters = list(module.parameters())
                [optimizer] = trainer.optimizers
                moments = [value for state in optimizer.state.values() for value in state.values()]
                of = {"parameters": parameters, "gradients": [one.grad for one in parameters], "optimizer": moments}
                self.found = {name: sum(sizes[one.data_ptr()] for one in tensors) for name, tensors in of.items()}
                self.found["all"] = sum(sizes.values())

    snapshot, ours = TakesSnapshot(), ThroughputCallback()
    before = torch.cuda.memory_allocated()
    trainer(tmp_path, 30, callbacks=[ours, snapshot]).fit(
        GPT(8, 1024, 64, 8192), random_tokens(30, batch_size=1, length=32, vocabulary=8192)
    )
    memory = ours.analysis().run.memory
    for name in ("parameters", "gradients", "optimizer"):
        assert getattr(memory.model, f"{name}_bytes") == pytest.approx(snapshot.found[name], rel=0.02)
    kept = memory.curve.kept_gib[-1] * 2**30
    assert kept == pytest.approx(snapshot.found["all"], rel=0.02)
    other = snapshot.found["all"] - before - memory.model.bytes
    print(f"The model keeps {memory.model.bytes / 2**20:.1f} MiB; new and not the model's are {other / 2**20:.1f} MiB")


def test_workers_survive_what_earlier_fits_left_behind(tmp_path):
    """A worker that collects a Trainer of before must not destroy the events of its callbacks: it has no CUDA.

    In a process of its own: it would not survive pinned tensors either, which earlier tests may have left behind.
    """
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    ran = script("forked_workers.py", tmp_path, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths})
    assert ran.stdout.count("steps: 16\n") == 4, ran.stderr[-2000:]


class Keeps(SmallKernels):
    """Appends to a list in each step, as a loss with its graph would."""

    def __init__(self, mib=0, *, varies=False):
        super().__init__()
        self.mib, self.varies, self.list = mib, varies, []

    def training_step(self, batch, batch_idx):
        random = Random(self.global_step)  # noqa: S311  (not for secrets)
        torch.empty(random.randrange(1, 512) * 2**20 if self.varies else 2**20, dtype=torch.uint8, device=self.device)
        if self.mib:
            self.list.append(torch.empty(self.mib * 2**20, dtype=torch.uint8, device=self.device))
        return super().training_step(batch, batch_idx)


@pytest.fixture
def four_gib():
    """The process may use 4 GiB more than it has, and has not had more."""
    gc.collect()  # fits of earlier tests
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 4 * 2**30) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def small_batches(steps):
    return torch.utils.data.DataLoader(torch.randn(steps, 64, 64), None)


class StepOfWarning(logging.Handler):
    """The step in which memory is said to grow."""

    def __init__(self, fitting):
        super().__init__()
        self.fitting, self.said = fitting, []

    def emit(self, record):
        if "grows by" in record.getMessage():
            self.said.append((self.fitting.global_step, record.getMessage()))


@pytest.mark.usefixtures("four_gib")
def test_a_growth_is_said_fifty_steps_before_the_memory_is_full(tmp_path):
    ours = ThroughputCallback(record=True)
    fitting = trainer(tmp_path, 5000, callbacks=[ours])
    warnings, log = StepOfWarning(fitting), logging.getLogger("lightning_forge_profiling")
    log.addHandler(warnings)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            fitting.fit(Keeps(4), small_batches(5000))
    finally:
        log.removeHandler(warnings)
    full = ours.analysis().run.timing.all_steps
    [(known, said)] = warnings.said
    print(f"{said} Said at step {known}; it was full at step {full}.")
    assert "grows by 4.00 MiB a step: self.list (list of Keeps, " in said
    assert full - known >= 50
    assert ours.analysis().run.memory.growth.full_step == pytest.approx(full, rel=0.1)


@pytest.mark.usefixtures("four_gib")
def test_what_varies_from_step_to_step_is_no_growth(tmp_path):
    ours = ThroughputCallback()
    trainer(tmp_path, 2000, callbacks=[ours]).fit(Keeps(varies=True), small_batches(2000))
    memory = ours.analysis().run.memory
    assert memory.growth is None
    assert memory.curve.peak_gib[-1] > memory.curve.kept_gib[-1] + 0.4


@pytest.mark.usefixtures("four_gib")
def test_memory_runs_out_at_about_the_batch_that_was_said(tmp_path):
    def train_with(batch):
        gc.collect()  # the fit before this one
        torch.cuda.empty_cache()
        ours = ThroughputCallback(warmup_steps=2)
        tokens = random_tokens(30, batch_size=batch, length=256, vocabulary=8192)
        trainer(tmp_path, 30, callbacks=[ours]).fit(GPT(4, 512, 256, 8192), tokens)
        return ours.analysis().run.memory

    times = largest_batch(train_with(16))
    print(f"A batch {times:.2f} times as large fills it.")
    train_with(int(0.85 * 16 * times))
    with pytest.raises(torch.OutOfMemoryError):
        train_with(int(1.2 * 16 * times))


def test_a_cuda_graph_that_is_recorded_again_is_named_with_its_reason(tmp_path):
    def compiled_part(x, table):
        return (x * table).sum()

    class Records(SmallKernels):
        def __init__(self):
            super().__init__()
            self.part = torch.compile(compiled_part, mode="reduce-overhead", dynamic=False)
            self.tables = [torch.nn.Parameter(torch.ones(64, 64), requires_grad=False) for _ in range(3)]

        def on_fit_start(self):
            self.tables = [torch.nn.Parameter(table.to(self.device), requires_grad=False) for table in self.tables]

        def training_step(self, batch, batch_idx):
            torch.compiler.cudagraph_mark_step_begin()
            self.part(batch, self.tables[self.global_step // 10 % 3])
            return super().training_step(batch, batch_idx)

    ours = ThroughputCallback()
    trainer(tmp_path, 60, callbacks=[ours]).fit(Records(), small_batches(60))
    [again] = [one for one in ours.analysis().run.recompilations if one.kind == "recorded again"]
    print(again)
    assert (again.function, again.times) == ("compiled_part", 2)
    assert "another address" in again.reason
