"""Crossovers as plots, time over size on logarithmic axes, and as one web page without scripts and other files."""

import io
import math
from base64 import b64encode
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
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
    warnings,
)
from lightning_forge_profiling.report.page import web_page


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

_INCHES: Final = (7.6, 4.4)
_NARROW_INCHES: Final = (4.0, 4.2)  # on a phone, some 350 pixels wide, text of 9.5 points is then 11 pixels high
_TICKS_PER_INCH: Final = 1.8
_SPARSE: Final = 100.0  # an axis that is no longer has a label at 1, 2 and 5; a longer one has two powers of ten
_SHORTEST_AXIS: Final = 10.0
_ROUNDING: Final = 1 - 1e-9


def draw_operation(operation: OperationCurves, theme: Theme, *, narrow: bool = False) -> bytes:
    """A plot of one operation's curves, as SVG."""
    panels = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    texts = ("text.color", "legend.labelcolor", "axes.titlecolor")
    muted = ("axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    look: Any = {  # typed as a mapping of some hundred literals
        **dict.fromkeys(panels, theme.panel),
        **dict.fromkeys(texts, theme.ink),
        **dict.fromkeys(muted, theme.muted),
        "font.size": 9.5,
        "legend.fontsize": 9,
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "lines.markersize": 4.5,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": theme.line,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "forge-profiling",  # salted, identifiers are reproducible
    }
    inches = _NARROW_INCHES if narrow else _INCHES
    stream = io.BytesIO()
    with style.context(look, after_reset=True):  # over Matplotlib's own defaults, whatever the user's are
        figure = Figure(figsize=inches, layout="constrained")
        axes = figure.subplots()
        _draw(axes, operation, theme, most_ticks=round(inches[0] * _TICKS_PER_INCH))
        if axes.lines:
            figure.legend(loc="outside upper left", ncols=2 if narrow else 4)
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()


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


def crossover_page(result: CrossoverResult) -> str:
    """A crossover as a web page, with the plots inside in light and dark colours."""
    crossed = {crossover.way for operation in result.operations for crossover in operation.crossovers}
    return web_page(
        "crossover.html",
        styles=("crossover",),
        heading="The size from which the GPU is faster" if result.setting.gpu else NO_GPU,
        ways={way: WAY_NAMES[way] for way in GPU_WAYS if way in crossed} if result.setting.gpu else None,
        operations=[_operation(operation) for operation in result.operations],
        names=WAY_NAMES,
        in_unit=in_unit,
        facts=list(facts(result)),
        warnings=warnings(result),
    )


def _operation(operation: OperationCurves) -> dict[str, Any]:
    plots = {
        f"{prefix}{name}": b64encode(draw_operation(operation, theme, narrow=bool(prefix))).decode()
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
