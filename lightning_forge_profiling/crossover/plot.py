"""Crossovers as plots, time over size on logarithmic axes, and as one web page without scripts and other files."""

import io
import math
import textwrap
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from matplotlib import rc_context, rcParamsDefault
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from lightning_forge_profiling.bench.result import in_unit
from lightning_forge_profiling.crossover.curves import (
    GPU_WAYS,
    NO_GPU,
    WAY_NAMES,
    CrossoverResult,
    OperationCurves,
    Way,
    about_size,
    describe,
    ends,
    facts,
    threads,
    warnings,
)
from lightning_forge_profiling.report.page import web_page
from lightning_forge_profiling.report.wording import short

Format = Literal["png", "svg"]


class Theme(NamedTuple):
    """The colours of a plot: those of assets/report.css."""

    panel: str
    ink: str
    muted: str  # axes and their labels
    line: str  # the grid


LIGHT: Final = Theme(panel="#ffffff", ink="#16191d", muted="#59626c", line="#dfe3e7")
DARK: Final = Theme(panel="#171b1f", ink="#e7eaed", muted="#9ba6b1", line="#2a3036")

# Colour, marker and dashes.
_PENS: Final = MappingProxyType[Way, tuple[str, str, str]](
    {
        "cpu": ("#e5703a", "o", "-"),
        "stream": ("#4d97d6", "s", "-"),
        "alone": ("#35a883", "^", "--"),
        "copies": ("#cb84b7", "D", ":"),
    }
)

_PANEL_INCHES: Final = (5.6, 3.9)
_DPI: Final = 150
_MOST_COLUMNS: Final = 2
_ALONE_INCHES: Final = (7.6, 4.4)
_NARROW_INCHES: Final = (4.0, 4.2)  # on a phone, some 350 pixels wide, text of 9.5 points is then 11 pixels high
_HEADING_INCHES: Final = 0.6  # of one line, and one of the legend
_LINE_INCHES: Final = 0.22  # of each more
_HEADING_MARGINS_INCHES: Final = 0.25
_AXIS_INCHES: Final = 0.9  # left of a panel, with its labels
_HEADING_POINTS: Final = 11
_TITLE_POINTS: Final = 9.5
_LONGEST_NAME: Final = 60
_TICKS_PER_INCH: Final = 1.8
_SPARSE: Final = 100.0  # an axis that is no longer has a label at 1, 2 and 5; a longer one has two powers of ten
_SHORTEST_AXIS: Final = 10.0
_ROUNDING: Final = 1 - 1e-9


def draw_operation(operation: OperationCurves, theme: Theme, kind: Format, *, narrow: bool = False) -> bytes:
    """A plot of one operation's curves."""
    with _style(theme):
        inches = _NARROW_INCHES if narrow else _ALONE_INCHES
        figure = Figure(figsize=inches, layout="constrained")
        axes = figure.subplots()
        _draw(axes, operation, theme, most_ticks=round(inches[0] * _TICKS_PER_INCH))
        if axes.lines:
            figure.legend(loc="outside upper left", ncols=2 if narrow else 4, fontsize=9, frameon=False)
        return _file(figure, kind)


def draw_result(result: CrossoverResult, theme: Theme, kind: Format) -> bytes:
    """A plot of all operations side by side, with a heading."""
    with _style(theme):
        columns = min(_MOST_COLUMNS, len(result.operations))
        rows = math.ceil(len(result.operations) / columns)
        width, height = _PANEL_INCHES
        setting = result.setting
        machine = f"{_short(setting.cpu)} ({threads(setting)}), {_short(setting.dtype)}"
        machine = f"{_short(setting.gpu)} against {machine}" if setting.gpu else machine
        heading = _wrapped(machine, columns * width - _HEADING_MARGINS_INCHES, _HEADING_POINTS)
        titles = [
            _wrapped(f"{_short(one.name)}: {_short(one.meaning)}", width - _AXIS_INCHES, _TITLE_POINTS)
            for one in result.operations
        ]
        in_a_row = 2 * columns  # more legend entries would be cut off
        ways = {curve.way for operation in result.operations for curve in operation.curves if curve.points}
        more_lines = heading.count("\n") + (len(ways) > in_a_row)
        inches = (columns * width, rows * height + _HEADING_INCHES + more_lines * _LINE_INCHES)
        figure = Figure(figsize=inches, layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False)
        for axes in panels.flat[len(result.operations) :]:
            axes.set_axis_off()
        for axes, operation, title in zip(panels.flat, result.operations, titles, strict=False):
            _draw(axes, operation, theme, most_ticks=round(width * _TICKS_PER_INCH))
            axes.set_title(title, fontsize=_TITLE_POINTS, loc="left")
        lines = {line.get_label(): line for axes in panels.flat for line in axes.get_legend_handles_labels()[0]}
        look: Any = {"title_fontsize": _HEADING_POINTS, "alignment": "left", "ncols": in_a_row, "frameon": False}
        figure.legend(lines.values(), lines.keys(), title=heading, loc="outside upper left", **look)
        return _file(figure, kind)


def _short(text: str) -> str:
    return short(text, _LONGEST_NAME)


def _wrapped(text: str, inches: float, points: float) -> str:
    """Text broken into lines that fit, with dollar signs escaped: they would begin a formula."""
    font = FontProperties(size=points)

    def fits(line: str) -> bool:
        return text_to_path.get_text_width_height_descent(line, font, ismath=False)[0] <= 72 * inches

    tried = (textwrap.wrap(text, columns) for columns in range(len(text), 0, -1))
    lines = next((lines for lines in tried if all(map(fits, lines))), [text])
    return "\n".join(lines).replace("$", r"\$")


def _draw(axes: Axes, operation: OperationCurves, theme: Theme, *, most_ticks: int) -> None:
    for curve in operation.curves:
        if not curve.points:
            continue
        colour, marker, dashes = _PENS[curve.way]
        axes.plot(
            [point.size for point in curve.points],
            [point.us for point in curve.points],
            label=WAY_NAMES[curve.way],
            color=colour,
            marker=marker,
            linestyle=dashes,
            linewidth=1.8,
            markersize=4.5,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(_some(operation.sizes, most_ticks)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = _times(*axes.get_ylim())
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0) if high <= _SPARSE * low else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda us, _: in_unit(us).replace(".00", "").replace(".0", "")))
    axes.yaxis.set_minor_formatter(NullFormatter())  # by default powers of ten, without a unit
    axes.set_xlabel("size n")
    axes.set_ylabel("time of a call")
    axes.grid(visible=True, which="major", color=theme.line, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    _mark(axes, operation, theme)


def _mark(axes: Axes, operation: OperationCurves, theme: Theme) -> None:
    """A line down to the axis at each crossover between two sizes, and the size beside it."""
    low, _ = axes.get_ylim()
    inside = [one for one in operation.crossovers if one.size is not None and not one.everywhere]
    for row, crossover in enumerate(sorted(inside, key=lambda one: one.size or 0.0, reverse=True)):
        at = (crossover.size or 0.0, crossover.us or 0.0)
        axes.plot([at[0]] * 2, [low, at[1]], color=_PENS[crossover.way][0], linewidth=1, linestyle=(0, (2, 2)))
        axes.plot(*at, color=theme.ink, marker="o", markersize=9, markerfacecolor="none", markeredgewidth=1.2)
        axes.annotate(
            about_size(at[0]),
            (at[0], low),
            xytext=(3, 5 + 11 * row),
            textcoords="offset points",
            fontsize=9,
            color=theme.ink,
            bbox={"boxstyle": "round,pad=0.1", "facecolor": theme.panel, "edgecolor": "none", "alpha": 0.8},
        )


def _some(sizes: Sequence[int], most: int) -> list[int]:
    """As many sizes as there is room for on a logarithmic axis."""
    shown: list[int] = []
    for size in sizes:
        if not shown or math.log(size / shown[-1]) * (most - 1) > math.log(sizes[-1] / sizes[0]) * _ROUNDING:
            shown.append(size)
    return shown


def _times(low: float, high: float) -> tuple[float, float]:
    """The ends of the time axis: with room for the sizes at the bottom, and for at least two labels."""
    low /= 3
    more = max(_SHORTEST_AXIS * low / high, 1.0) ** 0.5
    return low / more, high * more


@contextmanager
def _style(theme: Theme) -> Iterator[None]:
    """Matplotlib's own defaults, whatever the user's are, in a theme's colours."""
    defaults = {name: value for name, value in rcParamsDefault.items() if not name.startswith("backend")}
    panels = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    texts = ("text.color", "legend.labelcolor", "axes.titlecolor")
    muted = ("axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    settings: Any = {  # typed as a mapping of some hundred literals
        **defaults,
        **dict.fromkeys(panels, theme.panel),
        **dict.fromkeys(texts, theme.ink),
        **dict.fromkeys(muted, theme.muted),
        "font.size": 9.5,
        "svg.hashsalt": "forge-profiling",  # salted, identifiers are reproducible
    }
    with rc_context(settings):
        yield


def _file(figure: Figure, kind: Format) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format=kind, dpi=_DPI, metadata={"Date": None} if kind == "svg" else None)
    return stream.getvalue()


_TITLE: Final = "The size from which the GPU is faster"
_NARROW: Final = "(max-width: 720px)"  # as in assets/crossover.css
_DARK: Final = "(prefers-color-scheme: dark)"


def crossover_page(result: CrossoverResult) -> str:
    """A crossover as a web page, with the plots inside in light and dark colours."""
    crossed = {crossover.way for operation in result.operations for crossover in operation.crossovers}
    return web_page(
        "crossover.html",
        styles=("crossover",),
        heading=_TITLE if result.setting.gpu else NO_GPU,
        ways={way: WAY_NAMES[way] for way in GPU_WAYS if way in crossed} if result.setting.gpu else None,
        operations=[_operation(operation) for operation in result.operations],
        names=WAY_NAMES,
        in_unit=in_unit,
        facts=list(facts(result)),
        warnings=warnings(result),
        narrow=_NARROW,
        dark=_DARK,
    )


def _operation(operation: OperationCurves) -> dict[str, Any]:
    plots = {
        f"{prefix}{name}": b64encode(draw_operation(operation, theme, "svg", narrow=bool(prefix))).decode()
        for prefix in ("", "narrow_")
        for name, theme in (("dark", DARK), ("light", LIGHT))
    }
    crossovers = {crossover.way: describe(crossover) for crossover in operation.crossovers}
    said = [f"{WAY_NAMES[way]}: {text}" for way, text in crossovers.items()]
    return {
        "of": operation,
        "crossovers": crossovers,
        "alt": f"Time of a call over size n, {operation.name}. {'. '.join(said)}",
        "plots": {name: f"data:image/svg+xml;base64,{svg}" for name, svg in plots.items()},
        "ends": ends(operation),
    }
