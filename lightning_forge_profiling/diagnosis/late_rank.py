"""Which rank's host is late, by the ranks' own clocks in steps that no profiler slowed."""

from statistics import fmean
from typing import Final

from lightning_forge_profiling.diagnosis.rule import NAMED_FROM_PCT, in_ms, saving
from lightning_forge_profiling.results.analysis import Analysis, Finding, RunEvidence

_TWO: Final = 2
_COMM: Final = "comm"


def late_host(analysis: Analysis, evidence: RunEvidence) -> Finding | None:
    """The rank that the others wait for because its host is late.

    Recording slows every rank's host, each by another amount, so that in a trace another rank may be the late one. In
    live steps the host that works longest on a step is late by what it works longer than the others. That costs no
    more than the others' GPUs have left beside their own work.

    Args:
        analysis: of the trace of all ranks, for how long the GPUs work.
        evidence: of the run, with the clock of each rank.

    Returns:
        A straggler; None where there is none, without a GPU (gloo has hosts wait inside of backward), or without the
        clocks and traces of two ranks.
    """
    if not evidence.on_device or min(len(evidence.clocks), len(analysis.ranks)) < _TWO:
        return None
    last = max(evidence.clocks, key=lambda clock: clock.host_ms)
    others = [clock for clock in evidence.clocks if clock is not last]
    step_ms = fmean(clock.step_ms for clock in evidence.clocks)
    late_ms = last.host_ms - fmean(clock.host_ms for clock in others)
    others_work = [ms for rank, ms in work_ms(analysis).items() if rank != last.rank]
    cost_ms = min(late_ms, step_ms - fmean(others_work))
    if step_ms <= 0 or 100 * cost_ms / step_ms < NAMED_FROM_PCT:
        return None
    return Finding(
        code="straggler",
        share_pct=100 * cost_ms / step_ms,
        rank=last.rank,
        source="run",
        title=f"the other ranks wait {in_ms(cost_ms)} of each {in_ms(step_ms)} step for rank {last.rank}: its host is "
        f"late: it takes {in_ms(last.host_ms)} a step, the others' {in_ms(last.host_ms - late_ms)}",
        evidence={
            "late": "host",
            "late_ms_per_step": round(late_ms, 3),
            "host_ms_per_step": round(last.host_ms, 3),
            "others_host_ms_per_step": round(last.host_ms - late_ms, 3),
            "step_ms": round(step_ms, 3),
        },
        advice=f"Look for what only rank {last.rank} does (logging, checkpoints, evaluation, a slower loader) and for "
        "what else runs on its host's cores.",
        saves=saving(cost_ms, step_ms, at_most=False),
    )


def work_ms(analysis: Analysis) -> dict[int, float]:
    """By rank, how long its GPU works on a recorded step, waiting for other ranks not counted.

    Exposed communication of the rank that has least of it is the communication; what others have more is waiting.
    """
    comm = {rank.rank: rank.categories[_COMM].ms_per_step for rank in analysis.ranks}
    least = min(comm.values(), default=0.0)
    return {rank.rank: rank.gpu.busy_ms_per_step - comm[rank.rank] + least for rank in analysis.ranks}
