"""The ranks of a run side by side, in lines of text: the own work of each, its waiting, and the machines' clocks."""

from collections.abc import Iterator
from operator import itemgetter
from statistics import median
from typing import Final

from lightning_forge_profiling.diagnosis.ledger_costs import LedgerCosts
from lightning_forge_profiling.diagnosis.rule import NAMED_FROM_PCT, in_ms
from lightning_forge_profiling.results.analysis import RankWork, RunEvidence

_SHOWN: Final = 8
_LEAVES: Final = 3


def rank_lines(run: RunEvidence) -> Iterator[tuple[str, str]]:
    """A name and a line for each rank if their own work differs; of many ranks those with most and with least of it."""
    own_ms = {work.rank: sum(work.step_leaves_ms.values()) for work in run.ranks}
    ranks = sorted(run.ranks, key=lambda work: -own_ms[work.rank])
    if not ranks or max(own_ms.values()) - min(own_ms.values()) < NAMED_FROM_PCT / 100 * run.step_ms.mean:
        return
    several_hosts = len({work.host for work in ranks}) > 1
    left_out = ranks[_SHOWN // 2 : -_SHOWN // 2] if len(ranks) > _SHOWN else []
    for work in ranks:
        if work not in left_out:
            yield f"rank {work.rank}", f"{f'on {work.host} ' if several_hosts else ''}{_words(work, own_ms[work.rank])}"
        elif work is left_out[0]:
            yield "ranks", f"{len(left_out)} others in between"
    if several_hosts:
        yield "clocks", _clocks(ranks)


def _words(work: RankWork, own_ms: float) -> str:
    leaves = sorted(work.step_leaves_ms.items(), key=lambda leaf: -leaf[1])[:_LEAVES]
    waits_ms = sum(work.waits_ms.values())
    shown = ", ".join(f"{leaf} {in_ms(ms)}" for leaf, ms in leaves)
    return f"works {in_ms(own_ms)} of its step ({shown}), waits {in_ms(waits_ms)} for others"


def rank_notes(run: RunEvidence) -> Iterator[str]:
    """Which ranks are not known, and parts outside of the step that take a rank at least 5 % of the fit longer."""
    missing = run.world_size - len(run.ranks)
    if run.ranks and missing:
        yield (
            f"the records of {missing} of {run.world_size} ranks are not known: rank {run.rank} may wait for them in "
            "other and backward"
        )
    if run.ledger is None or len(run.ranks) < 2:  # noqa: PLR2004
        return
    costs = LedgerCosts(run, run.ledger)
    found = []
    for part in dict.fromkeys(part for work in run.ranks for part in work.outside):
        seconds = {work.rank: work.own_ms(part) * costs.steps / 1e3 for work in run.ranks}
        most = max(seconds, key=seconds.__getitem__)
        more_s = seconds[most] - median(s for rank, s in seconds.items() if rank != most)
        if more_s >= NAMED_FROM_PCT / 100 * costs.whole_s > 0:
            found.append((more_s, f"rank {most} spends {more_s:.1f} s more in {part} than the others"))
    yield from (text for _, text in sorted(found, reverse=True))


def _clocks(ranks: list[RankWork]) -> str:
    known = [(abs(work.clock_ms), work) for work in ranks if work.clock_ms is not None]
    if not known:
        return "the offset of the machines' clocks is unknown; the times of a rank are by its own"
    _, work = max(known, key=itemgetter(0))
    ahead, error = in_ms(work.clock_ms or 0.0), in_ms(work.clock_error_ms or 0.0)
    return f"that of {work.host} is {ahead} ahead of rank 0's, give or take {error}; the times of a rank are by its own"
