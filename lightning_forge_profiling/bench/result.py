"""The result of `benchmark`: samples, what follows from them, and its text and JSON."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from statistics import median
from typing import Any, Final, Self

import msgspec
import numpy as np

from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.gpu.clocks import ClockSummary

_Z95: Final = 1.96  # of the normal distribution
# All of n samples lie on one side of the true median with probability 2 * 2^-n, which is under 5 % from 6 on.
_FEWEST: Final = 6


def median_noise(samples: Sequence[float]) -> float:
    """Half of the 95 % interval of the samples' median, as a fraction of the median."""
    if len(samples) < _FEWEST:
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
    if count < _FEWEST:
        return ordered[0], ordered[-1]
    rank = math.floor((count + 1 - _Z95 * math.sqrt(count)) / 2)
    return ordered[rank - 1], ordered[count - rank]


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
    samples_us: tuple[float, ...]
    flush_l2: bool = False
    calls_per_sample: int = 1
    enqueue_us: float | None = None
    queued_us: float | None = None
    allocated_bytes: int | None = None
    waits_for_gpu: bool = False
    threads: int | None = None
    clock: ClockSummary | None = None
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("calls_per_sample", "enqueue_us", "queued_us", "allocated_bytes", "threads"):
            value = getattr(self, name)
            if value is not None and not _is_finite(value):
                raise ConfigurationError(f"{name} must be a number, 0 or more, got {value!r}.")
        if not self.samples_us:
            raise ConfigurationError("A result needs at least one sample.")
        for sample in self.samples_us:
            if not _is_finite(sample):
                raise ConfigurationError(f"samples_us must be microseconds, 0 or more, got {sample!r} among them.")

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

    def _percentile(self, percent: float) -> float:
        return float(np.percentile(self.samples_us, percent))

    def to_dict(self) -> dict[str, Any]:
        """All fields and the values computed from them, as plain values."""
        samples = tuple(map(float, self.samples_us))  # JSON takes no float32
        values: dict[str, Any] = msgspec.to_builtins(replace(self, samples_us=samples))
        for name in ("median_us", "mean_us", "min_us", "p5_us", "p95_us", "iqr_us"):
            values[name] = getattr(self, name)
        values["noise"] = self.noise if math.isfinite(self.noise) else None  # JSON has no infinity
        return values

    def to_json(self, indent: int | None = None) -> str:
        """The same as JSON.

        Args:
            indent: as `json.dumps` takes it.
        """
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The result from what `to_dict` returned. Values computed from the fields are computed again.

        Raises:
            ConfigurationError: the values are not those of a result.
        """
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"Not a result of to_dict() or to_json(): {error}.") from error

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The result from what `to_json` returned.

        Raises:
            ConfigurationError: the text is something else.
        """
        try:
            values = json.loads(text)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"Not a result of to_json(): {error}.") from error
        return cls.from_dict(values)

    def _cache(self) -> str:
        if self.enqueue_us is None:
            return "on the host's clock" + (f", {self.threads} CPU threads" if self.threads else "")
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


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < math.inf
