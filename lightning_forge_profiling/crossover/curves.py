"""Times over sizes as curves, the size at which the GPU's curve crosses the CPU's, and both as sentences and tables."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, get_args

import msgspec

from lightning_forge_profiling.bench.result import BenchmarkResult, in_unit, median_interval
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.json_layout import decoded
from lightning_forge_profiling.plain_text import plain
from lightning_forge_profiling.report.screen import Row, Screen, Table, Text, columns_of
from lightning_forge_profiling.safe_files import read_regular

Way: TypeAlias = Literal["cpu", "stream", "alone", "copies"]
"""How an operation is run.

- `cpu`: on the CPU, call after call.
- `stream`: on the GPU, call after call, with the data there: the host clock around many calls and one synchronization,
  divided by their number. That is the launch or the GPU's work, whichever takes longer.
- `alone`: one call on an idle GPU, with the data there: launch, work and synchronization.
- `copies`: the same from data in the CPU's memory to a result there, copies included.
"""

WAYS: Final[tuple[Way, ...]] = get_args(Way)

MOST_SIZE: Final = 10**9  # no machine has the memory for a larger operation
SCHEMA_VERSION: Final = 1  # of the JSON file

_NOISY: Final = 0.1
_Microseconds: TypeAlias = Annotated[float, msgspec.Meta(ge=1e-6, le=1e15)]  # of a clock cycle, to thirty years


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The time of one call at one size: the median of `samples` samples, with its 95 % interval."""

    size: Annotated[int, msgspec.Meta(ge=1, le=MOST_SIZE)]  # n, in the operation's meaning
    us: _Microseconds
    low_us: _Microseconds  # the least sample if there are too few for an interval
    high_us: _Microseconds
    samples: Annotated[int, msgspec.Meta(ge=1)]
    warnings: tuple[str, ...] = ()  # of `benchmark`

    @classmethod
    def of(cls, size: int, result: BenchmarkResult, calls: int = 1) -> Self:
        """A result at a size; each call that was timed made `calls` calls."""
        low, high = median_interval(result.samples_us)
        return cls(
            size=size,
            us=result.median_us / calls,
            low_us=low / calls,
            high_us=high / calls,
            samples=len(result.samples_us),
            warnings=result.warnings,
        )

    @property
    def noise(self) -> float:
        """The distance from the median to the farther end of its interval, as a fraction of the median."""
        return max(self.high_us - self.us, self.us - self.low_us) / self.us

    @property
    def noisy(self) -> bool:
        """Whether its time is known to no better than 10 %, or is a single sample."""
        return self.samples == 1 or self.noise > _NOISY


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """An operation's time over its sizes, ascending, in one way."""

    way: Way
    points: tuple[Point, ...]
    ended: str = ""  # why there is no point for the next larger size; "" if every size has one

    def __post_init__(self) -> None:
        sizes = [point.size for point in self.points]
        if sizes != sorted(set(sizes)):
            raise ConfigurationError(f"the sizes of a curve must ascend, got {sizes}")

    def at(self, size: int) -> Point | None:
        """The point of that size, or None."""
        return next((point for point in self.points if point.size == size), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossover:
    """The size from which the GPU is faster than the CPU, there and at all larger sizes that were compared."""

    way: Way  # on the GPU
    compared: tuple[int, ...]  # the sizes that both curves have
    # Between two sizes that were compared; the smallest of them if the GPU is faster at all; None if it is slower at
    # the largest.
    size: float | None
    low: float | None  # the same with the GPU as fast and the CPU as slow as their 95 % intervals allow
    high: float | None  # the same the other way round
    earlier: tuple[int, ...] = ()  # smaller sizes at which the GPU was faster before it was slower again
    everywhere: bool = False  # whether the GPU is faster at every size that was compared


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationCurves:
    """An operation's curves, one for each way it was run."""

    name: str
    meaning: str  # what it computes at size n
    curves: tuple[Curve, ...]

    def curve(self, way: Way) -> Curve | None:
        """The curve of that way, or None."""
        return next((curve for curve in self.curves if curve.way == way), None)

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes of all curves."""
        return tuple(sorted({point.size for curve in self.curves for point in curve.points}))

    @property
    def crossovers(self) -> tuple[Crossover, ...]:
        """One for each way it was run on the GPU."""
        cpu = self.curve("cpu")
        return tuple(find_crossover(cpu, curve) for curve in self.curves if cpu and curve.way != "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where and how a crossover was measured."""

    date: str  # as 2026-01-31
    dtype: str
    tf32: str  # whether float32 is computed in TF32, for products and for convolutions; "" for other types
    cpu: str
    threads: Annotated[int, msgspec.Meta(ge=1)]  # that an operation may use
    gpu: str  # "" if there was none
    torch: str
    platform: str  # the version of CUDA or ROCm that PyTorch is built with; "" for neither


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossoverResult:
    """The curves of all operations, and where they were measured."""

    setting: Setting
    operations: Annotated[tuple[OperationCurves, ...], msgspec.Meta(min_length=1)]
    schema_version: Literal[1]

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values, and the crossovers computed from them."""
        values = asdict(self)
        for each, operation in zip(values["operations"], self.operations, strict=True):
            each["crossovers"] = [asdict(crossover) for crossover in operation.crossovers]
        return values


_decoder = msgspec.json.Decoder(CrossoverResult)


def find_crossover(cpu: Curve, gpu: Curve) -> Crossover:
    """Find the size from which the GPU's curve stays below the CPU's.

    Between two sizes both curves are interpolated as straight lines on logarithmic axes, as any power of the size is.
    The crossover is where the ratio of the two times passes 1.

    Examples:
        >>> def curve(way, times):
        ...     points = [Point(size=n, us=us, low_us=us, high_us=us, samples=9) for n, us in times.items()]
        ...     return Curve(way=way, points=tuple(points))
        >>> cpu = curve("cpu", {64: 1.0, 128: 4.0, 256: 16.0})
        >>> find_crossover(cpu, curve("alone", {64: 8.0, 128: 8.0, 256: 8.0})).size
        181.01...
    """
    pairs = [(mine, other) for other in cpu.points if (mine := gpu.at(other.size)) is not None]
    sizes = [mine.size for mine, _ in pairs]
    at_median = [math.log(mine.us / other.us) for mine, other in pairs]
    at_best = [math.log(mine.low_us / other.high_us) for mine, other in pairs]
    at_worst = [math.log(mine.high_us / other.low_us) for mine, other in pairs]
    size = _crossing(sizes, at_median)
    return Crossover(
        way=gpu.way,
        compared=tuple(sizes),
        size=size,
        low=_crossing(sizes, at_best),
        high=_crossing(sizes, at_worst),
        earlier=tuple(n for n, ratio in zip(sizes, at_median, strict=True) if ratio < 0 and (size is None or n < size)),
        everywhere=bool(at_median) and max(at_median) < 0,
    )


def _crossing(sizes: Sequence[int], log_ratios: Sequence[float]) -> float | None:
    """The size from which the logarithm of a ratio stays negative; None if the last one is not negative."""
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


def read_crossover(path: Path) -> CrossoverResult:
    """Read a file that `crossover --format json` wrote."""
    try:
        return decoded(read_regular(path.resolve()), _decoder, SCHEMA_VERSION)
    except ValueError as error:
        raise ConfigurationError(f"{path}: not what crossover --format json wrote: {error}") from error


WAY_NAMES: Final = MappingProxyType[Way, str](
    {"cpu": "CPU", "stream": "GPU, in a stream", "alone": "GPU, one call", "copies": "GPU, with copies"}
)
"""The names of the ways in tables."""

NO_GPU: Final = "no GPU: PyTorch sees no CUDA or ROCm device here, so only the CPU was timed"

_DIFFER: Final = 1.1
_ABOUT: Final = "~"


def about_size(size: float) -> str:
    """A size to two digits, which is all that is known between two measured sizes."""
    digits = max(math.floor(math.log10(size)) - 1, 0)
    return str(round(size / 10**digits) * 10**digits)


def describe(crossover: Crossover) -> str:
    """The size from which the GPU is faster, as the rest of a sentence.

    Examples:
        >>> describe(Crossover(way="stream", compared=(64, 128, 256), size=187.3, low=180.0, high=190.0))
        'faster from about 190 on'
        >>> describe(Crossover(way="stream", compared=(64, 128), size=64.0, low=64.0, high=64.0, everywhere=True))
        'faster at every size, 64 to 128'
        >>> describe(Crossover(way="copies", compared=(64, 128), size=None, low=None, high=None))
        'not faster at any size, 64 to 128'
    """
    compared = crossover.compared
    if not compared:
        return "not compared at any size"
    sizes = f"{compared[0]} to {compared[-1]}" if len(compared) > 1 else str(compared[0])
    earlier = " and ".join(
        filter(None, (", ".join(map(str, crossover.earlier[:-1])), *map(str, crossover.earlier[-1:])))
    )
    if crossover.size is None:
        text = (
            f"slower at {compared[-1]}, though faster at {earlier}" if earlier else f"not faster at any size, {sizes}"
        )
    elif crossover.everywhere:
        text = f"faster at every size, {sizes}"
    else:
        text = f"faster from about {about_size(crossover.size)} on" + (f", and at {earlier}" if earlier else "")
    return text + _uncertain(crossover)


def _uncertain(crossover: Crossover) -> str:
    """How far the noise of the times moves it; "" if by less than 10 %."""
    size, low, high = crossover.size, crossover.low, crossover.high
    if low is not None and high is not None:
        return f" (between {about_size(low)} and {about_size(high)})" if high > _DIFFER * low else ""
    if size is None:
        return "" if low is None else f" (within the noise, faster from about {about_size(low)} on)"
    return " (within the noise, at no size)"


def print_crossover(result: CrossoverResult) -> None:
    """Print a table for each operation, and then the sizes from which the GPU is faster."""
    screen, setting = Screen(), result.setting
    facts = {
        "GPU": setting.gpu or "none",
        "CPU": f"{setting.cpu}, {setting.threads} thread{'' if setting.threads == 1 else 's'}",
        "Type": setting.dtype,
        "TF32": setting.tf32,
        "PyTorch": f"{setting.torch} ({setting.platform})" if setting.platform else setting.torch,
        "Date": setting.date,
    }
    for name, value in facts.items():
        if value:
            screen.line(plain(value), name=name, column=len("PyTorch "))
    for operation in result.operations:
        screen.line()
        screen.line(operation.meaning, name=Text(f"{operation.name}:", "bold"))
        screen.table(_table(operation))
        for curve in operation.curves:
            if curve.ended:
                screen.line(f"{WAY_NAMES[curve.way]}: no larger size: {plain(curve.ended)}")
    screen.line()
    points = [point for operation in result.operations for curve in operation.curves for point in curve.points]
    if any(point.noisy for point in points):
        screen.line(f"{_ABOUT} known to no better than 10 %, or a single sample")
    if result.setting.gpu:
        _print_crossovers(result, screen)
    else:
        screen.line(Text(NO_GPU, "bold"))
    if warnings := sum(len(point.warnings) for point in points):
        screen.line(f"warnings about single points: {warnings}, listed by --format json")


def _table(operation: OperationCurves) -> Table:
    rows = []
    cpu = operation.curve("cpu")
    for size in operation.sizes:
        other = None if cpu is None else cpu.at(size)
        rows.append(Row((str(size), *(_cell(curve, size, other) for curve in operation.curves))))
    return Table(columns_of("n", *(WAY_NAMES[curve.way] for curve in operation.curves), align=">"), tuple(rows))


def _cell(curve: Curve, size: int, cpu: Point | None) -> Text:
    """A time, marked if it is noisy, and green with a star if it is shorter than the CPU's."""
    point = curve.at(size)
    if point is None:
        return Text("-")
    faster = cpu is not None and point.us < cpu.us
    about = _ABOUT if point.noisy else ""
    return Text(f"{about}{in_unit(point.us)} {'*' if faster else ' '}", "green" if faster else "")


def _print_crossovers(result: CrossoverResult, screen: Screen) -> None:
    screen.line("* faster than the CPU. The GPU is faster at this n and every larger one:")
    width = max((len(plain(operation.name)) for operation in result.operations), default=0)
    for operation in result.operations:
        for crossover in operation.crossovers:
            style = "bold" if crossover.size else ""
            name = f"{plain(operation.name):<{width}}  {WAY_NAMES[crossover.way].removeprefix('GPU, '):<12}"
            screen.line(Text(describe(crossover), style), name=Text(name, style))
