"""The result of `benchmark`, its text and JSON; and which of several functions is faster, by their results."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any, Final, Self, TypeAlias

import msgspec
import numpy as np

from lightning_forge_profiling.comparison.ratio import decide, geometric_mean, ratio_of
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.gpu.clocks import ClockSummary
from lightning_forge_profiling.schema import Outcome, Ratio
from lightning_forge_profiling.timing.bootstrap import Estimate, median_estimate

_Z95: Final = 1.96  # of the normal distribution
# All of n samples lie on one side of the true median with probability 2 * 2^-n, which is under 5 % from 6 on.
_FEWEST_SAMPLES: Final = 6


def median_noise(samples: Sequence[float]) -> float:
    """Half of the 95 % interval of the samples' median, as a fraction of the median."""
    if len(samples) < _FEWEST_SAMPLES:
        return math.inf
    ordered = sorted(samples)
    low, high = median_interval(ordered)
    middle, width = median(ordered), high - low
    return width / 2 / middle if middle > 0 else (math.inf if width else 0.0)


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """The ends of the 95 % interval of the samples' median.

    The lower end is the sorted sample number (n+1)/2 - 0.98 sqrt(n), rounded down, and the upper end the same from the
    other side. That holds for any distribution of independent samples, so the ends need not be equally far from the
    median.

    By the exact binomial, the interval contains the true median in at least 95 % of cases for every n from 6 to 3000
    (summed, not simulated). The next narrower one does so in fewer, except for 23 of those n, such as 17 and 44.

    Source: W. J. Conover, Practical Nonparametric Statistics (3rd ed., 1999), section 3.2, with the normal
    approximation of the binomial and its correction for continuity.

    Examples:
        >>> median_interval([10.0] * 12 + [10.5] * 8)
        (10.0, 10.5)
    """
    ordered, count = sorted(samples), len(samples)
    if count < _FEWEST_SAMPLES:
        return ordered[0], ordered[-1]
    rank = math.floor((count + 1 - _Z95 * math.sqrt(count)) / 2)
    return ordered[rank - 1], ordered[count - rank]


_Microseconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, lt=1e15)]  # thirty years
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BenchmarkResult:
    """The time of one call of a function.

    Attributes:
        name: of the function.
        method: one of `benchmark`'s methods.
        device: the name of the device.
        flush_l2: whether the L2 cache was flushed before each call (cold) or not (hot).
        samples_us: microseconds per call, in the order the samples were taken.
        calls_per_sample: a sample is the mean over this many calls.
        enqueue_us: how long one call keeps the host busy when the GPU is idle; None if the time is the host's alone.
        queued_us: what a call takes in a full queue, back to back with a hot L2 cache, gaps between its kernels
            included: a rough value from a few calls. None if the function waits for the GPU.
        allocated_bytes: what a call takes from the caching allocator; None on a CPU.
        waits_for_gpu: whether the function waits for the GPU, by `.item()` for example.
        threads: the number of CPU threads an operation may use; None if the time is not the host's alone.
        clock: the GPU's clock while sampling; None if it was not read.
        warnings: what to know before trusting the number, one sentence each.

    Examples:
        >>> result = BenchmarkResult(name="f()", method="cpu", device="cpu", samples_us=(2.0, 1.0, 3.0))
        >>> result.median_us, result.min_us
        (2.0, 1.0)
        >>> BenchmarkResult.from_json(result.to_json()) == result
        True
    """

    name: str
    method: str
    device: str
    samples_us: Annotated[tuple[_Microseconds, ...], msgspec.Meta(min_length=1)]
    flush_l2: bool = False
    calls_per_sample: _Count = 1
    enqueue_us: _Microseconds | None = None
    queued_us: _Microseconds | None = None
    allocated_bytes: _Count | None = None
    waits_for_gpu: bool = False
    threads: _Count | None = None
    clock: ClockSummary | None = None
    warnings: tuple[str, ...] = ()

    @property
    def median_us(self) -> float:
        """The median: the number to quote."""
        return self._percentile(50)

    @property
    def mean_us(self) -> float:
        """The mean."""
        return float(np.mean(self.samples_us))

    @property
    def min_us(self) -> float:
        """The shortest sample."""
        return float(min(self.samples_us))

    @property
    def p5_us(self) -> float:
        """The 5th percentile."""
        return self._percentile(5)

    @property
    def p95_us(self) -> float:
        """The 95th percentile."""
        return self._percentile(95)

    @property
    def iqr_us(self) -> float:
        """The interquartile range."""
        return self._percentile(75) - self._percentile(25)

    @property
    def noise(self) -> float:
        """Half of the 95 % interval of this run's median, as a fraction of the median.

        Another run may differ by more: clocks, temperature and memory addresses change between runs.
        """
        return median_noise(self.samples_us)

    @property
    def estimate(self) -> Estimate | None:
        """The median with its error; None unless it is positive."""
        return median_estimate(self.samples_us, block=max(1, round(math.sqrt(len(self.samples_us)))))

    def _percentile(self, percent: float) -> float:
        return float(np.percentile(self.samples_us, percent))

    def to_json(self, indent: int | None = None) -> str:
        """All fields and the values computed from them, as JSON.

        Args:
            indent: as `json.dumps` takes it.
        """
        values: dict[str, Any] = msgspec.to_builtins(self)
        for name in ("median_us", "mean_us", "min_us", "p5_us", "p95_us", "iqr_us"):
            values[name] = getattr(self, name)
        values["noise"] = self.noise if math.isfinite(self.noise) else None  # JSON has no infinity
        return json.dumps(values, indent=indent, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The result from what `to_json` returned. Values computed from the fields are computed again.

        Raises:
            ConfigurationError: the text is something else.
        """
        try:
            return msgspec.convert(json.loads(text), cls)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"Not a result of to_json(): {error}.") from error

    def _cache(self) -> str:
        if self.enqueue_us is None:
            threads = f", {self.threads} CPU thread{'s' * (self.threads != 1)}" if self.threads else ""
            return f"on the host's clock{threads}"
        return "L2 flushed before each call" if self.flush_l2 else "L2 hot"

    def __str__(self) -> str:
        """A few lines: the median, its spread, the host's part, the clock and the warnings."""
        each = f" of {self.calls_per_sample} calls" if self.calls_per_sample > 1 else ""
        known = f", known to ±{self.noise:.1%} within this run" if math.isfinite(self.noise) else ""
        count = f"{len(self.samples_us)} sample{'s' if len(self.samples_us) > 1 else ''}{each}"
        spread = (
            f"mean {in_unit(self.mean_us)}, IQR {in_unit(self.iqr_us)}, min {in_unit(self.min_us)}, "
            f"p5 {in_unit(self.p5_us)}, p95 {in_unit(self.p95_us)}"
        )
        lines = [
            f"{self.name} on {self.device}",
            f"{in_unit(self.median_us)}, median of {count}{known} ({self.method}, {self._cache()})",
            spread,
        ]
        if self.enqueue_us is not None and self.queued_us is not None:
            text = f"back to back (L2 hot): {in_unit(self.queued_us)} on the GPU with gaps, "
            text += f"{in_unit(self.enqueue_us)} to launch"
            lines.append(text + (": the host is the limit" if self.enqueue_us > self.queued_us else ""))
        if self.allocated_bytes:
            lines.append(f"a call takes {self.allocated_bytes:,} bytes from the caching allocator")
        if self.clock is not None:
            lines.append(str(self.clock))
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n  ".join(map(printable, lines))

    __repr__ = __str__  # a notebook shows this


def printable(text: str) -> str:
    r"""Text with every unprintable character escaped, for terminals."""
    return "".join(
        " " if character.isspace() else character if character.isprintable() else repr(character)[1:-1]
        for character in text
    )


def in_unit(us: float) -> str:
    """A time with its unit, to three digits.

    Examples:
        >>> in_unit(2.345), in_unit(0.0213), in_unit(187_300.0)
        ('2.35 µs', '21.3 ns', '187 ms')
    """
    units = ((1e6, "s"), (1e3, "ms"), (1.0, "µs"))
    scale, unit = next(((scale, unit) for scale, unit in units if abs(us) >= scale), (1e-3, "ns"))
    digits = len(str(int(abs(us / scale))))
    return f"{us / scale:.{max(0, 3 - digits)}f} {unit}"


_SCATTER: Final = 0.03  # assumed between equal runs where one of each is known: as of runs made in turns
_CLOCKS_DIFFER: Final = 0.02
_RUNS_DIFFER: Final = 2.0  # a power cap makes an H200 13 % slower; a busy CPU made runs of one function differ by 50 %
_ON_THE_GPU_ALONE: Final = frozenset({"kernels", "graph", "saturated"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedFunction:
    """One function against the first.

    Attributes:
        name: of the function.
        median_us: of one call, the geometric mean over its runs.
        ratio: its time divided by the first one's, with the 95 % interval; below 1 it is faster.
        outcome: what the interval says: `faster`, `slower`, `same` (within 5 %), `too noisy` or `too short`.
    """

    name: str
    median_us: float
    ratio: Ratio
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Several functions against the first.

    Attributes:
        baseline: the first one's name.
        baseline_us: its time, the geometric mean over its runs.
        functions: the others, in the order they were given.
        warnings: what to know before trusting the ratios, one sentence each.
    """

    baseline: str
    baseline_us: float
    functions: tuple[ComparedFunction, ...]
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        """A line for each function."""
        rows = [(printable(self.baseline), in_unit(self.baseline_us), "1", "", "baseline")]
        for each in self.functions:
            low, high = each.ratio.low, each.ratio.high
            interval = "[unknown]" if low is None else f"[{low:.3f}, {high:.3f}]"
            rows.append(
                (printable(each.name), in_unit(each.median_us), f"{each.ratio.ratio:.3f}", interval, each.outcome)
            )
        wide = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            f"{name:<{wide[0]}}  {time:>{wide[1]}}  {ratio:>{wide[2]}}  {interval:<{wide[3]}}  {outcome}"
            for name, time, ratio, interval, outcome in rows
        ]
        return "\n".join([*lines, *(f"warning: {printable(warning)}" for warning in self.warnings)])


def compare_benchmarks(results: Iterable[BenchmarkResult]) -> Comparison:
    """Compare functions with the first of them, as `forge-profiling compare` compares runs.

    Results of one name are runs of one function. Lambdas made in a loop, closures of one factory and modules of one
    class share their default name: give each a `name=`. Differences between runs (clocks, temperature, memory
    addresses) need several runs to show, best taken in turns; with one of each, a scatter of 3 % is assumed:

        compare_benchmarks([benchmark(f, x) for _ in range(5) for f in (first, second)])

    Args:
        results: of two names or more.

    Raises:
        ConfigurationError: these are not results, or there is nothing to compare.

    Examples:
        >>> first = BenchmarkResult(name="f", method="cpu", device="cpu", samples_us=(10.0, 10.1, 9.9) * 20)
        >>> second = BenchmarkResult(name="g", method="cpu", device="cpu", samples_us=(12.0, 12.1, 11.9) * 20)
        >>> compare_benchmarks([first, second] * 5).functions[0].outcome
        'slower'
    """
    results = [results] if isinstance(results, BenchmarkResult) else list(results)
    groups: dict[str, list[BenchmarkResult]] = {}
    for result in results:
        if not isinstance(result, BenchmarkResult):
            raise ConfigurationError(
                f"compare_benchmarks takes a list of BenchmarkResult, got {type(result).__name__} among them."
            )
        groups.setdefault(result.name, []).append(result)
    if len(groups) < 2:  # noqa: PLR2004  (one to compare and one to compare with)
        raise ConfigurationError(
            f"compare_benchmarks needs results of two names or more, got {len(groups)}: results of one name are runs "
            "of one function. Name the functions with benchmark(..., name=...)."
        )
    runs = {name: [each for run in group if (each := run.estimate)] for name, group in groups.items()}
    for name, group in groups.items():
        if len(runs[name]) < len(group):
            raise ConfigurationError(f"A median of {name} is 0, so it cannot be compared.")
    first, *others = groups
    in_turns = [result.name for result in results] == [first, *others] * len(groups[first])
    us = {name: geometric_mean([run.value for run in estimates]) for name, estimates in runs.items()}
    ratios = {name: ratio_of(runs[first], runs[name], _SCATTER, in_turns=in_turns) for name in others}
    return Comparison(
        baseline=first,
        baseline_us=us[first],
        functions=tuple(
            ComparedFunction(name=name, median_us=us[name], ratio=ratio, outcome=decide(ratio, None))
            for name, ratio in ratios.items()
        ),
        warnings=tuple(_warnings(groups)),
    )


def _warnings(groups: Mapping[str, Sequence[BenchmarkResult]]) -> Iterator[str]:
    results = [run for runs in groups.values() for run in runs]
    for name, runs in groups.items():
        medians = sorted(run.median_us for run in runs)
        if medians[-1] > _RUNS_DIFFER * medians[0]:
            yield (
                f"the runs of {name} took from {in_unit(medians[0])} to {in_unit(medians[-1])}: either the machine was "
                "not steady, or they are different functions, and each needs its own name="
            )
        launched = [run for run in runs if run.enqueue_us is not None and run.method in _ON_THE_GPU_ALONE]
        host_us = median([run.enqueue_us or 0.0 for run in launched] or [0.0])
        if launched and host_us > (us := median(run.median_us for run in launched)):
            yield (
                f"the host is the limit of {name}: it takes {in_unit(host_us)} to launch what takes the GPU "
                f"{in_unit(us)}, so a loop of calls does not change by this ratio: time the loop with method='wall'"
            )
    measured: dict[str, set[Any]] = {
        "method": {run.method for run in results},
        "device": {run.device for run in results},
        "CPU threads": {run.threads for run in results} - {None},
        "whether the L2 cache was flushed": {run.flush_l2 for run in results},
    }
    if differing := [what for what, values in measured.items() if len(values) > 1]:
        yield f"the results differ in {' and '.join(differing)}"
    clocks = [run.clock.median_mhz for run in results if run.clock is not None]
    if clocks and max(clocks) > (1 + _CLOCKS_DIFFER) * min(clocks):
        yield f"the GPU's clock differed between the runs: {min(clocks):.0f} to {max(clocks):.0f} MHz"
