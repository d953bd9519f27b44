"""Status of a run: running, finished, failed, or silent for too long."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from lightning_forge_profiling.record.lines import Begin
from lightning_forge_profiling.record.reader import RankRecord, RunRecord

Outcome = Literal["running", "finished", "failed", "silent"]

_PATIENCE_S: Final = 30.0
"""Shortest silence. A run writes every few seconds; a shared file system may show that some seconds later."""
_PATIENT: Final = 3.0
"""Silence is longer than this many times the longest recent pause: steps and validation may take long."""
_RECENT: Final = 50

_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400


@dataclass(frozen=True, slots=True)
class Standing:
    """Status of a run or of one rank.

    Attributes:
        outcome: `running`; `finished` or `failed`, by the last line; `silent` without a new line for long.
        step: number of steps up to the last line.
        began: start of the fit, Unix time in seconds.
        at: time of the last line, Unix time in seconds.
        text: the status in words.
    """

    outcome: Outcome
    step: int
    began: float
    at: float
    text: str


def run_standing(record: RunRecord, now: float) -> Standing:
    """Status of a run.

    A run has finished when its lowest rank has, and failed when any rank has.
    """
    ranks = {rank.begin.rank: rank_standing(rank, now) for rank in record.ranks}
    failed = min((one for one in ranks.values() if one.outcome == "failed"), key=lambda one: one.at, default=None)
    if failed is not None:
        return failed
    first = next(iter(ranks.values()))
    newest = max(ranks.values(), key=lambda one: one.at)
    shown = first if first.outcome == "finished" else newest
    silent = [(rank, one) for rank, one in ranks.items() if one.outcome == "silent" and one is not shown]
    if shown.outcome == "silent":
        silent = []
    others = "".join(f"; rank {rank} silent for {duration(now - one.at)}, step {one.step:,}" for rank, one in silent)
    return Standing(shown.outcome, shown.step, shown.began, shown.at, shown.text + others)


def rank_standing(rank: RankRecord, now: float) -> Standing:
    """Status of one rank."""
    began = rank.begin.at
    at = max((line.at for line in rank.lines), default=began)
    step = max((line.step for line in rank.lines if not isinstance(line, Begin)), default=0)
    end = rank.end
    if end is not None:
        after = duration(end.at - began)
        steps = "1 step" if end.step == 1 else f"{end.step:,} steps"
        if end.outcome == "finished":
            return Standing("finished", end.step, began, end.at, f"finished after {after}, {steps}")
        what = end.exception or "an exception without a message"
        return Standing("failed", end.step, began, end.at, f"failed after {after}, step {end.step:,}: {what}")
    ago = duration(now - at)
    if now - at <= _patience_s([began, *(line.at for line in rank.lines[-_RECENT:])]):
        return Standing("running", step, began, at, f"running: step {step:,}, last written {ago} ago")
    return Standing("silent", step, began, at, f"silent: step {step:,}, last written {ago} ago; killed or stalled")


def _patience_s(times: Sequence[float]) -> float:
    longest = max((later - earlier for earlier, later in pairwise(times[-_RECENT:])), default=0.0)
    return max(_PATIENCE_S, _PATIENT * longest)


def duration(seconds: float) -> str:
    """A duration in its two largest units.

    Example:
        >>> duration(3.4), duration(840), duration(7380), duration(266_400)
        ('3 s', '14 min', '2 h 3 min', '3 d 2 h')
    """
    whole = max(0, round(seconds))
    if whole < _MINUTE_S:
        return f"{whole} s"
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S} min"
    if whole < _DAY_S:
        return f"{whole // _HOUR_S} h {whole % _HOUR_S // _MINUTE_S} min"
    return f"{whole // _DAY_S} d {whole % _DAY_S // _HOUR_S} h"
