"""Which of several functions is faster: ratios of medians, with intervals and a verdict."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.bench.result import BenchmarkResult, in_unit, printable
from lightning_forge_profiling.diagnosis.bootstrap import resampled_medians
from lightning_forge_profiling.errors import ConfigurationError

_RESAMPLES: Final = 2000
_CONFIDENCE_PCT: Final = 95.0
_CLOCKS_DIFFER: Final = 0.02
_FEWEST_SAMPLES: Final = 6  # as for the interval of one median
# If runs differ by chance alone (normal, 2 %), the interval excluded 1 in 3.0 % of 10,000 simulated comparisons of 5
# runs of each function, and in 3.5 to 3.6 % with 6, 8, 10 and 20 (`python -m benchmarks.chance`); with 4, in more than
# 5 %.
_FEWEST_RUNS: Final = 5
_RUNS_DIFFER: Final = 2.0  # a power cap makes an H200 13 % slower; a busy CPU made runs of one function differ by 50 %
_ON_THE_GPU_ALONE: Final = frozenset({"kernels", "graph", "saturated"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One function against the first.

    Attributes:
        name: of the function.
        median_us: of one call, over all its runs.
        runs: the number of its results.
        baseline_runs: the number of results of the first function.
        ratio: its median divided by the first one's; below 1 it is faster.
        low: the lower end of the ratio's 95 % interval; 0 if there are too few samples for one.
        high: the upper end; infinite if there are too few samples for one.
    """

    name: str
    median_us: float
    runs: int
    baseline_runs: int
    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """`"faster"`, `"slower"`, `"no difference shown"`, `"too few samples to tell"` or `"too few runs to tell"`.

        There are too few runs with fewer than five of either function: two runs of one function may differ by more
        than two functions do. There are too few samples if the interval is open at both ends.
        """
        if self.low == 0 and math.isinf(self.high):
            return "too few samples to tell"
        if self.low <= 1 <= self.high:
            return "no difference shown"
        if min(self.runs, self.baseline_runs) < _FEWEST_RUNS:
            return "too few runs to tell"
        return "faster" if self.high < 1 else "slower"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Several functions against the first.

    Attributes:
        baseline: the first one's name.
        baseline_us: its median.
        baseline_runs: the number of its results.
        ratios: of the others, in the order they were given.
        warnings: what to know before trusting the ratios, one sentence each.
    """

    baseline: str
    baseline_us: float
    baseline_runs: int
    ratios: tuple[Ratio, ...]
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All fields and verdicts as plain values; an open end of an interval is None."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        for ratio, written in zip(self.ratios, values["ratios"], strict=True):
            written |= {"high": ratio.high if math.isfinite(ratio.high) else None, "verdict": ratio.verdict}
        return values

    def to_json(self, indent: int | None = None) -> str:
        """The same as JSON.

        Args:
            indent: as `json.dumps` takes it.
        """
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def __str__(self) -> str:
        """A line for each function."""
        rows = [(printable(self.baseline), in_unit(self.baseline_us), "1", "", "baseline")]
        rows += [
            (printable(r.name), in_unit(r.median_us), f"{r.ratio:.3f}", _interval(r), r.verdict) for r in self.ratios
        ]
        wide = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            f"{name:<{wide[0]}}  {time:>{wide[1]}}  {ratio:>{wide[2]}}  {interval:<{wide[3]}}  {verdict}"
            for name, time, ratio, interval, verdict in rows
        ]
        return "\n".join([*lines, *(f"warning: {printable(warning)}" for warning in self.warnings)])


def compare_benchmarks(results: Iterable[BenchmarkResult], *, seed: int = 0) -> Comparison:
    """Compare functions with the first of them.

    Results of one name are runs of one function. Lambdas made in a loop, closures of one factory and modules of one
    class share their default name: give each a `name=`. Differences between runs (clocks, temperature, memory
    addresses) need several runs to show, best taken in turns; with fewer than five the verdict is "too few runs to
    tell":

        compare_benchmarks([benchmark(f, x) for _ in range(5) for f in (first, second)])

    The interval is a bootstrap of the ratio of medians. With five runs of a function or more, the medians of its runs
    are resampled. With fewer, runs are resampled, and within a run blocks of neighbouring samples, about as many as a
    block is long, so that a drift does not count as many independent samples; each run then needs six samples.

    Args:
        results: of two names or more.
        seed: of the random numbers.

    Raises:
        ConfigurationError: these are not results, or there is nothing to compare.

    Examples:
        >>> first = BenchmarkResult(name="f", method="cpu", device="cpu", samples_us=(10.0, 10.1, 9.9) * 20)
        >>> second = BenchmarkResult(name="g", method="cpu", device="cpu", samples_us=(12.0, 12.1, 11.9) * 20)
        >>> compare_benchmarks([first, second]).ratios[0].verdict
        'too few runs to tell'
        >>> compare_benchmarks([first, second] * 5).ratios[0].verdict
        'slower'
    """
    groups: dict[str, list[BenchmarkResult]] = {}
    for result in [results] if isinstance(results, BenchmarkResult) else results:
        if not isinstance(result, BenchmarkResult):
            raise ConfigurationError(
                f"compare_benchmarks takes a list of BenchmarkResult, got {type(result).__name__} among them."
            )
        groups.setdefault(result.name, []).append(result)
    names = list(groups)
    if len(names) < 2:  # noqa: PLR2004  (one to compare and one to compare with)
        raise ConfigurationError(
            f"compare_benchmarks needs results of two names or more, got {len(names)}: results of one name are runs of "
            "one function. Name the functions with benchmark(..., name=...)."
        )
    base, base_us = groups[names[0]], _median(groups[names[0]])
    if not base_us:
        raise ConfigurationError(f"The median of {names[0]} is 0, so nothing can be compared with it.")
    random = np.random.default_rng(seed)
    base_draws = _draws(base, random)
    tail = (100 - _CONFIDENCE_PCT) / 2
    ratios = []
    for name in names[1:]:
        runs, us = groups[name], _median(groups[name])
        draws = np.full(_RESAMPLES, math.inf)
        np.divide(_draws(runs, random), base_draws, out=draws, where=base_draws > 0)
        low, high = np.percentile(draws, [tail, 100 - tail], method="inverted_cdf")
        known = _enough(runs) and _enough(base)
        ratios.append(
            Ratio(
                name=name,
                median_us=us,
                runs=len(runs),
                baseline_runs=len(base),
                ratio=us / base_us,
                low=float(low) if known else 0.0,
                high=float(high) if known else math.inf,
            )
        )
    return Comparison(
        baseline=names[0],
        baseline_us=base_us,
        baseline_runs=len(base),
        ratios=tuple(ratios),
        warnings=tuple(_warnings(groups)),
    )


def _enough(runs: Sequence[BenchmarkResult]) -> bool:
    """Whether there are enough runs, or enough samples in each, for an interval."""
    return len(runs) >= _FEWEST_RUNS or all(len(run.samples_us) >= _FEWEST_SAMPLES for run in runs)


def _median(runs: Sequence[BenchmarkResult]) -> float:
    return float(np.median([run.median_us for run in runs]))


def _draws(runs: Sequence[BenchmarkResult], random: np.random.Generator) -> NDArray[np.float64]:
    """Resampled medians over the runs."""
    if len(runs) >= _FEWEST_RUNS:
        return resampled_medians(np.array([run.median_us for run in runs]), 1, _RESAMPLES, random)
    samples = [np.array(run.samples_us, float) for run in runs]
    within = np.stack([resampled_medians(s, max(1, round(math.sqrt(len(s)))), _RESAMPLES, random) for s in samples])
    chosen = random.integers(len(runs), size=(len(runs), _RESAMPLES))
    return np.asarray(np.median(within[chosen, np.arange(_RESAMPLES)], axis=0), np.float64)


def _warnings(groups: dict[str, list[BenchmarkResult]]) -> list[str]:
    warnings = []
    results = [run for runs in groups.values() for run in runs]
    if any(len(runs) < _FEWEST_RUNS for runs in groups.values()):
        warnings.append(
            f"fewer than {_FEWEST_RUNS} runs of a function do not show how much runs differ: time each function five "
            "times, in turns"
        )
    warnings += [
        text for name, runs in groups.items() for check in (_one_function, _host_bound) if (text := check(name, runs))
    ]
    measured: dict[str, set[Any]] = {
        "method": {run.method for run in results},
        "device": {run.device for run in results},
        "CPU threads": {run.threads for run in results} - {None},
        "whether the L2 cache was flushed": {run.flush_l2 for run in results},
    }
    if differing := [what for what, values in measured.items() if len(values) > 1]:
        warnings.append(f"the results differ in {' and '.join(differing)}")
    if not all(_enough(runs) for runs in groups.values()):
        warnings.append(
            f"a run of fewer than {_FEWEST_SAMPLES} samples gives no interval, unless there are {_FEWEST_RUNS} runs"
        )
    clocks = [run.clock.median_mhz for run in results if run.clock is not None]
    if clocks and max(clocks) > (1 + _CLOCKS_DIFFER) * min(clocks):
        warnings.append(f"the GPU's clock differed between the runs: {min(clocks):.0f} to {max(clocks):.0f} MHz")
    return warnings


def _one_function(name: str, runs: Sequence[BenchmarkResult]) -> str:
    """Whether runs of one name may be of different functions, as a sentence; "" if not."""
    medians = sorted(run.median_us for run in runs)
    if medians[-1] <= _RUNS_DIFFER * medians[0]:
        return ""
    return (
        f"the runs of {name} took from {in_unit(medians[0])} to {in_unit(medians[-1])}: either the machine was not "
        "steady, or they are different functions, and each needs its own name="
    )


def _host_bound(name: str, runs: Sequence[BenchmarkResult]) -> str:
    """Whether launching a call takes longer than the time that was measured, as a sentence; "" if not."""
    timed = [run for run in runs if run.enqueue_us is not None and run.method in _ON_THE_GPU_ALONE]
    if not timed:
        return ""
    host_us, us = (
        float(np.median(values)) for values in zip(*((r.enqueue_us, r.median_us) for r in timed), strict=True)
    )
    if host_us <= us:
        return ""
    return (
        f"the host is the limit of {name}: it takes {in_unit(host_us)} to launch what takes the GPU {in_unit(us)}, so "
        "a loop of calls does not change by this ratio: time the loop with method='wall'"
    )


def _interval(ratio: Ratio) -> str:
    if ratio.low == 0 and math.isinf(ratio.high):
        return "[unknown]"
    return f"[{ratio.low:.3f}, {'open' if math.isinf(ratio.high) else f'{ratio.high:.3f}'}]"
