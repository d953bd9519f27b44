"""How often the statistics of `benchmark` are wrong, on made-up samples whose truth is known.

    python -m benchmarks.chance

Two figures: how often functions that do not differ are called faster or slower by `compare_benchmarks`, and how often
the interval of a median holds the true one where narrowing it down is what ended the run.
"""

import argparse

import numpy as np

from lightning_forge_profiling.bench.benchmark import Options, collect
from lightning_forge_profiling.bench.result import BenchmarkResult, compare_benchmarks, median_interval

NOISE = 0.02
CALL_US = 20_000.0


def wrong_verdicts(runs: int, trials: int) -> float:
    """The share of comparisons of two equal functions that end in a verdict, with so many runs of each."""
    random = np.random.default_rng(0)
    wrong = 0
    for _ in range(trials):
        results = [
            BenchmarkResult(name=name, method="kernels", device="GPU", samples_us=(float(us),))
            for name in "fg"
            for us in random.normal(10, 10 * NOISE, runs)
        ]
        wrong += compare_benchmarks(results).functions[0].outcome in {"faster", "slower"}
    return wrong / trials


class Call:
    """A call that scatters around its median, and the clock by which it is timed."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._ns = 0

    def __call__(self) -> list[float]:
        """One sample, in microseconds."""
        us = float(self._random.normal(CALL_US, CALL_US * NOISE))
        self._ns += int(us * 1e3)
        return [us]

    def clock_ns(self) -> int:
        """The time that the calls so far have taken."""
        return self._ns


def coverage(trials: int) -> tuple[float, float]:
    """The share of runs whose interval holds the true median, and how many samples they took in the median."""
    held, counts = 0, []
    for seed in range(trials):
        call = Call(seed)
        samples = collect(call, Options(), call.clock_ns)
        low, high = median_interval(samples)
        held += low <= CALL_US <= high
        counts.append(len(samples))
    return held / trials, float(np.median(counts))


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000, metavar="N", help="how many of each (10000)")
    trials = parser.parse_args().trials
    for runs in (5, 6, 8, 10, 20):
        print(f"{runs:2} runs of either function: {100 * wrong_verdicts(runs, trials):.1f} % have a verdict by chance")
    share, samples = coverage(trials // 2)
    print(f"{100 * share:.1f} % of {trials // 2} runs hold the true median; they stopped at {samples:.0f} samples")


if __name__ == "__main__":
    main()
