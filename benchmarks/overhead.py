"""What the callbacks cost beside doing nothing, and beside what others do.

Every contender trains the same model in a fresh process, in turns; quoted are medians over the turns, of the step and
of the paired differences and ratios to the same turn's run without a callback, these with minimum and maximum. A step
is wall time over the settled steps, with the GPU drained at both ends only. All contenders log to a CSV file at the
Trainer's default interval; checkpoints are off. A second table has the regions' means under the timing budget beside
those with every step split, from the same children. In further processes our recording is switched on and off every
few steps; they differ by more than their own errors, so quoted is their median with its standard error.

TraceML is started the way its users are told to, `traceml run SCRIPT`, which adds its callback to the Trainer; the
child fails if it has not. Where `traceml_ai` cannot be imported this contender is skipped.

    python -m benchmarks.overhead            # the GPU-bound GPT and the launch-bound loop
    python -m benchmarks.overhead --only small --turns 3 --contenders throughput,split,onoff
    python -m benchmarks.overhead --only small --turns 20 --contenders onoff
    python -m benchmarks.overhead --only small --turns 10 --contenders onoff --devices 2    # with DDP
    python -m benchmarks.overhead --quick    # small models and few steps, for a machine without a GPU
"""

import argparse
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import hypot
from pathlib import Path
from random import Random
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, DeviceStatsMonitor, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler
from torch.utils.data import DataLoader

from benchmarks import fresh
from benchmarks.workloads import GPT, SmallKernels, random_tokens, trainer
from lightning_forge_profiling import CUDATimerCollection, ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.callbacks.timed_callback import TimedCallback
from lightning_forge_profiling.timing.completed_steps import DEFAULT_SHARE
from lightning_forge_profiling.timing.events import event_source

CONTENDERS = {
    "none": "no callback",
    "throughput": "ThroughputCallback (ours)",
    "norecord": "without its record (ours, record=False)",
    "both": "both callbacks (ours)",
    "split": "every step split (ours, overhead=None)",
    "monitor": "ThroughputMonitor",
    "simple": "SimpleProfiler",
    "devicestats": "DeviceStatsMonitor",
    "pytorch": "PyTorchProfiler",
    "events": "events read every step",
    "sync": "synchronizing timers",
    "traceml": "TraceML",
}
OFF = "off"
SETTLING = 4
"""Blocks at the start of a run that are not compared."""
ON_OFF = {"onoff": DEFAULT_SHARE, "onoff-split": None}
"""Ours switched on and off within one run, at the default timing budget and with every step split."""


@dataclass(frozen=True, slots=True)
class Size:
    """How many steps to take: before the measured ones, measured, and in and of blocks switched on and off."""

    warmup: int
    measured: int
    block: int
    blocks: int


# Blocks of the launch-bound loop are of whole log intervals (50 steps), or rows would be missed while switched off.
SIZES = {"gpt": Size(15, 60, 8, 80), "small": Size(300, 1000, 100, 24)}
QUICK = Size(12, 24, 4, 24)


class Stopwatch(Callback):
    """Wall time of the steps from `first` on, with the GPU drained at both ends and at no other time."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.began = self.ended = 0.0
        self._step = 0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Stamp the two ends."""
        if self._step == self.first:
            drain()
            self.began = time.perf_counter()
        elif self._step == self.last:
            drain()
            self.ended = time.perf_counter()
        self._step += 1

    @property
    def step_ms(self) -> float:
        """Mean step."""
        return (self.ended - self.began) * 1e3 / (self.last - self.first)


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
    """Take our callbacks out of the run and put them back every few steps, and time every step of both kinds of blocks.

    Of each two blocks either comes first, by chance: what else runs once a second may beat with a fixed order.

    By an event of its own at each step's end, all read after the run, so that nothing is drained: a step takes GPU time
    where the GPU is the bottleneck, and host time where the host is. While off, the Trainer calls none of our hooks and
    has the user's own profiler, and nothing is recorded; only the thread that reads the GPU's sensors goes on. The last
    callback of the Trainer's list, so that a step holds all that we do at its end.

    What we do differs from step to step, most of all in those with a row for the loggers, and a machine's noise is some
    percent of a step. So there is one median for each kind of step, weighted by how many steps are of the kind.
    """

    def __init__(self, block: int) -> None:
        self.block = block
        self.kinds: list[str] = []
        self.ends: list[Any] = []
        self._dice = Random(block)  # noqa: S311  (not cryptography)
        self._coming: list[bool] = []
        self._on = True
        self._callbacks: list[Callback] = []
        self._ours: Any = None
        self._logged_at = -1
        self._was = True, 0

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Note the end of a step and its kind, and at the end of a block start one of the other kind."""
        if self._ours is None:
            self._ours, self._callbacks = trainer.profiler, trainer.callbacks
        event: Any = event_source().new_event()
        event.record()
        self.ends.append(event)
        self.kinds.append(self._kind())
        if len(self.ends) % self.block == 0:
            self._coming = self._coming or self._dice.sample((True, False), 2)
            self._on = self._coming.pop()
            self.switch(trainer, on=self._on)

    def _kind(self) -> str:
        if not self._on:
            return OFF
        ours: Any = next(callback for callback in self._callbacks if isinstance(callback, ThroughputCallback))
        before, self._logged_at = self._logged_at, ours.run.log._logged_at  # noqa: SLF001
        if self._logged_at != before:
            return "with a row"
        step_timer = self._ours.step_timer
        (split, deliver_at), self._was = self._was, (step_timer.regions.is_split, step_timer._completed.due_step)  # noqa: SLF001
        if step_timer._completed.due_step != deliver_at:  # noqa: SLF001
            return "read"
        return "split" if split else "plain"

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:  # noqa: ARG002
        """Put everything back, for our callbacks to hear of the end."""
        if self._ours is not None:
            self.switch(trainer, on=True)

    def switch(self, trainer: Any, *, on: bool) -> None:
        """Put our part of the run in place, or take it out."""
        others = [callback for callback in self._callbacks if not isinstance(callback, TimedCallback)]
        trainer.callbacks = self._callbacks if on else others
        trainer.profiler = self._ours if on else self._ours.inner
        self._ours.step_timer.regions.active = on
        if on:  # the steps in between are no long step, which would be searched for
            self._ours.step_timer._stepped_ns = time.perf_counter_ns()  # noqa: SLF001

    def steps_us(self) -> dict[str, list[float]]:
        """Microseconds of the steps by kind, without the first blocks and the first step of each block."""
        drain()
        steps: dict[str, list[float]] = {}
        for index, (before, after) in enumerate(pairwise(self.ends), 1):
            if index >= SETTLING * self.block and index % self.block:
                steps.setdefault(self.kinds[index], []).append(before.elapsed_time(after) * 1e3)
        return steps


def difference_us(steps: dict[str, list[float]]) -> tuple[float, float]:
    """Microseconds per step more with our recording than without, and the standard error."""
    off, kinds = steps[OFF], [times for kind, times in steps.items() if kind != OFF]
    counted = sum(map(len, kinds))
    more = sum(len(times) * statistics.median(times) for times in kinds) / counted - statistics.median(off)
    errors = [len(times) / counted * median_error(times) for times in kinds]
    return more, hypot(median_error(off), *errors)


def median_error(values: Sequence[float]) -> float:
    """The standard error of a median, from the quartiles of values that are about normal; 0 where one tells nothing."""
    if len(values) == 1:  # as of steps with a row, in a run of a second
        return 0.0
    low, _, high = statistics.quantiles(values)
    return 1.2533 * (high - low) / 1.349 / len(values) ** 0.5


def drain() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def batch_size(batch: torch.Tensor) -> int:
    """Samples in a batch, as ThroughputMonitor asks for them."""
    return batch.shape[0]


def options(contender: str, folder: str, steps: int) -> dict[str, Any]:
    """What to hand to the Trainer."""
    made: dict[str, Callable[[], dict[str, Any]]] = {
        "throughput": lambda: {"callbacks": [ThroughputCallback()]},
        "norecord": lambda: {"callbacks": [ThroughputCallback(record=False)]},
        "both": lambda: {
            "callbacks": [ForgeProfilerCallback(steps + 100, steps + 101, trace_dir=folder), ThroughputCallback()]
        },
        "split": lambda: {"callbacks": [ThroughputCallback(overhead=None)]},
        "monitor": lambda: {"callbacks": [ThroughputMonitor(batch_size_fn=batch_size)]},
        "simple": lambda: {"profiler": SimpleProfiler(dirpath=folder, filename="simple")},
        "devicestats": lambda: {"callbacks": [DeviceStatsMonitor(cpu_stats=False)]},
        "pytorch": lambda: {
            "profiler": PyTorchProfiler(
                dirpath=folder, filename="torch", schedule=torch.profiler.schedule(wait=steps, warmup=1, active=1)
            )
        },
        "events": lambda: {"callbacks": [RegionTimers(synchronize=False)]},
        "sync": lambda: {"callbacks": [RegionTimers(synchronize=True)]},
    }
    return made.get(contender, dict)()  # "none", and "traceml" adds itself


def skipped(contender: str) -> str:
    """Why a contender cannot be run here; "" where it can."""
    if contender == "devicestats" and not torch.cuda.is_available():
        return "it reads the GPU's memory, and there is none"
    if contender == "traceml" and importlib.util.find_spec("traceml_ai") is None:
        return "traceml_ai cannot be imported (pip install traceml-ai)"
    return ""


def fit(model: str, steps: int, folder: str, *, quick: bool, callbacks: Sequence[Callback], **more: Any) -> Any:
    """Train one of the two models."""
    made: L.LightningModule
    if model == "small":
        made, loader = SmallKernels(), DataLoader(torch.randn(steps + 10, 1, 64), batch_size=None)
    elif quick:
        made = GPT(layers=2, width=128, length=64, vocabulary=256)
        loader = random_tokens(steps + 10, batch_size=4, length=64, vocabulary=256)
    else:
        more["precision"] = "bf16-true"
        made, loader = fresh.on_device(GPT), random_tokens(steps + 10)
    logger = CSVLogger(tempfile.mkdtemp(dir=folder))  # each run its own: it warns of an earlier run's files
    if (devices := more.pop("devices", 1)) > 1:
        more |= {"devices": devices, "strategy": "ddp"}
    run = trainer(folder, steps, callbacks=list(callbacks), logger=logger, enable_checkpointing=False, **more)
    run.fit(made, loader)
    return run


def measure(contender: str, model: str, folder: str, *, quick: bool, devices: int = 1) -> None:
    """Train as one contender, and report."""
    size = QUICK if quick else SIZES[model]
    if contender in ON_OFF:
        ours, toggle = ThroughputCallback(overhead=ON_OFF[contender]), OnAndOff(size.block)
        run = fit(model, size.block * size.blocks, folder, quick=quick, callbacks=[ours, toggle], devices=devices)
        if not run.is_global_zero:
            return
        steps_us = toggle.steps_us()
        more, error = difference_us(steps_us)
        fresh.answer(
            more_us=more,
            error_us=error,
            kinds={kind: (len(times), statistics.median(times) / 1e3) for kind, times in steps_us.items()},
            block=size.block,
            timing_us=ours.summary()["profiling/overhead_us"],
        )
        return
    steps = size.warmup + size.measured + 1
    watch, given = Stopwatch(size.warmup, steps - 1), options(contender, folder, steps)
    callbacks = [watch, *given.pop("callbacks", [])]
    run = fit(model, steps, folder, quick=quick, callbacks=callbacks, devices=devices, **given)
    if not run.is_global_zero:
        return
    if contender == "traceml" and not any("TraceML" in type(callback).__name__ for callback in run.callbacks):
        sys.exit("TraceML added no callback to the Trainer")
    result: dict[str, Any] = {"step_ms": watch.step_ms}
    recording = next((callback for callback in callbacks if isinstance(callback, TimedCallback)), None)
    analysis = recording.analysis() if recording is not None else None
    if analysis is not None and analysis.run is not None:
        told = analysis.run
        result |= {
            "timing_us": told.timing.overhead_us,
            "steps": told.timing.steps,
            "mean_ms": told.timing.step_ms.mean,
        }
        result["split"] = told.timing.split_steps
        result["regions"] = {name: region.device_ms for name, region in told.timing.regions.items()}
    fresh.answer(**result)


def child(contender: str, model: str, folder: str, args: argparse.Namespace) -> fresh.Child:
    """The process of a contender."""
    arguments = ["--child", contender, model, "--folder", folder, *(["--quick"] if args.quick else [])]
    arguments += ["--devices", str(args.devices)]
    if contender != "traceml":
        return fresh.Child(fresh.module("benchmarks.overhead", *arguments))
    script = str(Path(__file__).resolve())
    started = ("run", script, "--mode", "summary", "--logs-dir", f"{folder}/traceml", "--args", *arguments)
    return fresh.Child(fresh.module("traceml_ai.launcher.cli", *started))


def row(mine: Sequence[fresh.Outcome], base: Sequence[fresh.Outcome]) -> list[str]:
    """The cells of a contender."""
    found = fresh.results(mine)
    told = [result for result in found if "split" in result]
    return [
        fresh.middle([result["step_ms"] for result in found]),
        fresh.spread(fresh.paired(mine, base, lambda m, b: m["step_ms"] / b["step_ms"])),
        fresh.middle(fresh.paired(mine, base, lambda m, b: (m["step_ms"] - b["step_ms"]) * 1e3), "+.1f"),
        fresh.middle([result["timing_us"] for result in told], ".1f"),
        f"{fresh.middle([result['split'] for result in told], '.0f')} of {told[0]['steps']}" if told else "-",
    ]


def print_regions(budget: Sequence[fresh.Outcome], every: Sequence[fresh.Outcome]) -> None:
    """The regions' means under the timing budget, beside those with every step split."""

    def mean_ms(result: dict[str, Any], name: str) -> float:
        return result["regions"].get(name, float("nan"))

    def ratio(fewer: dict[str, Any], every: dict[str, Any], name: str) -> float:
        return mean_ms(fewer, name) / max(mean_ms(every, name), 1e-9)

    told = [fresh.results(outcomes) for outcomes in (budget, every)]
    print("\n| region | budget ms | every step ms | ratio | budget share | every step share |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name in told[1][0]["regions"] if all(told) else ():
        means = [fresh.middle([mean_ms(result, name) for result in found], ".4f") for found in told]
        ratios = fresh.paired(budget, every, partial(ratio, name=name))
        shares = [
            fresh.middle([100 * mean_ms(result, name) / result["mean_ms"] for result in found], ".1f") for found in told
        ]
        print(f"| {name} | {' | '.join(means)} | {fresh.spread(ratios)} | {' % | '.join(shares)} % |")


def compare_contenders(
    model: str, keys: Sequence[str], folder: str, args: argparse.Namespace
) -> dict[str, list[fresh.Outcome]]:
    """Run contenders and the control in turns, and print their table."""
    ran = [key for key in ("none", *keys) if not skipped(key)]
    for key in keys:
        if skipped(key):
            print(f"{CONTENDERS[key]}: skipped, {skipped(key)}")
    children = {CONTENDERS[key]: child(key, model, folder, args) for key in ran}
    outcomes = fresh.in_turns(children, args.turns)
    heads = ("contender", "step ms", "ratio", "paired difference µs", "reported µs per step", "steps split")
    rows = {name: row(turns, outcomes[CONTENDERS["none"]]) for name, turns in outcomes.items()}
    kind = "launch-bound loop of small kernels" if model == "small" else "GPU-bound GPT"
    fresh.print_table(f"{kind}: {args.turns} turns, medians (min to max)", heads, rows, outcomes)
    if {"throughput", "split"} <= set(ran):
        print_regions(outcomes[CONTENDERS["throughput"]], outcomes[CONTENDERS["split"]])
    return outcomes


def compare(model: str, keys: Sequence[str], folder: str, args: argparse.Namespace) -> bool:
    """Run the contenders on one model, print what they come to and say whether all ended well."""
    toggled = [key for key in keys if key in ON_OFF]
    others = [key for key in keys if key != "none" and key not in ON_OFF]
    outcomes = compare_contenders(model, others, folder, args) if others or not toggled else {}
    well = not fresh.failed(outcomes)
    for key in toggled:
        print(f"\n{model}, {key}: switched on and off every few steps of one run")
        found: list[dict[str, Any]] = []
        for _ in range(args.turns):
            outcome = fresh.run(child(key, model, folder, args))
            well &= not outcome.problem
            found += [outcome.result] if outcome.result else []
            print(outcome.problem or on_and_off(found[-1]), flush=True)
        if len(found) > 1:
            print(all_on_and_off(found))
    return well


def on_and_off(found: dict[str, Any]) -> str:
    """What came of switching on and off in one process, in words."""
    kinds = ", ".join(f"{count} {kind}: {step_ms:.3f}" for kind, (count, step_ms) in found["kinds"].items())
    return (
        f"{found['more_us']:+.1f} ± {found['error_us']:.1f} µs per step of {found['kinds'][OFF][1]:.2f} ms (and its "
        f"standard error; median ms of {kinds}); by the callback's own clock {found['timing_us']:.1f} µs"
    )


def all_on_and_off(found: Sequence[dict[str, Any]]) -> str:
    """What came of several processes."""
    more, steps = [one["more_us"] for one in found], [one["kinds"][OFF][1] for one in found]
    low, middle, high = statistics.quantiles(more)
    own = fresh.middle([one["timing_us"] for one in found], ".1f")
    return (
        f"{len(found)} processes: median {middle:+.1f} ± {median_error(more):.1f} µs of {fresh.middle(steps)} ms (and "
        f"its standard error; quartiles {low:+.1f} and {high:+.1f}); by the callback's own clock {own} µs"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables of both models; 1 where a child ended badly."""
    known = [*CONTENDERS, *ON_OFF]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models and few steps")
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="how often each contender trains (5)")
    parser.add_argument("--only", choices=tuple(SIZES), help="one of the two models")
    parser.add_argument("--contenders", type=fresh.keys(known), default=known, help=", ".join(known))
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="train with DDP on so many devices (1)")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        contender, model = args.child
        measure(contender, model, args.folder, quick=args.quick, devices=args.devices)
        return 0
    well = True
    for model in [args.only] if args.only else SIZES:
        with tempfile.TemporaryDirectory() as folder:
            well &= compare(model, args.contenders, folder, args)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
