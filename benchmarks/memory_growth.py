"""How early growth of memory is said, and how often without any: simulated readings of a GPU of 80 GiB.

    python -m benchmarks.memory_growth            # two minutes on one core

A run without growth keeps 44 GiB, and up to `noise` on top at random; its batches need 20 to 35 GiB, by lengths that
are uniform or log-normal. One with growth keeps 30 GiB and as much more a step as the row says, from its first step or
from step 10,000 on.
"""

import argparse
from collections.abc import Iterator
from itertools import product
from random import Random
from statistics import median

from lightning_forge_profiling.gpu.memory import Growth, GrowthWatch, Reading

LIMIT = 80.0
PER_READING = 5
NEEDS, LONGEST = 20.0, 15.0
LATER = 10_000


def readings(
    seed: int, count: int, *, base: float, noise: float, leak: float, since: int, even: bool
) -> Iterator[Reading]:
    """The readings of a run, until the memory is full."""
    random, peak = Random(seed), 0.0  # noqa: S311  (a simulation)
    for number in range(count):
        step = 10 + PER_READING * number
        grown = base + leak * max(0, step - since)
        lengths = [random.random() if even else min(1.0, random.lognormvariate(-2, 0.7)) for _ in range(PER_READING)]
        peak = max(peak, grown + NEEDS + LONGEST * max(lengths))
        if peak > LIMIT:
            return
        yield Reading(step, grown + noise * lengths[-1], peak)


def first_said(run: Iterator[Reading]) -> tuple[Growth | None, int]:
    """The first growth that is said, and the last step of the run."""
    watch, found, step = GrowthWatch(), None, 0
    for reading in run:
        step = reading.step
        found = found or watch.add(reading, LIMIT)
    return found, step


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="of each row without growth (default: %(default)s)")
    args = parser.parse_args()
    print("no growth: lengths, noise in GiB, runs of 10,000 steps, false alarms")
    for even, noise in product((True, False), (0.05, 0.5, 2.0)):
        runs = (readings(seed, 2000, base=44, noise=noise, leak=0, since=0, even=even) for seed in range(args.runs))
        alarms = sum(first_said(run)[0] is not None for run in runs)
        print(f"{'uniform' if even else 'log-normal':10} {noise:5} {args.runs:5} {alarms:4}", flush=True)
    print(
        "growth: GiB a step, noise, from step, said after steps, steps before it was full (median, fewest of 10 runs)"
    )
    for leak, noise, since in product((0.1, 0.01, 0.001), (0.0, 0.5, 2.0), (0, LATER)):
        said, ahead = [], []
        for seed in range(10):
            growth, full = first_said(readings(seed, 6000, base=30, noise=noise, leak=leak, since=since, even=True))
            if growth is not None:
                said.append(growth.to_step - since)
                ahead.append(full - growth.to_step)
        never = "" if len(said) == 10 else f", never in {10 - len(said)}"
        print(
            f"{leak:6} {noise:4} {since:6} {median(said):7.0f} {median(ahead):7.0f} {min(ahead):7.0f}{never}",
            flush=True,
        )


if __name__ == "__main__":
    main()
