"""HTML of an analysis and of a ledger, for notebooks."""

from dataclasses import replace
from functools import singledispatch

from lightning_forge_profiling.names import docs_url
from lightning_forge_profiling.report.analysis_tables import ledger_table, run_regions_table
from lightning_forge_profiling.report.blocks import Row, Rows, rows_of
from lightning_forge_profiling.report.page import rendered
from lightning_forge_profiling.report.wording import evidence_words, share_of
from lightning_forge_profiling.schema import Analysis
from lightning_forge_profiling.timing.ledger import Ledger


@singledispatch
def page(result: object) -> str:
    """HTML of a result, by its type."""
    raise TypeError(f"notebooks show no {type(result).__name__}")


@page.register
def analysis_html(analysis: Analysis) -> str:
    """HTML of the verdict, the findings with their evidence, and the split of the step."""
    findings = [
        (
            finding,
            docs_url(finding.code),
            f"{finding.share_pct:.1f} % {share_of(analysis, finding)}",
            "; ".join(evidence_words(finding)),
        )
        for finding in analysis.findings
    ]
    return rendered("notebook.html", analysis=analysis, findings=findings, rows=_step(analysis))


@page.register
def ledger_html(ledger: Ledger) -> str:
    """HTML table of the largest parts of a ledger, with their share of the wall time."""
    rows = ledger_table(ledger, decimals=2)
    whole = Row(("the run", f"{ledger.wall_s:.2f}", "", ""))
    return rendered("notebook_rows.html", rows=replace(rows, rows=(*rows.rows, whole)))


def _step(analysis: Analysis) -> Rows | None:
    """The regions of the run, else how busy the GPU of each rank was."""
    run = analysis.run
    if run is not None and run.regions:
        rows = run_regions_table(run)
        whole = ("step", f"{run.step_ms.mean:.3f}", "")[: len(rows.columns)]
        return replace(rows, rows=(*rows.rows, Row(whole)))
    if not analysis.ranks:
        return None
    return rows_of(
        analysis.ranks,
        {
            "rank": lambda rank: str(rank.rank),
            "median step ms": lambda rank: f"{rank.step_ms.p50:.3f}",
            "GPU busy": lambda rank: f"{rank.gpu.busy_pct:.1f} %",
            "GPU idle": lambda rank: f"{rank.gpu.idle_pct:.1f} %",
        },
    )
