"""From which size on an operation is faster on the GPU than on the CPU."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

from lightning_forge_profiling.errors import ConfigurationError

__all__ = [
    "GPU_WAYS",
    "MOST_SIZE",
    "SCHEMA_VERSION",
    "WAYS",
    "Crossover",
    "CrossoverResult",
    "Curve",
    "Explored",
    "Point",
    "Setting",
    "Way",
    "find_crossover",
]

Way: TypeAlias = Literal["cpu", "stream", "alone", "copies"]
"""How an operation is run.

- `cpu`: on the CPU, call after call.
- `stream`: on the GPU, call after call, with the data there. The host's clock around many calls and the wait for the
  last, divided by their number: the launch or the GPU's work, whichever takes longer.
- `alone`: one call on an idle GPU, with the data there, and the wait for its end: launch, work and synchronization.
- `copies`: the same from data in the CPU's memory to a result there: the copies are in the time.
"""

WAYS: Final[tuple[Way, ...]] = get_args(Way)
GPU_WAYS: Final[tuple[Way, ...]] = ("stream", "alone", "copies")

MOST_SIZE: Final = 10**9
"""No machine has the memory for a larger one."""

_LEAST_US: Final = 1e-6  # a clock's cycle is longer
_MOST_US: Final = 1e15  # thirty years
_NOISY: Final = 0.1

SCHEMA_VERSION: Final = 1
"""Of the JSON that `CrossoverResult.to_dict` becomes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The time of one call at one size.

    Attributes:
        size: of the operation; what that means is the operation's to say.
        us: median, in microseconds.
        low_us: lower end of the median's 95 % interval; the least sample where there are too few for one.
        high_us: upper end, or the greatest sample.
        samples: how many there were.
        warnings: what `benchmark` said against it, in sentences.
    """

    size: int
    us: float
    low_us: float
    high_us: float
    samples: int
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ordered = _LEAST_US <= self.low_us <= self.us <= self.high_us <= _MOST_US
        if not (ordered and 0 < self.size <= MOST_SIZE and self.samples > 0):
            raise ConfigurationError(f"not a point of a curve: {self}")

    @property
    def noise(self) -> float:
        """How far the interval reaches from the median, relative to it."""
        return max(self.high_us - self.us, self.us - self.low_us) / self.us

    @property
    def noisy(self) -> bool:
        """Whether its time is known to no better than 10 %, or nobody knows how well, from one sample."""
        return self.samples == 1 or self.noise > _NOISY


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """An operation's time over its sizes, in one way.

    Attributes:
        way: one of `WAYS`.
        points: by size, ascending.
        ended: why there is no point for the next larger size; "" where there is one for each that was asked for.
    """

    way: Way
    points: tuple[Point, ...]
    ended: str = ""

    def __post_init__(self) -> None:
        sizes = [point.size for point in self.points]
        if sizes != sorted(set(sizes)):
            raise ConfigurationError(f"the sizes of a curve ascend, and these do not: {sizes}")

    def at(self, size: int) -> Point | None:
        """The point of that size, None where there is none."""
        return next((point for point in self.points if point.size == size), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossover:
    """From which size on the GPU is faster than the CPU, for that size and all larger ones that were compared.

    Attributes:
        way: how it runs on the GPU, one of `GPU_WAYS`.
        compared: the sizes that both curves have.
        size: the size, between two that were compared; the smallest of them where the GPU is faster at all; None where
            it is slower at the largest, and so from no size on faster.
        low: the same, had the GPU been as fast and the CPU as slow as the 95 % intervals of their medians allow.
        high: the same, had it been the other way round.
        us: what a call of `size` takes the CPU, in microseconds; None where `size` is.
        earlier: smaller sizes at which the GPU was faster too, before it was slower again.
        everywhere: whether the GPU is faster at every size that was compared.
    """

    way: Way
    compared: tuple[int, ...]
    size: float | None
    low: float | None
    high: float | None
    us: float | None = None
    earlier: tuple[int, ...] = ()
    everywhere: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """An operation's curves.

    Attributes:
        name: of the operation.
        meaning: what it computes at size n.
        curves: one for each way in which it was run.
    """

    name: str
    meaning: str
    curves: tuple[Curve, ...]

    def __post_init__(self) -> None:
        ways = [curve.way for curve in self.curves]
        if len(ways) != len(set(ways)):
            raise ConfigurationError(f"an operation has one curve for each way, and this one: {', '.join(ways)}")

    def curve(self, way: Way) -> Curve | None:
        """The curve of that way, None where it was not run so."""
        return next((curve for curve in self.curves if curve.way == way), None)

    def speedup(self, way: Way, size: int) -> float | None:
        """How many times as long a call takes on the CPU; None where either was not timed at that size."""
        cpu, curve = self.curve("cpu"), self.curve(way)
        base, point = (None if each is None else each.at(size) for each in (cpu, curve))
        return None if base is None or point is None else base.us / point.us

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes that any curve has."""
        return tuple(sorted({point.size for curve in self.curves for point in curve.points}))

    @property
    def crossovers(self) -> tuple[Crossover, ...]:
        """One for each way in which it was run on the GPU."""
        cpu = self.curve("cpu")
        return tuple(find_crossover(cpu, curve) for curve in self.curves if cpu and curve.way != "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where and how it was measured.

    Attributes:
        date: the day, as 2026-01-31.
        dtype: of all tensors.
        tf32: where float32 is computed in TF32, in words; "" for other types.
        cpu: its name.
        threads: of the CPU that an operation may use.
        gpu: its name; "" where there was none.
        torch: version of PyTorch.
        platform: version of CUDA or ROCm that it is built with; "" for neither.
    """

    date: str
    dtype: str
    tf32: str
    cpu: str
    threads: int
    gpu: str
    torch: str
    platform: str

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ConfigurationError(f"a CPU has one thread at least, and not {self.threads}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossoverResult:
    """All that was measured.

    Attributes:
        setting: where and how.
        operations: with their curves; one at least.
        schema_version: of the JSON.
    """

    setting: Setting
    operations: tuple[Explored, ...]
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if not self.operations:
            raise ConfigurationError("it has no operations")

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values, and the crossovers that follow from them."""
        values = asdict(self)
        for plain, operation in zip(values["operations"], self.operations, strict=True):
            plain["crossovers"] = [asdict(crossover) for crossover in operation.crossovers]
        return values


def find_crossover(cpu: Curve, gpu: Curve) -> Crossover:
    """Find from which size on the GPU's curve stays below the CPU's.

    Between two sizes both curves are taken as straight in a plot with two logarithmic axes, as that of any power of
    the size is; so is then the ratio of the two times, and where it passes 1 is the crossover.

    Args:
        cpu: the CPU's curve.
        gpu: a curve of the GPU.

    Example:
        >>> def curve(way, times):
        ...     points = [Point(size=n, us=us, low_us=us, high_us=us, samples=9) for n, us in times.items()]
        ...     return Curve(way=way, points=tuple(points))
        >>> cpu = curve("cpu", {64: 1.0, 128: 4.0, 256: 16.0})
        >>> find_crossover(cpu, curve("alone", {64: 8.0, 128: 8.0, 256: 8.0})).size
        181.01...
    """
    pairs = [(mine, other) for other in cpu.points if (mine := gpu.at(other.size)) is not None]
    sizes = [mine.size for mine, _ in pairs]
    seen = [math.log(mine.us / other.us) for mine, other in pairs]
    at_best = [math.log(mine.low_us / other.high_us) for mine, other in pairs]
    at_worst = [math.log(mine.high_us / other.low_us) for mine, other in pairs]
    size = _crossing(sizes, seen)
    return Crossover(
        way=gpu.way,
        compared=tuple(sizes),
        size=size,
        low=_crossing(sizes, at_best),
        high=_crossing(sizes, at_worst),
        us=None if size is None else _time_at([other for _, other in pairs], size),
        earlier=tuple(n for n, ratio in zip(sizes, seen, strict=True) if ratio < 0 and (size is None or n < size)),
        everywhere=bool(seen) and max(seen) < 0,
    )


def _crossing(sizes: Sequence[int], log_ratios: Sequence[float]) -> float | None:
    """From which size on the logarithm of a ratio stays negative; None where it is not at the end."""
    first = len(sizes)
    while first > 0 and log_ratios[first - 1] < 0:
        first -= 1
    if first == len(sizes):
        return None
    if first == 0:
        return float(sizes[0])
    before, after = log_ratios[first - 1], log_ratios[first]
    size = sizes[first - 1] * (sizes[first] / sizes[first - 1]) ** (before / (before - after))
    return min(float(size), float(sizes[first]))  # rounding may take it past the end


def _time_at(points: Sequence[Point], size: float) -> float:
    """The time on the line through the points before and after, on logarithmic axes."""
    last = next(number for number, point in enumerate(points) if point.size >= size)
    first = max(last - 1, 0)
    if first == last:
        return points[last].us
    before, after = points[first], points[last]
    slope = math.log(after.us / before.us) / math.log(after.size / before.size)
    return after.us * float((size / after.size) ** slope)
