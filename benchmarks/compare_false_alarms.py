"""How often `forge-profiling compare` calls equal runs slower, and how often it finds a slow-down.

    python -m benchmarks.compare_false_alarms                             # simulated, some minutes
    python -m benchmarks.compare_false_alarms --pairs 200 --keep FOLDER   # real processes in turns, an hour

Simulated steps have noise that lasts for some steps, slow drifts, spikes, a pace that differs from process to process,
a loader that is waited for every eighth step, and a machine whose pace wanders from run to run. What else a fit takes
is a fifth of it, and scatters by 10 %. Real runs are those of `benchmarks.short_run`, each a process of its own, on a
machine as busy as it is; runs that FOLDER already has count. Slow-downs of real runs are made by multiplying the steps
of one side.
"""

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.fresh import module
from lightning_forge_profiling.comparison.compare import compare
from lightning_forge_profiling.comparison.outcome import gates
from lightning_forge_profiling.comparison.source import FIT, PART_ERROR, Source, record_source, slow_steps
from lightning_forge_profiling.names import RECORD_FOLDER
from lightning_forge_profiling.record.reader import read_run
from lightning_forge_profiling.schema import Conditions, Outcome
from lightning_forge_profiling.timing.bootstrap import BlockBootstrap, Estimate

LIMIT_PCT: Final = 5.0
STEP_MS: Final = 10.0
BLOCKS: Final = 55
"""As a record's totals have them: 32 to 64."""
SPIKES: Final = 0.005
SPIKE_MS: Final = 20.0
WAIT_MS: Final = 60.0
"""Of a step that waits for the loader."""
REST: Final = 0.25
"""Of a fit, relative to its steps: validation, checkpoints."""
REST_SCATTER: Final = 0.1
WANDERS_BACK: Final = 0.9
"""What is left in the next run of how much the machine's pace is off."""
BETWEEN_RUNS_S: Final = 10.0

Runs = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Machine:
    """How equal runs differ on it, as standard deviations.

    Attributes:
        noise: of a step.
        lasts: correlation of a step with the next one.
        drift: from the first step of a run to its last.
        scatter: between processes.
        wanders: of the machine's pace, from one run to the next.
        every: number of steps from one wait for the loader to the next; 0 for none.
    """

    noise: float
    lasts: float
    drift: float
    scatter: float
    wanders: float
    every: int = 0


MACHINES: Final = {
    "idle": Machine(noise=0.03, lasts=0.5, drift=0.005, scatter=0.01, wanders=0.002),
    "shared": Machine(noise=0.05, lasts=0.9, drift=0.02, scatter=0.02, wanders=0.04),
    "busy": Machine(noise=0.2, lasts=0.95, drift=0.1, scatter=0.1, wanders=0.05),
    "loader": Machine(noise=0.03, lasts=0.5, drift=0.005, scatter=0.01, wanders=0.002, every=8),
}


def simulated(random: np.random.Generator, machine: Machine, runs: int, steps: int) -> Runs:
    """The step times of equal runs one after the other, a row each."""
    times = random.normal(size=(runs, steps))
    fresh = np.sqrt(1 - machine.lasts**2)
    for step in range(1, steps):
        times[:, step] = machine.lasts * times[:, step - 1] + fresh * times[:, step]
    drift = machine.drift * random.normal(size=(runs, 1)) * np.linspace(-0.5, 0.5, steps)
    machines = machine.wanders * random.normal(size=(runs, 1))
    for run in range(1, runs):
        machines[run] += WANDERS_BACK * machines[run - 1]
    pace = machine.scatter * random.normal(size=(runs, 1)) + machines
    spikes = SPIKE_MS * (random.random((runs, steps)) < SPIKES)
    waits = np.zeros((runs, steps))
    if machine.every:
        waits = WAIT_MS * ((np.arange(steps) + random.integers(machine.every, size=(runs, 1))) % machine.every == 0)
    steady = np.maximum(1 + machine.noise * times + drift, 0.2)
    return np.asarray(STEP_MS * np.exp(pace) * steady + spikes + waits, dtype=float)


def as_source(times_ms: Runs, number: int, rest: float) -> Source:
    """A run as `compare` has it from a record; `rest` is what else the fit takes, relative to the steps."""
    parts = np.array_split(times_ms, BLOCKS)
    counted, sums = [len(part) for part in parts], [float(part.sum()) for part in parts]
    step = BlockBootstrap(counted, sums).ratio(sums, counted)
    median = Estimate(value=float(np.median(times_ms)))
    independent = float(times_ms.std() / times_ms.mean()) / len(times_ms) ** 0.5
    step, steps, began_s = step or median, len(times_ms), number * BETWEEN_RUNS_S
    error = float(np.hypot(step.log_error or 0.0, rest * PART_ERROR) / (1 + rest))
    fit = replace(step, value=step.value * steps * (1 + rest), log_error=error)
    return Source(
        source=f"{number}",
        kind="record",
        run=f"{number}",
        conditions=Conditions(device="", world_size=1),
        steps=steps,
        all_steps=steps,
        began_s=began_s,
        ended_s=began_s + step.value * steps / 1e3,
        metrics={"step": step, FIT: fit},
        unsteadiness=step.log_drift,
        slow_steps=slow_steps(step, median, independent),
    )


def outcomes(runs: Sequence[Source], size: int, slow_down: float = 1.0) -> Iterator[Outcome]:
    """Of so many runs a side in turns, the second side slowed down; every other comparison begins with that side."""
    for number, first in enumerate(range(0, len(runs) - 2 * size + 1, 2 * size)):
        sides = [runs[first + turn : first + 2 * size : 2] for turn in (0, 1)]
        a, b = sides[:: -1 if number % 2 else 1]
        slower = [
            replace(run, metrics={name: _times(value, slow_down) for name, value in run.metrics.items()}) for run in b
        ]
        yield gates(compare(a, slower, limit_pct=LIMIT_PCT), (), LIMIT_PCT)[0].outcome


def _times(estimate: Estimate, factor: float) -> Estimate:
    return replace(estimate, value=factor * estimate.value)


def row(*cells: str) -> None:
    """Print a row of a Markdown table."""
    print(f"| {' | '.join(cells)} |", flush=True)


def shares(counted: Iterator[Outcome]) -> tuple[str, ...]:
    """Cells of a table: how many comparisons, and the share of each outcome."""
    counts = Counter(counted)
    total = counts.total()
    kinds: tuple[Outcome, ...] = ("slower", "faster", "same", "too noisy", "too short")
    return f"{total:,}", *(f"{100 * counts[kind] / total:.1f} %" for kind in kinds)


def head(*first: str) -> None:
    """Print the head of a table of outcomes."""
    row(*first, "comparisons", "slower", "faster", "same", "too noisy", "too short")
    row(*["---"] * (len(first) + 6))


def simulate(comparisons: int) -> None:
    """Print the outcomes of simulated runs, equal ones and slowed-down ones."""
    random = np.random.default_rng(0)
    print(f"Simulated runs made in turns, limit {LIMIT_PCT:g} %\n")
    head("machine", "slow-down", "runs a side", "steps")
    for name, machine in MACHINES.items():
        for size, steps in ((1, 220), (1, 600), (2, 600), (3, 600), (5, 600)):
            times = simulated(random, machine, 2 * size * comparisons, steps)
            rests = REST * np.exp(REST_SCATTER * random.normal(size=len(times)))
            runs = [
                as_source(run, number, float(rest)) for number, (run, rest) in enumerate(zip(times, rests, strict=True))
            ]
            slow_downs = {1: (1.0, 1.25, 10.0)}.get(size, (1.0, 1.1, 1.25))
            for slow_down in slow_downs:
                change = f"+{100 * (slow_down - 1):.0f} %" if slow_down > 1 else "none"
                row(name, change, str(size), str(steps), *shares(outcomes(runs, size, slow_down)))


def measure(pairs: int, folder: Path) -> None:
    """Run real processes one after the other, and print what comparing them says."""
    for number in range(2 * pairs):
        if not (folder / f"{number:03}" / RECORD_FOLDER).exists():
            command = module("benchmarks.short_run", str(folder / f"{number:03}"))
            subprocess.run(command, check=True, timeout=300)
            print(f"run {number + 1} of {2 * pairs}", file=sys.stderr, flush=True)
    runs = [record_source(read_run(folder / f"{number:03}" / RECORD_FOLDER)) for number in range(2 * pairs)]
    means = np.log([run.metrics["step"].value for run in runs])
    print(f"Real runs of {runs[0].steps:,} steps, made in turns, limit {LIMIT_PCT:g} %.")
    print(f"Neighbouring runs scatter by {100 * np.diff(means).std() / 2**0.5:.1f} % (one standard deviation).\n")
    head("slow-down", "runs a side")
    for size in (1, 2, 3, 5):
        for slow_down in (1.0, 1.1, 1.25) if len(runs) >= 2 * size else ():
            change = f"+{100 * (slow_down - 1):.0f} %" if slow_down > 1 else "none"
            row(change, str(size), *shares(outcomes(runs, size, slow_down)))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=1000, help="simulated ones of each kind (1000)")
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
