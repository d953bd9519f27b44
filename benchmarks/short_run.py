"""A short training run on the CPU that writes a run's record of its own step times.

    python -m benchmarks.short_run FOLDER [--steps 1000]

What `benchmarks.compare_false_alarms` runs hundreds of: a process of a few seconds with real step times, without a
Trainer, whose import would take longer than the training.
"""

import argparse
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import torch

from lightning_forge_profiling import CUDATimerCollection
from lightning_forge_profiling.names import RECORD_FOLDER, record_name
from lightning_forge_profiling.record.files import encode_line
from lightning_forge_profiling.schema import Begin, End, IntervalLine, LoaderSettings, StepCounters
from lightning_forge_profiling.timing.counters import KINDS, bucket, count_step
from lightning_forge_profiling.timing.steps import StepTiming, StepWork

REGIONS: Final = ("data", "forward", "backward", "optimizer")
WARMUP_STEPS: Final = 30
BATCH: Final = 64


def steps(count: int) -> Iterator[Mapping[str, float]]:
    """Train a small model; yields each step's milliseconds by region."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    timers = CUDATimerCollection(REGIONS, device="cpu")
    for _ in range(count):
        timers.start("data")
        batch, target = torch.randn(BATCH, 256), torch.randint(10, (BATCH,))
        timers.switch("data", "forward")
        loss = torch.nn.functional.cross_entropy(model(batch), target)
        timers.switch("forward", "backward")
        loss.backward()
        timers.switch("backward", "optimizer")
        with torch.no_grad():  # the first step of torch.optim imports the compiler, which takes longer than this run
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(1e-3 * parameter.grad)
                    parameter.grad = None
        timers.stop("optimizer")
        yield {found.region: found.device_ms for found in timers.harvest()}


def record(folder: Path, count: int, every: int = 10) -> None:
    """Train for `count` steps after the warm-up, and write a record with an interval of `every` steps."""
    begun = time.time()
    lines: list[Begin | IntervalLine | End] = [
        Begin(
            run=f"{os.getpid()}-{time.time_ns()}",
            rank=0,
            world_size=1,
            at=begun,
            versions={"torch": torch.__version__},
            host="",
            device="cpu",
            settings={"precision": "32-true", "log_every_n_steps": every},
            loader=LoaderSettings(batch_size=BATCH),
        )
    ]
    latest: list[Mapping[str, float]] = []
    for step, times in enumerate(steps(WARMUP_STEPS + count)):
        if step < WARMUP_STEPS:
            continue
        latest.append(times)
        if len(latest) == every:
            lines.append(_interval(step + 1, latest))
            latest = []
    lines.append(End(at=time.time(), step=WARMUP_STEPS + count, outcome="finished"))
    target = folder / RECORD_FOLDER / record_name(0)
    target.parent.mkdir(parents=True)
    target.write_bytes(b"".join(map(encode_line, lines)))


def _interval(step: int, latest: list[Mapping[str, float]]) -> IntervalLine:
    counters = StepCounters()
    work, timing = StepWork(float(BATCH), None, 1), StepTiming()
    for times in latest:
        count_step(counters, KINDS[1][0], times, times, sum(times.values()), work, timing)
    counters.steps_us = dict(Counter(bucket(sum(times.values())) for times in latest))
    return IntervalLine(
        at=time.time(),
        step=step,
        logger_step=step - 1,
        counters=counters,
    )


def main() -> None:
    """Train, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the log folder, which gets the record")
    parser.add_argument("--steps", type=int, default=1000, help="steps after the warm-up (1000)")
    arguments = parser.parse_args()
    record(arguments.folder, arguments.steps)


if __name__ == "__main__":
    main()
