"""What this package adds to the mean step of a run, to its garbage collections, and to a fit as a whole.

Each contender trains in fresh processes, in turns: without callbacks, with `ForgeProfilerCallback`, which records a
window and samples the stack, with `ThroughputCallback`, which keeps a record and logs to TensorBoard at each step that
the Trainer logs, and with both. A clock of the benchmark's own takes the mean of the steps that count, rare slow ones
included, where a median would hide them, and the training thread's own CPU time. `--cores 1 --together 4` pins four
fits to one core, where whatever this package does beside the training competes with the steps.

    python -m benchmarks.own_cost
    python -m benchmarks.own_cost --log-every 1
    python -m benchmarks.own_cost --cores 1 --together 4
    python -m benchmarks.own_cost --workload gpt --devices 2 --steps 200
    python -m benchmarks.own_cost --quick    # few steps
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader

from benchmarks import fresh
from benchmarks.workloads import GPT, SmallKernels, random_tokens, trainer
from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback

WARMUP, WINDOW = 10, range(29, 34)
"""Steps that do not count: the warm-up, and those from the profiler's warm-up to the step that stops it."""

CONTENDERS = ("none", "profiler", "throughput", "both callbacks")


class Clock(Callback):
    """Host and CPU time of each counted step, and the garbage collections in them."""

    def __init__(self) -> None:
        self.step, self.ended_ns, self.used_ns = 0, 0, 0
        self.steps_ms, self.cpu_ms = list[float](), list[float]()
        self.collections: dict[int, list[float]] = {0: [], 1: [], 2: []}

    def on_train_start(self, *_: Any) -> None:
        """Listen to the collector."""
        gc.callbacks.append(self.collected)

    def on_train_end(self, *_: Any) -> None:
        """Listen no more."""
        gc.callbacks.remove(self.collected)

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """Stamp the end of a batch."""
        now_ns, used_ns = time.perf_counter_ns(), time.thread_time_ns()
        if self.counts:
            self.steps_ms.append((now_ns - self.ended_ns) / 1e6)
            self.cpu_ms.append((used_ns - self.used_ns) / 1e6)
        self.step, self.ended_ns, self.used_ns = self.step + 1, now_ns, used_ns

    @property
    def counts(self) -> bool:
        """Whether the step under way counts."""
        return self.step >= WARMUP and self.step not in WINDOW

    def collected(self, phase: str, info: Mapping[str, int]) -> None:
        """Time a collection."""
        now_ns = time.perf_counter_ns()
        if phase == "start":
            self.began_ns = now_ns
        elif self.counts:
            self.collections[info["generation"]].append((now_ns - self.began_ns) / 1e6)


def fit(contender: str, args: argparse.Namespace) -> None:
    """Train as this contender, and report."""
    torch.set_num_threads(1)
    steps, folder = args.steps, args.folder
    clock, throughput = Clock(), ThroughputCallback()
    contenders: dict[str, list[Callback]] = {
        "none": [],
        "profiler": [ForgeProfilerCallback(30, 33)],
        "throughput": [throughput],
        "both callbacks": [ForgeProfilerCallback(30, 33), throughput],
    }
    ours = contenders[contender]
    logger = TensorBoardLogger(folder, name=f"{os.getpid()}")
    options = {"devices": args.devices, "strategy": "ddp"} if args.devices > 1 else {}
    made = trainer(folder, steps, callbacks=[clock, *ours], logger=logger, log_every_n_steps=args.log_every, **options)
    gpt = args.workload == "gpt"
    data = random_tokens(steps + 10) if gpt else DataLoader(torch.randn(steps + 10, 1, 64), batch_size=None)
    began = time.perf_counter()
    made.fit(fresh.on_device(GPT) if gpt else SmallKernels(), data)
    if not made.is_global_zero:
        return
    took = [ms for each in clock.collections.values() for ms in each]
    fresh.answer(
        fit_s=time.perf_counter() - began,
        mean_ms=statistics.fmean(clock.steps_ms),
        median_ms=statistics.median(clock.steps_ms),
        cpu_ms=statistics.fmean(clock.cpu_ms),
        counted_ms=throughput.summary().get("time/step_ms"),
        collections=[len(each) for each in clock.collections.values()],
        collections_ms=sum(took),
        longest_ms=max(took, default=0.0),
    )


def together(contender: str, folder: str, args: argparse.Namespace) -> None:
    """Several fits at a time on the same cores; reports their means."""
    if args.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    fits = fresh.module("benchmarks.own_cost", "--fit", contender, "--folder", folder, *sizes(args))
    children = [subprocess.Popen(fits, stdout=subprocess.PIPE, text=True) for _ in range(args.together)]
    found = [json.loads(child.communicate()[0].splitlines()[-1]) for child in children]
    means = {
        name: statistics.fmean(each[name] for each in found)
        for name in ("fit_s", "mean_ms", "median_ms", "cpu_ms", "collections_ms", "longest_ms")
    }
    counted = [each["counted_ms"] for each in found if each["counted_ms"] is not None]
    fresh.answer(
        **means, counted_ms=statistics.fmean(counted) if counted else None, collections=found[0]["collections"]
    )


def sizes(args: argparse.Namespace) -> list[str]:
    """The arguments that a child gets too."""
    names = ("steps", "cores", "together", "workload", "devices", "log_every")
    return [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]


def row(mine: Sequence[fresh.Outcome], control: Sequence[fresh.Outcome]) -> list[str]:
    """The cells of a contender."""
    found = fresh.results(mine)
    counted = [result["counted_ms"] for result in found if result["counted_ms"] is not None]
    return [
        *(fresh.spread([result[name] for result in found], ".3f") for name in ("mean_ms", "median_ms")),
        fresh.spread(counted, ".3f"),
        fresh.spread(fresh.paired(mine, control, lambda m, c: m["mean_ms"] / c["mean_ms"]), ".3f"),
        fresh.spread(fresh.paired(mine, control, lambda m, c: m["cpu_ms"] / c["cpu_ms"]), ".3f"),
        str(found[0]["collections"]) if found else "-",
        *(fresh.spread([result[name] for result in found], ".1f") for name in ("collections_ms", "longest_ms")),
        fresh.spread(fresh.paired(mine, control, lambda m, c: m["fit_s"] - c["fit_s"]), ".2f"),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 where a child ended badly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="turns (5)")
    parser.add_argument("--steps", type=int, default=2000, help="of a fit (2000)")
    parser.add_argument("--log-every", type=int, default=50, metavar="N", help="steps to a row of the logger (50)")
    parser.add_argument("--cores", type=int, default=0, help="pin the fits to so many cores (all)")
    parser.add_argument("--together", type=int, default=1, metavar="N", help="fits at a time (1)")
    parser.add_argument("--workload", choices=("small", "gpt"), default="small", help="launch-bound, or a GPT (small)")
    parser.add_argument("--devices", type=int, default=1, help="GPUs of a fit (1)")
    parser.add_argument("--quick", action="store_true", help="60 steps")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--fit", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.steps = 60 if args.quick else args.steps
    if args.fit:
        fit(args.fit, args)
        return 0
    if args.child:
        together(args.child, args.folder, args)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        children = {
            contender: fresh.Child(
                fresh.module("benchmarks.own_cost", "--child", contender, "--folder", folder, *sizes(args))
            )
            for contender in CONTENDERS
        }
        outcomes = fresh.in_turns(children, args.pairs)
    heads = (
        "contender",
        "mean ms",
        "median ms",
        "mean by us",
        "mean / none",
        "CPU / none",
        "collections by generation",
    )
    fresh.print_table(
        f"{args.workload}, {args.devices} device(s), {args.together} at a time on {args.cores or 'all'} cores, "
        f"{args.steps} steps, {args.pairs} turns, medians (min to max)",
        (*heads, "ms in them", "longest", "fit's s more"),
        {contender: row(turns, outcomes["none"]) for contender, turns in outcomes.items()},
        outcomes,
    )
    return int(fresh.failed(outcomes))


if __name__ == "__main__":
    sys.exit(main())
