"""A crossover as one web page, without scripts and without other files."""

from base64 import b64encode
from collections.abc import Iterator
from html import escape
from typing import Final

from lightning_forge_profiling.bench.result import in_unit
from lightning_forge_profiling.crossover.curves import GPU_WAYS, CrossoverResult, Curve, OperationCurves
from lightning_forge_profiling.crossover.plot import DARK, LIGHT, Theme, draw_operation
from lightning_forge_profiling.crossover.text import NO_GPU, WAY_NAMES, describe, ends, facts, warnings
from lightning_forge_profiling.plain_text import plain
from lightning_forge_profiling.report.page import asset, filled, page, scrolling_table
from lightning_forge_profiling.report.text import escaped

_TITLE: Final = "The size from which the GPU is faster"
_NARROW: Final = "(max-width: 720px)"  # as in assets/crossover.css
_DARK: Final = "(prefers-color-scheme: dark)"


def crossover_page(result: CrossoverResult) -> str:
    """A crossover as a web page.

    The plots are inside, in light and dark colours. Its content security policy blocks scripts and every request.
    """
    found = warnings(result)
    values = {
        "title": _TITLE if result.setting.gpu else NO_GPU,
        "crossovers": _crossovers(result) if result.setting.gpu else "",
        "facts": "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts(result)),
        "operations": "\n".join(map(_operation, result.operations)),
        "warnings": f'<section id="warnings"><h2>Warnings</h2>{_list(found)}</section>' if found else "",
    }
    return page("CPU against GPU", filled(asset("crossover.html"), values), style=asset("crossover.css"))


def _list(texts: list[str]) -> str:
    return f'<ul class="ends">{"".join(f"<li>{escape(text)}</li>" for text in texts)}</ul>' if texts else ""


def _crossovers(result: CrossoverResult) -> str:
    found = [(operation, {one.way: describe(one) for one in operation.crossovers}) for operation in result.operations]
    ways = [way for way in GPU_WAYS if any(way in said for _, said in found)]
    head = "".join(f"<th>{WAY_NAMES[way]}</th>" for way in ways)
    rows = "".join(
        f'<tr><th scope="row">{escaped(operation.name)}</th>'
        + "".join(f"<td>{escape(said.get(way, ''))}</td>" for way in ways)
        + "</tr>"
        for operation, said in found
    )
    return scrolling_table(f"<th>operation</th>{head}", rows)


def _operation(operation: OperationCurves) -> str:
    said = [f"{WAY_NAMES[crossover.way]}: {describe(crossover)}" for crossover in operation.crossovers]
    alt = f"Time of a call over size n, {plain(operation.name)}. {'. '.join(said)}"
    dark, light = (_data_uri(operation, theme) for theme in (DARK, LIGHT))
    narrow_dark, narrow_light = (_data_uri(operation, theme, narrow=True) for theme in (DARK, LIGHT))
    return f"""<section class="operation">
<div class="heading"><h2>{escaped(operation.name)}</h2><span class="muted">{escaped(operation.meaning)}</span></div>
<picture>
<source media="{_NARROW} and {_DARK}" srcset="{narrow_dark}"><source media="{_NARROW}" srcset="{narrow_light}">
<source media="{_DARK}" srcset="{dark}"><img src="{light}" alt="{escape(alt)}">
</picture>
{_list(ends(operation))}
{_table(operation)}
</section>"""


def _data_uri(operation: OperationCurves, theme: Theme, *, narrow: bool = False) -> str:
    return f"data:image/svg+xml;base64,{b64encode(draw_operation(operation, theme, 'svg', narrow=narrow)).decode()}"


def _table(operation: OperationCurves) -> str:
    head = "".join(
        f'<th class="number">{WAY_NAMES[curve.way]}</th>'
        + ('<th class="number">CPU / GPU</th>' if curve.way != "cpu" else "")
        for curve in operation.curves
    )
    rows = "".join(
        f'<tr><th scope="row" class="number">{size}</th>{"".join(_cells(operation, size))}</tr>'
        for size in operation.sizes
    )
    return scrolling_table(f'<th class="number">n</th>{head}', rows)


def _cells(operation: OperationCurves, size: int) -> Iterator[str]:
    for curve in operation.curves:
        speedup = operation.speedup(curve.way, size)
        faster = " faster" if speedup is not None and speedup > 1 else ""
        yield f'<td class="number{faster}">{_time(curve, size)}</td>'
        if curve.way != "cpu":
            yield f'<td class="number{faster}">{"" if speedup is None else f"{speedup:.3g}"}</td>'


def _time(curve: Curve, size: int) -> str:
    point = curve.at(size)
    if point is None:
        return "-"
    count = "1 sample" if point.samples == 1 else f"±{100 * point.noise:.1f} %"
    return f'{in_unit(point.us)}<span class="muted">{count}</span>'
