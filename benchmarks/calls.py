"""What the single calls cost that a step with our recording is made of.

python -m benchmarks.calls
"""

import contextlib
import io
import logging
import statistics
import tempfile
import time
import timeit
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import PassThroughProfiler
from torch.utils.data import DataLoader

from benchmarks.overhead import OnAndOff, difference_us
from benchmarks.workloads import SmallKernels, trainer
from lightning_forge_profiling import CUDATimerCollection, ThroughputCallback
from lightning_forge_profiling.callbacks.boundary_profiler import BoundaryProfiler
from lightning_forge_profiling.callbacks.lightning_api import Actions
from lightning_forge_profiling.run.step_timer import StepTimer
from lightning_forge_profiling.timing.region_clock import RegionClock


def best_us(call: Callable[[], object], number: int = 500) -> float:
    """Microseconds of one call: the best of 20 loops, less the loop."""
    loops = timeit.repeat(call, number=number, repeat=20)
    empty = timeit.repeat(lambda: None, number=number, repeat=20)
    return (min(loops) - min(empty)) / number * 1e6


def event_calls() -> None:
    """The calls on events, in tight loops."""
    stream: Any = torch.cuda.current_stream()
    generic: Any = torch.Event("cuda", enable_timing=True)
    specific: Any = torch.cuda.Event(enable_timing=True)
    generic.record()
    specific.record()
    torch.cuda.synchronize()
    for name, call in {
        "torch.Event.record()": generic.record,
        "torch.cuda.Event.record()": specific.record,
        "torch.cuda.Event.record(stream)": lambda: specific.record(stream),
        "torch.Event.query()": generic.query,
        "torch.Event.elapsed_time()": lambda: generic.elapsed_time(generic),
        "torch.cuda.is_current_stream_capturing()": torch.cuda.is_current_stream_capturing,
    }.items():
        print(f"{name}: {best_us(call):.3f} µs")


def event_on_the_gpu(calls: int = 200) -> None:
    """What an event between two matmuls costs the GPU, when the host is far ahead."""
    matrix = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)

    def run(*, events: bool) -> float:
        between: list[Any] = [torch.Event("cuda", enable_timing=True) for _ in range(calls)]
        ends: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)  # noqa: SLF001  (the documented way to fill the queue first)
        ends[0].record()
        for event in between:
            matrix @ matrix
            if events:
                event.record()
        ends[1].record()
        torch.cuda.synchronize()
        return float(ends[0].elapsed_time(ends[1])) / calls * 1e3

    pairs = [(run(events=False), run(events=True)) for _ in range(18)][3:]
    more = statistics.median(with_ - without for without, with_ in pairs)
    print(f"an event after each matmul of {statistics.median(p[0] for p in pairs):.1f} µs: {more:+.2f} µs")


def context_managers() -> None:
    """Lightning's pass-through profiler and what we put in its place."""
    ours = BoundaryProfiler(PassThroughProfiler(), StepTimer(CUDATimerCollection((), device="cpu")), Actions())

    def enter(profiler: Any) -> None:
        with profiler.profile("[Callback]X.on_train_batch_start"):
            pass

    theirs_us, ours_us = best_us(lambda: enter(PassThroughProfiler())), best_us(lambda: enter(ours))
    print(f"Lightning's profile(): {theirs_us:.2f} µs, ours {ours_us:.2f} µs")


class OnlyTheProxy(OnAndOff):
    """Switch the proxy of the Trainer's profiler on and off, with the recorder off and our callback in place."""

    def switch(self, trainer: Any, *, on: bool) -> None:
        """Switch the proxy alone."""
        super().switch(trainer, on=on)
        trainer.callbacks = self._callbacks
        self._ours.step_timer.regions.active = False


def train(steps: int, *callbacks: Callback) -> None:
    """The launch-bound loop with `ThroughputCallback` and others."""
    loader = DataLoader(torch.randn(steps + 1, 1, 64), batch_size=None)
    with tempfile.TemporaryDirectory() as root, contextlib.redirect_stdout(io.StringIO()):
        trainer(root, steps, callbacks=[ThroughputCallback(), *callbacks], logger=False).fit(SmallKernels(), loader)


def calls_in_a_run(steps: int = 1500) -> None:
    """How long the calls take where they are made, in a launch-bound loop."""
    spent: dict[str, list[int]] = defaultdict(list)
    places: list[tuple[type, str]] = [(CUDATimerCollection, "switch"), (CUDATimerCollection, "harvest")]
    places += [(RegionClock, "enter"), (RegionClock, "exit"), (StepTimer, "end_step")]
    originals = {(home, name): getattr(home, name) for home, name in places}

    def timed(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter_ns()
            result = original(*args, **kwargs)
            spent[name].append(time.perf_counter_ns() - began)
            return result

        return run

    for (home, name), original in originals.items():
        setattr(home, name, timed(name, original))
    try:
        train(steps)
    finally:
        for (home, name), original in originals.items():
            setattr(home, name, original)
    for name, times in spent.items():
        median, mean = statistics.median(times) / 1e3, statistics.fmean(times) / 1e3
        print(f"{name}: {len(times) / steps:.2f} a step, median {median:.2f} µs, mean {mean:.2f} µs")


def main() -> None:
    """Print them all."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    if torch.cuda.is_available():
        event_calls()
        event_on_the_gpu()
    context_managers()
    calls_in_a_run()
    for what, toggle in {"recording": OnAndOff(32), "only the profiler proxy": OnlyTheProxy(32)}.items():
        train(6400, toggle)
        more, error = difference_us(toggle.steps_us())
        print(f"{what} on and off: {more:+.1f} ± {error:.1f} µs per step")


if __name__ == "__main__":
    main()
