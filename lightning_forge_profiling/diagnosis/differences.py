"""Sentences on differences between a trace and the run."""

from collections.abc import Sequence
from typing import Final

from lightning_forge_profiling.diagnosis.rule import NAMED_FROM_PCT
from lightning_forge_profiling.results.analysis import Finding, RunEvidence

SLOWED_FROM: Final = 1.1
"""From this ratio of recorded to live steps on, the trace's shares are converted to the live step."""

DIFFER_BY_PCT: Final = 5.0
"""Percentage points from which shares of a step are reported as different. A window of few steps varies by less."""


def recorded_shorter(recorded_ms: float, evidence: RunEvidence) -> str:
    """Sentence on recorded steps that are shorter than live ones."""
    live_ms = evidence.step_ms.mean
    return (
        f"recorded steps took {recorded_ms:.2f} ms, live ones {live_ms:.2f} ms: the window lacks what happens only in "
        "some steps; shares are of live steps"
    )


def recorded_slower(recorded_ms: float, evidence: RunEvidence) -> str:
    """Sentence on recorded steps that are longer than live ones."""
    live_ms = evidence.step_ms.mean
    return (
        f"recorded steps took {recorded_ms:.2f} ms, live ones {live_ms:.2f} ms "
        f"({100 * (recorded_ms / live_ms - 1):+.0f} %): recording slows the host; shares are of live steps"
    )


def disagreement(
    code: str, of_trace: Sequence[Finding], in_run: float, evidence: RunEvidence, converted_pct: float | None = None
) -> str:
    """Sentence on a share that differs between trace and run."""
    recorded = f"{of_trace[0].share_pct:.0f}" if of_trace else f"under {NAMED_FROM_PCT:.0f}"
    of_live = f" ({converted_pct:.0f} % of a live one)" if converted_pct is not None else ""
    averaged = " (mean of the ranks)" if evidence.world_size > 1 and of_trace else ""
    of_first = " on rank 0" if evidence.world_size > 1 else ""
    return (
        f"{code}: {recorded} % of the recorded steps{averaged}{of_live}, "
        f"{in_run:.0f} % of the run's {evidence.steps} steps{of_first}"
    )
