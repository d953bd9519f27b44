"""Crossovers as sentences and as tables on a terminal."""

import math
from types import MappingProxyType
from typing import Final

from lightning_forge_profiling.bench.result import in_unit
from lightning_forge_profiling.crossover.curves import (
    Crossover,
    CrossoverResult,
    Curve,
    OperationCurves,
    Point,
    Setting,
    Way,
)
from lightning_forge_profiling.plain_text import plain
from lightning_forge_profiling.report.blocks import Text
from lightning_forge_profiling.report.screen import Screen, Table

WAY_NAMES: Final = MappingProxyType[Way, str](
    {"cpu": "CPU", "stream": "GPU, in a stream", "alone": "GPU, one call", "copies": "GPU, with copies"}
)
"""The names of the ways in tables and plots."""

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


def threads(setting: Setting) -> str:
    """The number of CPU threads, with its unit."""
    return f"{setting.threads} thread{'' if setting.threads == 1 else 's'}"


def facts(result: CrossoverResult) -> list[tuple[str, str]]:
    """Where and how a crossover was measured, as names and values."""
    setting = result.setting
    versions = f"{setting.torch} ({setting.platform})" if setting.platform else setting.torch
    named = [
        ("GPU", setting.gpu or "none"),
        ("CPU", f"{setting.cpu}, {threads(setting)}"),
        ("Type", setting.dtype),
        ("TF32", setting.tf32),
        ("PyTorch", versions),
        ("Date", setting.date),
    ]
    return [(name, plain(value)) for name, value in named if value]


def ends(operation: OperationCurves) -> list[str]:
    """Why curves end before the largest size that was asked for, one sentence each."""
    return [
        f"{WAY_NAMES[curve.way]}: no larger size: {plain(curve.ended)}" for curve in operation.curves if curve.ended
    ]


def warnings(result: CrossoverResult) -> list[str]:
    """The warnings of `benchmark` about single points."""
    return [
        f"{plain(operation.name)}, {point.size}, {WAY_NAMES[curve.way]}: {plain(warning)}"
        for operation in result.operations
        for curve in operation.curves
        for point in curve.points
        for warning in point.warnings
    ]


def print_crossover(result: CrossoverResult) -> None:
    """Print a table for each operation, and then the sizes from which the GPU is faster."""
    screen = Screen()
    for name, value in facts(result):
        screen.line(value, name=name, column=len("PyTorch "))
    for operation in result.operations:
        screen.line()
        screen.line(operation.meaning, name=Text(f"{operation.name}:", "bold"))
        screen.table(_table(operation))
        for line in ends(operation):
            screen.line(line)
    screen.line()
    _print_summary(result, screen)
    if point_warnings := warnings(result):
        screen.line(f"warnings about single points: {len(point_warnings)}, listed by --json and --html")


def _table(operation: OperationCurves) -> Table:
    table = Table("n", *(WAY_NAMES[curve.way] for curve in operation.curves), align=">")
    cpu = operation.curve("cpu")
    for size in operation.sizes:
        other = None if cpu is None else cpu.at(size)
        table.row(str(size), *(_cell(curve, size, other) for curve in operation.curves))
    return table


def _cell(curve: Curve, size: int, cpu: Point | None) -> Text:
    """A time, marked if it is noisy, and green with a star if it is shorter than the CPU's."""
    point = curve.at(size)
    if point is None:
        return Text("-")
    faster = cpu is not None and point.us < cpu.us
    about = _ABOUT if point.noisy else ""
    return Text(f"{about}{in_unit(point.us)} {'*' if faster else ' '}", "green" if faster else "")


def _print_summary(result: CrossoverResult, screen: Screen) -> None:
    if any(point.noisy for one in result.operations for curve in one.curves for point in curve.points):
        screen.line(f"{_ABOUT} known to no better than 10 %, or a single sample")
    if not result.setting.gpu:
        screen.line(Text(NO_GPU, "bold"))
        return
    screen.line("* faster than the CPU. The GPU is faster at this n and every larger one:")
    width = max((len(plain(operation.name)) for operation in result.operations), default=0)
    for operation in result.operations:
        for crossover in operation.crossovers:
            style = "bold" if crossover.size else ""
            name = f"{plain(operation.name):<{width}}  {WAY_NAMES[crossover.way].removeprefix('GPU, '):<12}"
            screen.line(Text(describe(crossover), style), name=Text(name, style))
