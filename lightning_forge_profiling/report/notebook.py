"""HTML of an analysis and of a ledger, for notebooks."""

from collections.abc import Iterable, Sequence
from functools import singledispatch
from typing import Final

from lightning_forge_profiling.report.run_wording import ledger_rows
from lightning_forge_profiling.report.text import escaped
from lightning_forge_profiling.report.wording import share_of
from lightning_forge_profiling.results.analysis import Analysis, Finding, RunEvidence
from lightning_forge_profiling.results.rank import RankSummary
from lightning_forge_profiling.timing.ledger import Ledger

_CELL: Final = "padding:1px 8px;text-align:{};vertical-align:top"


@singledispatch
def page(result: object) -> str:
    """HTML of a result, by its type."""
    raise TypeError(f"notebooks show no {type(result).__name__}")


@page.register
def analysis_html(analysis: Analysis) -> str:
    """HTML of the verdict, the findings with their evidence, and the split of the step.

    Example:
        >>> print(analysis_html(Analysis(source="a.json", verdict="x", verdict_text="<b> is slow.", findings=())))
        <div><p><b>&lt;b&gt; is slow.</b></p></div>
    """
    run, ranks = analysis.run, analysis.ranks
    parts = [f"<p><b>{escaped(analysis.verdict_text)}</b></p>"]
    if analysis.findings:
        parts.append(_list(_finding(analysis, found) for found in analysis.findings))
    if analysis.hints:
        parts.append(_list((escaped(hint.text) for hint in analysis.hints), "ul"))
    if run is not None and run.regions:
        parts.append(_regions(run))
    elif ranks:
        parts.append(_ranks(ranks))
    return f"<div>{''.join(parts)}</div>"


@page.register
def ledger_html(ledger: Ledger) -> str:
    """HTML table of the largest parts of a ledger, with their share of the wall time."""
    rows = [
        (name, f"{s:.2f}", f"{100 * s / ledger.wall_s:.1f} %" if ledger.wall_s > 0 else "", str(count or ""))
        for name, s, count in ledger_rows(ledger)
    ]
    return html_table(("part", "seconds", "of the run", "times"), [*rows, ("the run", f"{ledger.wall_s:.2f}", "", "")])


def html_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """HTML table. The first column is text, the others are numbers."""
    head, *body = (
        "".join(
            f'<{tag} style="{_CELL.format("right" if place else "left")}">{escaped(cell)}</{tag}>'
            for place, cell in enumerate(row)
        )
        for tag, row in (("th", columns), *(("td", row) for row in rows))
    )
    lines = "".join(f"<tr>{row}</tr>" for row in body)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"


def _list(items: Iterable[str], kind: str = "ol") -> str:
    return f"<{kind}>{''.join(f'<li>{item}</li>' for item in items)}</{kind}>"


def _finding(analysis: Analysis, found: Finding) -> str:
    evidence = "; ".join(
        f"{name}: {value:.4g}" if isinstance(value, int | float) else f"{name}: {value}"
        for name, value in found.evidence.items()
    )
    where = "" if found.rank is None else f" on rank {found.rank}"
    share = f"{found.share_pct:.1f} % {share_of(analysis, found)}"
    return (
        f"<b>{escaped(found.code)}</b>{where}, {share}: {escaped(found.title)}.<br>{escaped(found.remedy)}"
        f"<br><small>{escaped(evidence)}</small>"
    )


def _regions(run: RunEvidence) -> str:
    columns = ("region", "device ms per step", "host ms per step") if run.on_device else ("region", "ms per step")
    rows = [(name, f"{part.device_ms:.3f}", f"{part.host_ms:.3f}") for name, part in run.regions.items()]
    rows.append(("step", f"{run.step_ms.mean:.3f}", ""))
    return html_table(columns, (row[: len(columns)] for row in rows))


def _ranks(ranks: Sequence[RankSummary]) -> str:
    columns = ("rank", "median step ms", "GPU busy", "GPU idle")
    rows = (
        (str(rank.rank), f"{rank.step_ms.p50:.3f}", f"{rank.gpu.busy_pct:.1f} %", f"{rank.gpu.idle_pct:.1f} %")
        for rank in ranks
    )
    return html_table(columns, rows)
