"""How often `forge-profiling compare` calls equal runs slower, and which slow-down it finds.

    python -m benchmarks.compare_false_alarms                             # simulated, some minutes
    python -m benchmarks.compare_false_alarms --pairs 200 --keep FOLDER   # real processes in turns, an hour

Simulated steps have noise that lasts for some twenty steps, slow drifts, spikes, and a pace that differs from process
to process. Real runs are those of `benchmarks.short_run`, each a process of its own, on a machine as busy as it is;
runs that FOLDER already has count.
"""

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.fresh import module
from lightning_forge_profiling.cli.compare import SCATTER_PCT
from lightning_forge_profiling.diagnosis.block_bootstrap import BlockBootstrap
from lightning_forge_profiling.diagnosis.log_ratio import ratio_of
from lightning_forge_profiling.diagnosis.run_metrics import RunMetric, RunOutcome, run_metrics, run_outcome
from lightning_forge_profiling.names import RECORD_FOLDER
from lightning_forge_profiling.record.reader import read_run
from lightning_forge_profiling.record.run_samples import run_samples
from lightning_forge_profiling.results.run_samples import Conditions, RunSamples

LIMIT_PCT: Final = 5.0
SCATTER: Final = SCATTER_PCT / 100
"""What `compare` allows for with one run a side."""

STEP_MS: Final = 10.0
NOISE: Final = 0.05
LASTS: Final = 0.9
"""Correlation of a step with the next one."""
DRIFT: Final = 0.02
SPIKES: Final = 0.005
SPIKE_MS: Final = 20.0

Runs = npt.NDArray[np.float64]


def simulated(random: np.random.Generator, runs: int, steps: int, scatter: float) -> Runs:
    """The step times of equal runs, a row each."""
    times = random.normal(size=(runs, steps))
    fresh = np.sqrt(1 - LASTS**2)
    for step in range(1, steps):
        times[:, step] = LASTS * times[:, step - 1] + fresh * times[:, step]
    drift = DRIFT * random.normal(size=(runs, 1)) * np.linspace(-0.5, 0.5, steps)
    pace = np.exp(scatter * random.normal(size=(runs, 1)))
    spikes = SPIKE_MS * (random.random((runs, steps)) < SPIKES)
    return np.asarray(STEP_MS * pace * (1 + NOISE * times + drift) + spikes, dtype=float)


def as_run(times_ms: Runs, every: int) -> RunSamples:
    """A run with an interval each so many steps."""
    sums = times_ms.reshape(-1, every).sum(axis=1)
    return RunSamples(
        source="",
        run="",
        conditions=Conditions(device="", world_size=1),
        steps=len(times_ms),
        counted=(every,) * len(sums),
        step_ms=tuple(map(float, sums)),
        region_ms={},
    )


def groups(runs: Sequence[RunSamples], size: int) -> Iterator[tuple[Sequence[RunSamples], Sequence[RunSamples]]]:
    """Two sides of so many runs each, in turns; every other comparison begins with the second side."""
    for number, first in enumerate(range(0, len(runs) - 2 * size + 1, 2 * size)):
        sides = [runs[first + turn : first + 2 * size : 2] for turn in (0, 1)]
        yield (sides[1], sides[0]) if number % 2 else (sides[0], sides[1])


def compared(runs: Sequence[RunSamples], size: int, scatter: float = SCATTER) -> list[dict[str, RunMetric]]:
    """The metrics of each comparison of so many runs a side."""
    return [run_metrics(a, b, scatter=scatter, limit_pct=LIMIT_PCT) for a, b in groups(runs, size)]


def outcomes(found: Iterable[Mapping[str, RunMetric]], name: str = "step") -> list[RunOutcome | None]:
    """The outcomes of a metric."""
    return [metrics[name].outcome for metrics in found]


def shares(found: Iterable[RunOutcome | None]) -> tuple[str, ...]:
    """Cells of a table: how many comparisons, and the share of each outcome."""
    counts = Counter(found)
    total = counts.total()
    kinds: tuple[RunOutcome, ...] = ("slower", "faster", "same", "inconclusive")
    return f"{total:,}", *(f"{100 * counts[kind] / total:.1f} %" for kind in kinds)


def by_steps_alone(runs: Sequence[RunSamples]) -> Iterator[RunOutcome]:
    """The outcome of each pair, without the allowance for processes."""
    for sides in groups(runs, 1):
        found = [BlockBootstrap(run.counted, run.step_ms).ratio(run.step_ms, run.counted) for [run] in sides]
        a, b = (value for value in found if value is not None)
        yield run_outcome(ratio_of([a], [b], scatter=0.0), LIMIT_PCT)


def slow_down_found(found: Iterable[RunMetric]) -> str:
    """The slow-down that is called slower in 80 % of cases, from comparisons of equal runs."""
    needed = [(1 + LIMIT_PCT / 100) / metric.ratio.low for metric in found if metric.ratio and metric.ratio.low]
    return f"{100 * (float(np.quantile(needed, 0.8)) - 1):.0f} %" if needed else "-"


def resampled_runs_differ(runs: Sequence[RunSamples], size: int, random: np.random.Generator) -> float:
    """The share of comparisons in which a bootstrap of runs, with the error of each, finds a difference."""
    differ = []
    for sides in groups(runs, size):
        logs = []
        for side in sides:
            found = [BlockBootstrap(run.counted, run.step_ms).ratio(run.step_ms, run.counted) for run in side]
            values = np.log([value.value for value in found if value is not None])
            errors = np.array([value.log_error or 0.0 for value in found if value is not None])
            drawn = random.integers(size, size=(1000, size))
            logs.append((values[drawn] + errors[drawn] * random.normal(size=drawn.shape)).mean(axis=1))
        low, high = np.percentile(logs[1] - logs[0], [2.5, 97.5])
        differ.append(not low <= 0 <= high)
    return float(np.mean(differ))


def student_differs(runs: Sequence[RunSamples], size: int) -> float:
    """The same of the interval that `compare` has."""
    ratios = [metrics["step"].ratio for metrics in compared(runs, size)]
    return float(np.mean([not ratio.low <= 1 <= ratio.high for ratio in ratios if ratio and ratio.low and ratio.high]))


def row(*cells: str) -> None:
    """Print a row of a Markdown table."""
    print(f"| {' | '.join(cells)} |", flush=True)


def simulate(comparisons: int) -> None:
    """Print the false alarms of simulated runs, and the slow-downs that are found."""
    random = np.random.default_rng(0)
    print(f"Equal simulated runs of 1,000 steps, limit {LIMIT_PCT:g} %\n")
    row("processes scatter by", "runs a side", "comparisons", "slower", "faster", "same", "inconclusive")
    row(*["---"] * 7)
    for scatter in (0.01, 0.03, 0.10):
        for size in (1, 2, 3, 5):
            times = simulated(random, 2 * size * comparisons, 1000, scatter)
            found = compared([as_run(run, 50) for run in times], size)
            row(f"{100 * scatter:.0f} %", str(size), *shares(outcomes(found)))

    print("\nSlow-down called slower in 80 % of cases, processes scatter by 1 %\n")
    row("steps", "1 run a side", "1, `--scatter 1`", "2 a side", "3 a side", "5 a side")
    row(*["---"] * 6)
    for steps, every in ((200, 10), (1000, 50), (5000, 50)):
        cells = []
        for size, allowed in ((1, SCATTER), (1, 0.01), (2, 0.0), (3, 0.0), (5, 0.0)):
            times = simulated(random, 2 * size * (comparisons // 5), steps, 0.01)
            found = compared([as_run(run, every) for run in times], size, allowed)
            cells.append(slow_down_found(metrics["step"] for metrics in found))
        row(f"{steps:,}", *cells)

    print("\nDifferences found in equal runs at a nominal 5 %, by resampling the runs, and by Student's interval\n")
    for size in (2, 3, 5):
        times = simulated(random, 2 * size * (comparisons // 5), 1000, 0.03)
        runs = [as_run(run, 50) for run in times]
        share, student = resampled_runs_differ(runs, size, random), student_differs(runs, size)
        print(f"{size} runs a side: {100 * share:.0f} %, {100 * student:.0f} %")


def measure(pairs: int, folder: Path) -> None:
    """Run real processes one after the other, and print what comparing them says."""
    for number in range(2 * pairs):
        if not (folder / f"{number:03}" / RECORD_FOLDER).exists():
            command = module("benchmarks.short_run", str(folder / f"{number:03}"))
            subprocess.run(command, check=True, timeout=300)
            print(f"run {number + 1} of {2 * pairs}", file=sys.stderr, flush=True)
    runs = [run_samples(read_run(folder / f"{number:03}" / RECORD_FOLDER)) for number in range(2 * pairs)]
    means = np.log([sum(run.step_ms) / sum(run.counted) for run in runs])
    print(f"Equal real runs of {sum(runs[0].counted):,} steps, limit {LIMIT_PCT:g} %.")
    print(f"Neighbouring runs scatter by {100 * np.diff(means).std() / 2**0.5:.1f} % (one standard deviation).\n")
    row("metric", "runs a side", "comparisons", "slower", "faster", "same", "inconclusive")
    row(*["---"] * 7)
    for size in (1, 2, 3, 5):
        found = compared(runs, size)
        for name in ("step", "median") if found else ():
            row(name, str(size), *shares(outcomes(found, name)))
    row("step, without the allowance for processes", "1", *shares(by_steps_alone(runs)))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=2000, help="simulated ones of each kind (2000)")
    parser.add_argument("--pairs", type=int, help="measure so many pairs of real runs instead")
    parser.add_argument("--keep", type=Path, help="the folder for the real runs")
    arguments = parser.parse_args()
    if arguments.pairs is None:
        simulate(arguments.comparisons)
    elif arguments.keep is None:
        parser.error("--pairs takes --keep FOLDER, so that an hour of runs is not lost")
    else:
        measure(arguments.pairs, arguments.keep)


if __name__ == "__main__":
    main()
