"""Which of several functions is faster, and whether anything shows it."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lightning_forge_profiling.bench.result import BenchmarkResult, in_unit, printable
from lightning_forge_profiling.errors import ConfigurationError

__all__ = ["Comparison", "Ratio", "compare_benchmarks"]

_RESAMPLES: Final = 2000
_VALUES_AT_ONCE: Final = 1_000_000  # 8 MB
_CONFIDENCE_PCT: Final = 95.0
_CLOCKS_DIFFER: Final = 0.02
_FEWEST: Final = 6  # as for the interval of one median
# Where runs differ by chance alone (normal, 2 %), the interval left out 1 in 3.0 % of 10,000 simulated comparisons of
# 5 runs of each function, and in 3.5 to 3.6 % with 6, 8, 10 and 20 (`python -m benchmarks.chance`); with 4, in more
# than 5 %.
_FEWEST_RUNS: Final = 5
_ON_THE_GPU_ALONE: Final = frozenset({"kernels", "graph", "saturated"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One function against the first.

    Attributes:
        name: of the function.
        median_us: of one call, over all its runs.
        runs: how many results of it there were.
        baseline_runs: how many of the first one.
        ratio: its median over the first one's; under 1 is faster.
        low: the lower end of the ratio's 95 % interval; 0 where too few samples leave it open.
        high: the upper end; infinite where they do.
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

        The last is said with fewer than five runs of either: one run apart from one other may differ by more than the
        functions do. The one before, where the interval is open at both ends.
        """
        if _is_open(self):
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
        baseline_runs: how many results of it there were.
        ratios: the others, in the order they were given.
        warnings: what makes the ratios less than they seem, in sentences.
    """

    baseline: str
    baseline_us: float
    baseline_runs: int
    ratios: tuple[Ratio, ...]
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All fields and verdicts as plain values; an open end of an interval is None."""
        values = asdict(self)
        values["ratios"] = [
            {**asdict(ratio), "high": ratio.high if math.isfinite(ratio.high) else None, "verdict": ratio.verdict}
            for ratio in self.ratios
        ]
        values["warnings"] = list(self.warnings)
        return values

    def to_json(self, indent: int | None = None) -> str:
        """The same as JSON.

        Args:
            indent: as `json.dumps` takes it.
        """
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def __str__(self) -> str:
        """A line for each function."""
        rows = [(printable(self.baseline), in_unit(self.baseline_us), "1", "", "the one to compare with")]
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
    """Compare results with the first of them.

    Results of the same name are runs of the same function. What differs between runs (clocks, temperature, where
    memory came to lie) shows only where there are several, best taken in turns. Fewer than five leave it at "too few
    runs to tell":

        compare_benchmarks([benchmark(f, x) for _ in range(5) for f in (first, second)])

    The interval is a bootstrap of the ratio of medians. With five runs of a function or more, the medians of its runs
    are drawn anew with replacement: what differs within a run is in them. With fewer, runs are, and within a run blocks
    of neighbouring samples, about as many as a block is long, so that a drift within it is not taken for many
    independent samples; this takes six samples in each.

    Source: H. R. Künsch, The jackknife and the bootstrap for general stationary observations, Annals of Statistics 17
    (1989), for the blocks; B. Efron and R. J. Tibshirani, An Introduction to the Bootstrap (1993), section 13.3, for
    the percentile interval.

    Args:
        results: two or more, of two or more names.
        seed: of the random numbers.

    Raises:
        ConfigurationError: there is nothing to compare.

    Example:
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
                f"compare_benchmarks takes a list of what benchmark returns, and a {type(result).__name__} is in it."
            )
        groups.setdefault(result.name, []).append(result)
    names = list(groups)
    if len(names) < 2:  # noqa: PLR2004  (one to compare and one to compare with)
        raise ConfigurationError(
            f"compare_benchmarks takes results of two names or more, got {len(names)}: results of one name are runs of "
            "the same function. benchmark(..., name=...) tells them apart."
        )
    base, base_us = groups[names[0]], _median(groups[names[0]])
    if not base_us:
        raise ConfigurationError(f"The median of {names[0]} is 0, and nothing has a ratio to that.")
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
    """Whether they are, or each has samples, enough for an interval."""
    return len(runs) >= _FEWEST_RUNS or all(len(run.samples_us) >= _FEWEST for run in runs)


def _median(runs: Sequence[BenchmarkResult]) -> float:
    return float(np.median([run.median_us for run in runs]))


def _draws(runs: Sequence[BenchmarkResult], random: np.random.Generator) -> NDArray[np.float64]:
    """The median over the runs, as often as there are resamples."""
    if len(runs) >= _FEWEST_RUNS:
        medians = np.array([run.median_us for run in runs])
        drawn = medians[random.integers(len(runs), size=(_RESAMPLES, len(runs)))]
        return np.asarray(np.median(drawn, axis=1), np.float64)
    within = np.stack([_draws_of_run(np.asarray(run.samples_us), random) for run in runs])
    chosen = random.integers(len(runs), size=(len(runs), _RESAMPLES))
    return np.asarray(np.median(within[chosen, np.arange(_RESAMPLES)], axis=0), np.float64)


def _draws_of_run(samples: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.float64]:
    """Medians of one run's samples, drawn anew in blocks."""
    count = len(samples)
    length = max(1, round(math.sqrt(count)))
    blocks = math.ceil(count / length)
    at_once = max(1, _VALUES_AT_ONCE // (blocks * length))
    found = []
    for first in range(0, _RESAMPLES, at_once):
        starts = random.integers(count - length + 1, size=(min(at_once, _RESAMPLES - first), blocks))
        drawn = samples[(starts[..., None] + np.arange(length)).reshape(len(starts), -1)[:, :count]]
        found.append(np.median(drawn, axis=1))
    return np.concatenate(found)


def _warnings(groups: dict[str, list[BenchmarkResult]]) -> list[str]:
    found = []
    results = [run for runs in groups.values() for run in runs]
    if any(len(runs) < _FEWEST_RUNS for runs in groups.values()):
        found.append(
            f"fewer than {_FEWEST_RUNS} runs of a function do not show what differs between runs: time each "
            "five times, in turns"
        )
    found += [text for name, runs in groups.items() if (text := _host_bound(name, runs))]
    measured: dict[str, set[Any]] = {
        "method": {run.method for run in results},
        "device": {run.device for run in results},
        "CPU threads": {run.threads for run in results} - {None},
        "whether the L2 was flushed": {run.flush_l2 for run in results},
    }
    if differing := [what for what, values in measured.items() if len(values) > 1]:
        found.append(f"the results differ in {' and '.join(differing)}")
    if not all(_enough(runs) for runs in groups.values()):
        found.append(
            f"fewer than {_FEWEST} samples in a run say nothing about a difference where there are fewer than "
            f"{_FEWEST_RUNS} runs"
        )
    clocks = [run.clock.median_mhz for run in results if run.clock is not None]
    if clocks and max(clocks) > (1 + _CLOCKS_DIFFER) * min(clocks):
        found.append(f"the GPU's clock differed between the runs: {min(clocks):.0f} to {max(clocks):.0f} MHz")
    return found


def _host_bound(name: str, runs: Sequence[BenchmarkResult]) -> str:
    """Whether the host takes longer with a call than the time that was read, in a sentence; "" where not."""
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
        "a program that calls it in a loop does not change by this ratio: time such a loop by method='wall'"
    )


def _is_open(ratio: Ratio) -> bool:
    """Whether nothing is known of it, on either side."""
    return ratio.low == 0 and math.isinf(ratio.high)


def _interval(ratio: Ratio) -> str:
    if _is_open(ratio):
        return "[unknown]"
    return f"[{ratio.low:.3f}, {'open' if math.isinf(ratio.high) else f'{ratio.high:.3f}'}]"
