"""What the callbacks cost beside doing nothing, and beside what others do.

Every contender trains the same model in the same process, in turns, so that a slow minute hits all of them; quoted are
medians over the turns, of the step and of the paired difference to the turn's run without any callback.

    python -m benchmarks.overhead            # the GPU-bound GPT and the launch-bound loop
    python -m benchmarks.overhead --quick    # a smaller GPT, for a machine without a GPU
    python -m benchmarks.overhead --only small
"""

import argparse
import contextlib
import io
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, DeviceStatsMonitor, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler
from torch.utils.data import DataLoader

from benchmarks.workloads import GPT, SmallKernels, random_tokens, trainer
from lightning_forge_profiling import CUDATimerCollection, ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.callbacks.recorder import StepRecorder
from lightning_forge_profiling.timing.events import event_source

NEVER = 10**9


class Stopwatch(Callback):
    """Wall time of the steps from `first` on, with the GPU drained at both ends and at no other time."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.began = self.ended = 0.0
        self.host_ms: list[float] = []
        self._before = 0.0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Stamp the end of a batch."""
        step = len(self.host_ms)
        if step == self.first:
            drain()
            self.began = time.perf_counter()
        elif step == self.last:
            drain()
            self.ended = time.perf_counter()
        now = time.perf_counter()
        self.host_ms.append((now - self._before) * 1e3)
        self._before = now

    @property
    def step_ms(self) -> float:
        """Mean step."""
        return (self.ended - self.began) * 1e3 / (self.last - self.first)

    @property
    def median_host_ms(self) -> float:
        """Median time between two batch ends on the host."""
        return statistics.median(self.host_ms[self.first + 1 : self.last])


class RegionTimers(Callback):
    """Forward, backward and optimizer the way many training loops do it."""

    def __init__(self, *, synchronize: bool) -> None:
        self.synchronize = synchronize
        self.timers = CUDATimerCollection(["forward", "backward", "optimizer"])
        self._running: str | None = None

    def _switch(self, region: str | None) -> None:
        if self.synchronize:
            drain()
        if self._running:
            self.timers.stop(self._running)
        if region:
            self.timers.start(region)
        self._running = region

    def on_train_batch_start(self, *args: Any) -> None:  # noqa: ARG002
        """Forward begins."""
        self._switch("forward")

    def on_before_backward(self, *args: Any) -> None:  # noqa: ARG002
        """Backward begins."""
        self._switch("backward")

    def on_after_backward(self, *args: Any) -> None:  # noqa: ARG002
        """The optimizer begins."""
        self._switch("optimizer")

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Read the times, which waits for them."""
        self._switch(None)
        self.timers.elapsed_all(reset=True)


class OnAndOff(Callback):
    """Switch our recording on and off every few steps of one run, and time the two kinds of blocks.

    By an event of its own at each end of a block, all read after the run, so that nothing is drained: what a block
    takes is GPU time where the GPU is the bottleneck, and host time where the host is.
    """

    def __init__(self, block: int) -> None:
        self.block = block
        self.steps = 0
        self.ends: list[tuple[bool, Any]] = []
        self._ours: Any = None

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """At the end of a block, note the instant and start one of the other kind."""
        self.steps += 1
        if self.steps % self.block:
            return
        if self._ours is None:
            self._ours = trainer.profiler
        on = trainer.profiler is self._ours
        event: Any = event_source().new_event()
        event.record()
        self.ends.append((on, event))
        trainer.profiler = self._ours.inner if on else self._ours
        self._ours.recorder._active = not on  # noqa: SLF001

    def difference_us(self) -> tuple[float, float, int]:
        """Median microseconds per step more with our recording than without, its standard error, and the pairs."""
        drain()
        blocks: dict[bool, list[float]] = {True: [], False: []}
        for (_, before), (on, after) in pairwise(self.ends):
            blocks[on].append(before.elapsed_time(after) * 1e3 / self.block)
        pairs = [on - off for on, off in zip(blocks[True], blocks[False], strict=False)][4:]
        quartiles = statistics.quantiles(pairs)
        # the standard error of a median, from the quartiles of a distribution that is about normal
        error = 1.2533 * (quartiles[2] - quartiles[0]) / 1.349 / len(pairs) ** 0.5
        return statistics.median(pairs), error, len(pairs)


def drain() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def batch_size(batch: torch.Tensor) -> int:
    """Samples in a batch, as ThroughputMonitor asks for them."""
    return batch.shape[0]


def contenders(root: str, steps: int) -> dict[str, Callable[[], dict[str, Any]]]:
    """By name, what to hand to the Trainer. All log to a CSV file at the Trainer's default interval."""
    return {
        "no callback": dict,
        "ThroughputCallback (ours)": lambda: {"callbacks": [ThroughputCallback()]},
        "both callbacks (ours)": lambda: {
            "callbacks": [ForgeProfilerCallback(steps + 100, steps + 101), ThroughputCallback()]
        },
        "ThroughputMonitor": lambda: {"callbacks": [ThroughputMonitor(batch_size_fn=batch_size)]},
        "SimpleProfiler": lambda: {"profiler": SimpleProfiler(dirpath=root, filename="simple")},
        **(
            {"DeviceStatsMonitor": lambda: {"callbacks": [DeviceStatsMonitor(cpu_stats=False)]}}
            if torch.cuda.is_available()  # on a CPU it would need psutil
            else {}
        ),
        "PyTorchProfiler": lambda: {
            "profiler": PyTorchProfiler(
                dirpath=root, filename="torch", schedule=torch.profiler.schedule(wait=steps, warmup=1, active=1)
            )
        },
        "events read every step": lambda: {"callbacks": [RegionTimers(synchronize=False)]},
        "synchronizing timers": lambda: {"callbacks": [RegionTimers(synchronize=True)]},
    }


def one_run(
    root: str, module: L.LightningModule, loader: DataLoader[Any], steps: int, options: dict[str, Any]
) -> Stopwatch:
    """Train once; the first fifth of the steps is warm-up."""
    watch = Stopwatch(steps // 5, steps - 1)
    callbacks = [watch, *options.pop("callbacks", [])]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # tables and bars
        trainer(root, steps, callbacks=callbacks, logger=CSVLogger(root), **options).fit(module, loader)
    return watch


def measure(
    name: str, module: L.LightningModule, loader: DataLoader[Any], *, steps: int, repeats: int, **options: Any
) -> None:
    """Run all contenders in turns and print their table."""
    results: dict[str, list[Stopwatch]] = {}
    with tempfile.TemporaryDirectory() as root:
        runs = contenders(root, steps)
        one_run(root, module, loader, steps, dict(options))  # nobody pays for the process's first steps
        for turn in range(repeats):
            order = list(runs) if turn % 2 == 0 else list(reversed(runs))
            for contender in order:
                results.setdefault(contender, []).append(
                    one_run(root, module, loader, steps, {**options, **runs[contender]()})
                )
        inside = time_inside_hooks(root, module, loader, steps, dict(options))
        with contextlib.redirect_stdout(io.StringIO()):
            toggle = OnAndOff(block=8)  # two rounds of reading results
            run_steps = toggle.block * (160 if steps < 100 else 1000)
            trainer(root, run_steps, callbacks=[ThroughputCallback(), toggle], **options).fit(module, loader)
    base = results["no callback"]
    print(f"\n{name}: {steps} steps, {repeats} interleaved repeats; medians\n")
    print("| contender | step ms | ratio | paired difference µs | host µs per step, difference |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for contender in runs:
        mine = results[contender]
        ratio = statistics.median(m.step_ms / b.step_ms for m, b in zip(mine, base, strict=True))
        paired = statistics.median((m.step_ms - b.step_ms) * 1e3 for m, b in zip(mine, base, strict=True))
        host = statistics.median((m.median_host_ms - b.median_host_ms) * 1e3 for m, b in zip(mine, base, strict=True))
        step = statistics.median(m.step_ms for m in mine)
        print(f"| {contender} | {step:.3f} | {ratio:.4f} | {paired:+.1f} | {host:+.1f} |")
    more, error, pairs = toggle.difference_us()
    print(
        f"\nswitched on and off every {toggle.block} steps of one run: {more:+.1f} ± {error:.1f} µs per step "
        f"(median of {pairs} pairs and its standard error)"
    )
    print(f"time inside our own hooks: {inside:.1f} µs per step at the median")


def time_inside_hooks(
    root: str, module: L.LightningModule, loader: DataLoader[Any], steps: int, options: dict[str, Any]
) -> float:
    """Median microseconds per step spent in the recorder, less what reading the clock costs."""
    spent: list[float] = []
    calls = 0
    originals = {name: getattr(StepRecorder, name) for name in ("enter", "exit", "end_step")}

    def timed(name: str) -> Callable[..., None]:
        original = originals[name]

        def run(self: StepRecorder, *args: Any, **kwargs: Any) -> None:
            nonlocal calls
            began = time.perf_counter_ns()
            original(self, *args, **kwargs)
            spent[-1] += (time.perf_counter_ns() - began) / 1e3
            calls += 1
            if name == "end_step":
                spent.append(0.0)

        return run

    spent.append(0.0)
    for name in originals:
        setattr(StepRecorder, name, timed(name))
    try:
        one_run(root, module, loader, steps, {**options, "callbacks": [ThroughputCallback()]})
    finally:
        for name, original in originals.items():
            setattr(StepRecorder, name, original)
    began = time.perf_counter_ns()
    for _ in range(10_000):
        time.perf_counter_ns()
    clock_us = (time.perf_counter_ns() - began) / 1e3 / 10_000
    return statistics.median(spent[steps // 5 : -1]) - clock_us * calls / max(len(spent) - 1, 1)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=("gpt", "small"), help="one of the two workloads")
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning_forge_profiling").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}, torch {torch.__version__}, Lightning {L.__version__}")
    if args.only == "small":
        pass
    elif args.quick:
        gpt, loader = (
            GPT(layers=2, width=128, length=64, vocabulary=256),
            random_tokens(NEVER, batch_size=4, length=64, vocabulary=256),
        )
        measure("small GPT", gpt, loader, steps=30, repeats=args.repeats)
    else:
        measure("GPU-bound GPT", GPT(), random_tokens(NEVER), steps=60, repeats=args.repeats, precision="bf16-true")
    if args.only == "gpt":
        return
    small = DataLoader(torch.randn(NEVER // 10**4, 1, 64), batch_size=None)
    measure("launch-bound loop of small kernels", SmallKernels(), small, steps=400, repeats=args.repeats)


if __name__ == "__main__":
    main()
