"""A crossover as one web page, without scripts and without other files."""

from base64 import b64encode
from collections.abc import Iterator
from typing import Any, Final

from lightning_forge_profiling.bench.result import in_unit
from lightning_forge_profiling.crossover.curves import GPU_WAYS, CrossoverResult, Curve, OperationCurves
from lightning_forge_profiling.crossover.plot import DARK, LIGHT, Theme, draw_operation
from lightning_forge_profiling.crossover.text import NO_GPU, WAY_NAMES, describe, ends, facts, warnings
from lightning_forge_profiling.report.page import web_page

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
        facts=list(facts(result)),
        warnings=warnings(result),
        narrow=_NARROW,
        dark=_DARK,
    )


def _operation(operation: OperationCurves) -> dict[str, Any]:
    crossovers = {crossover.way: describe(crossover) for crossover in operation.crossovers}
    said = [f"{WAY_NAMES[way]}: {text}" for way, text in crossovers.items()]
    columns = ["n"]
    for curve in operation.curves:
        columns += [WAY_NAMES[curve.way], *([] if curve.way == "cpu" else ["CPU / GPU"])]
    return {
        "name": operation.name,
        "meaning": operation.meaning,
        "crossovers": crossovers,
        "alt": f"Time of a call over size n, {operation.name}. {'. '.join(said)}",
        "plots": {
            f"{prefix}{name}": _plot(operation, theme, narrow=bool(prefix))
            for prefix in ("", "narrow_")
            for name, theme in (("dark", DARK), ("light", LIGHT))
        },
        "ends": ends(operation),
        "columns": columns,
        "rows": [{"size": size, "cells": list(_cells(operation, size))} for size in operation.sizes],
    }


def _plot(operation: OperationCurves, theme: Theme, *, narrow: bool) -> str:
    svg = draw_operation(operation, theme, "svg", narrow=narrow)
    return f"data:image/svg+xml;base64,{b64encode(svg).decode()}"


def _cells(operation: OperationCurves, size: int) -> Iterator[dict[str, Any]]:
    for curve in operation.curves:
        speedup = operation.speedup(curve.way, size)
        faster = speedup is not None and speedup > 1
        text, note = _time(curve, size)
        yield {"text": text, "note": note, "faster": faster}
        if curve.way != "cpu":
            yield {"text": "" if speedup is None else f"{speedup:.3g}", "note": "", "faster": faster}


def _time(curve: Curve, size: int) -> tuple[str, str]:
    """The time of a call, and how sure it is."""
    point = curve.at(size)
    if point is None:
        return "-", ""
    return in_unit(point.us), "1 sample" if point.samples == 1 else f"±{100 * point.noise:.1f} %"
