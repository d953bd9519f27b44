"""Charts over time, as HTML without scripts: lines with bands, one time axis, marks of events."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from lightning_forge_profiling.report.text import escaped

_WIDE: Final = 1000
_HIGH: Final = 100
_GAP: Final = 3.0
"""Points further apart than this many times the median distance have a gap between them."""
_LEAST_PCT: Final = 0.15
"""Smallest width of a mark, in percent of the axis."""
_TICKS: Final = 8
_LATE_PCT: Final = 96.0
_UNITS: Final = ((1e9, 1e9, " G"), (1e6, 1e6, " M"), (1e4, 1e3, " k"))
"""Smallest value, divisor and suffix of each unit."""
_MINUTES_FROM_S, _HOURS_FROM_S = 300.0, 3 * 3600.0


@dataclass(frozen=True, slots=True)
class Chart:
    """The data of one chart.

    Attributes:
        title: the quantity.
        unit: unit of the values.
        name: name of the line.
        seconds: times of the points, in seconds since the run began.
        values: values of the points; None for a missing one.
        highs: upper edge of a band above the line; () for none.
        band: name of the band.
        top: upper end of the scale; None for the highest value.
        from_least: whether the scale starts at the lowest value instead of 0.
    """

    title: str
    unit: str
    name: str
    seconds: Sequence[float]
    values: Sequence[float | None]
    highs: Sequence[float | None] = ()
    band: str = ""
    top: float | None = None
    from_least: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """An event on the time axis.

    Attributes:
        second: start, in seconds since the run began.
        seconds: duration.
        kind: name of the lane that shows it.
        is_problem: whether it is highlighted.
    """

    second: float
    seconds: float
    kind: str
    is_problem: bool = False


class Placing:
    """CSS classes for positions and widths in percent, for a page whose policy forbids `style` attributes.

    Example:
        >>> placing = Placing()
        >>> placing.at("left", 12.34)
        'left-123'
        >>> placing.rules()
        '.left-123{left:12.3%}'
    """

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}

    def at(self, name: str, pct: float) -> str:
        """The class that sets a CSS property, `name`, to a percentage."""
        tenths = round(10 * pct)
        chosen = f"{name.strip('-')}-{tenths}"
        self._rules[chosen] = f".{chosen}{{{name}:{tenths / 10:g}%}}"
        return chosen

    def rules(self) -> str:
        """The CSS rules of all classes so far."""
        return "".join(self._rules[name] for name in sorted(self._rules))


class TimeAxis:
    """Time axis of a run, starting at 0."""

    def __init__(self, seconds: float) -> None:
        self.seconds = max(seconds, 0.1)
        self.unit, self.divisor = "s", 1.0
        if self.seconds >= _HOURS_FROM_S:
            self.unit, self.divisor = "h", 3600.0
        elif self.seconds >= _MINUTES_FROM_S:
            self.unit, self.divisor = "min", 60.0

    def pct(self, second: float) -> float:
        """Position of a time, in percent of the axis."""
        return 100 * min(max(second / self.seconds, 0.0), 1.0)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Position in percent and label of each tick."""
        step = _tick_step(self.seconds / self.divisor, _TICKS)
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        for index in range(int(self.seconds / self.divisor / step + 1e-9) + 1):
            yield self.pct(index * step * self.divisor), f"{index * step:.{decimals}f} {self.unit}"


def _tick_step(span: float, most: int) -> float:
    """A round step that fits into `span` at most `most` times."""
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if span / (factor * power) <= most)


def axis_row(axis: TimeAxis, placing: Placing) -> str:
    """Row of the axis, above the charts."""
    ticks = ""
    for index, (pct, text) in enumerate(axis.ticks()):
        style = f"tick{' last' if pct > _LATE_PCT else ''}{' minor' if index % 2 else ''}"
        ticks += f'<span class="{style} {placing.at("left", pct)}">{text}</span>'
    return _row("", ticks, "axis")


def _row(label: str, plot: str, style: str = "") -> str:
    return (
        f'<div class="chart-row {style}"><div class="chart-label">{label}</div>'
        f'<div class="chart-plot">{plot}</div></div>'
    )


def chart_row(chart: Chart, axis: TimeAxis, marks: Sequence[Mark], placing: Placing) -> str:
    """Row of a chart with its name, scale and range; "" without values."""
    known = [value for value in (*chart.values, *chart.highs) if value is not None]
    if not known:
        return ""
    bottom, top, levels = _scale(chart, min(known), max(known))

    def down(value: float) -> float:
        return _HIGH * (1 - (min(value, top) - bottom) / (top - bottom))

    ranges = _range([value for value in chart.values if value is not None])
    lines = [_stroke(chart.name, ranges)]
    if chart.highs:
        lines.append(_stroke(chart.band, _range([high for high in chart.highs if high is not None]), band=True))
    shapes = [
        *(_span(mark, axis) for mark in marks),
        *(f'<path class="grid" d="M{_x(pct)} 0V{_HIGH}"/>' for pct, _ in axis.ticks()),
        *(f'<path class="grid" d="M0 {down(level):.2f}H{_WIDE}"/>' for level, _ in levels),
        *_paths(chart, axis, down),
    ]
    text = f"{chart.title} over the run. {chart.name}: {ranges} {chart.unit}"
    names = "".join(
        f'<span class="mark {placing.at("top", down(level))}" aria-hidden="true">{said}</span>'
        for level, said in levels
    )
    title = f'<div class="chart-title"><b>{escaped(chart.title)}</b>, {escaped(chart.unit)}</div>'
    return _row(title + "".join(lines), _svg("chart", text, shapes) + names)


def _x(pct: float) -> str:
    return f"{_WIDE * pct / 100:.2f}"


def _svg(style: str, text: str, shapes: Sequence[str]) -> str:
    box = f'viewBox="0 0 {_WIDE} {_HIGH}" preserveAspectRatio="none"'
    return f'<svg class="{style}" {box} role="img" aria-label="{escaped(text)}">{"".join(shapes)}</svg>'


def _stroke(name: str, text: str, *, band: bool = False) -> str:
    style = "stroke band" if band else "stroke a"
    return (
        f'<div class="chart-line"><span class="{style}" aria-hidden="true"></span><span>{escaped(name)}</span>'
        f'<span class="reading">{text}</span></div>'
    )


def _scale(chart: Chart, least: float, most: float) -> tuple[float, float, list[tuple[float, str]]]:
    """Lower and upper end of the scale, and its levels with their labels."""
    span = (most if chart.top is None else chart.top) - (least if chart.from_least else 0.0)
    step = _tick_step(max(span, 4.0 if chart.from_least else 1e-3), 4)
    bottom = math.floor(least / step) * step if chart.from_least else 0.0
    top = chart.top or max(math.ceil(most / step) * step, bottom + step)
    levels = [bottom + index * step for index in range(int((top - bottom) / step + 1e-6) + 1)]
    return bottom, top, [(level, _written(level, step, top)) for level in levels]


def _range(values: Sequence[float]) -> str:
    """Lowest and highest value, to three digits of the highest."""
    most = max(values)
    low, high = (_written(value, max(most, 1e-3) / 1e3, most) for value in (min(values), most))
    return low if low == high else f"{low} to {high}"


def _written(value: float, step: float, most: float) -> str:
    """A value with the decimals that steps of `step` need, in thousands or millions if `most` is that large.

    Example:
        >>> _written(1_500_000, 500_000, 2_000_000), _written(36.0, 20, 60)
        ('1.5 M', '36')
    """
    unit, letter = next(((unit, letter) for least, unit, letter in _UNITS if most >= least), (1.0, ""))
    decimals = max(0, -math.floor(math.log10(step / unit) + 1e-9))
    return f"{value / unit:,.{decimals}f}{letter if value else ''}"


def _paths(chart: Chart, axis: TimeAxis, down: Callable[[float], float]) -> Iterator[str]:
    def point(index: int, values: Sequence[float | None]) -> str:
        return f"{_x(axis.pct(chart.seconds[index]))} {down(values[index] or 0.0):.2f}"

    for part in _stretches(chart):
        if chart.highs:
            above = "L".join(point(index, chart.highs) for index in part)
            below = "L".join(point(index, chart.values) for index in reversed(part))
            yield f'<path class="spread a" d="M{above}L{below}Z"/>'
        along = "L".join(point(index, chart.values) for index in part)
        yield f'<path class="line a" d="M{along}{"h0" if len(part) == 1 else ""}"/>'


def _stretches(chart: Chart) -> Iterator[list[int]]:
    """Indices of the points between two gaps."""
    usual = median([later - earlier for earlier, later in pairwise(chart.seconds)] or [0.0])
    part: list[int] = []
    for index, value in enumerate(chart.values):
        if part and (value is None or chart.seconds[index] - chart.seconds[part[-1]] > _GAP * usual):
            yield part
            part = []
        if value is not None:
            part.append(index)
    if part:
        yield part


def _span(mark: Mark, axis: TimeAxis) -> str:
    begin = axis.pct(mark.second)
    width = max(axis.pct(mark.second + mark.seconds) - begin, _LEAST_PCT)
    style = "throttled" if mark.is_problem else "left-out"
    return f'<rect class="{style}" x="{_x(begin)}" width="{_x(width)}" y="0" height="{_HIGH}"/>'


def mark_row(name: str, marks: Sequence[Mark], axis: TimeAxis) -> str:
    """Row with a lane of the marks of one kind, and their number."""
    style = "throttled" if any(mark.is_problem for mark in marks) else "left-out"
    label = (
        f'<div class="chart-line"><span class="stroke {style}" aria-hidden="true"></span><span>{escaped(name)}</span>'
        f'<span class="reading">{len(marks):,}</span></div>'
    )
    return _row(
        label, _svg("state-lane", f"{name}: {len(marks)} times", [_span(mark, axis) for mark in marks]), "state"
    )
