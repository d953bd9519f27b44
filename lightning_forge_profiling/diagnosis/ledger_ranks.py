"""Differences of other ranks' ledgers from rank 0's."""

from collections.abc import Mapping
from typing import Final

from lightning_forge_profiling.diagnosis.ledger_costs import ONCE
from lightning_forge_profiling.diagnosis.rule import NAMED_FROM_PCT
from lightning_forge_profiling.names import STEPS, part_kind
from lightning_forge_profiling.results.analysis import RankDifference, RunLedger

_LISTED: Final = 10
"""Most differences reported; a run of a thousand ranks may have more."""


def ledger_differences(ledgers: Mapping[int, RunLedger]) -> tuple[RankDifference, ...]:
    """Parts that take a rank at least 5 % of the fit longer or shorter than rank 0, largest difference first.

    One-time parts are left out, since ranks start one after the other. `steps` is left out if another part differs,
    since ranks wait for each other in it.

    Args:
        ledgers: ledgers by rank, all read at the same point of the fit. Without rank 0's there are no differences.

    Example:
        >>> def ledger(validation, steps):
        ...     parts = {"startup/process": 3.0, "validation": validation, "steps": steps}
        ...     return RunLedger(wall_s=13.0, parts=parts, unexplained_s=0.0, counts={})
        >>> ledger_differences({0: ledger(1.0, 9.0), 1: ledger(4.1, 5.9), 2: ledger(1.1, 8.9)})
        (RankDifference(rank=1, part='validation', seconds=3.1),)
    """
    if 0 not in ledgers:
        return ()
    first = _recurring(ledgers[0])
    least_s = NAMED_FROM_PCT / 100 * sum(first.values())
    found: list[RankDifference] = []
    for rank, ledger in ledgers.items():
        parts = _recurring(ledger)
        differ = {name: parts.get(name, 0.0) - first.get(name, 0.0) for name in first | parts}
        large = {name: seconds for name, seconds in differ.items() if abs(seconds) >= least_s > 0}
        if large.keys() != {STEPS}:
            large.pop(STEPS, None)
        found += [RankDifference(rank=rank, part=name, seconds=round(s, 3)) for name, s in large.items()]
    return tuple(sorted(found, key=lambda each: -abs(each.seconds))[:_LISTED])


def _recurring(ledger: RunLedger) -> dict[str, float]:
    return {name: seconds for name, seconds in ledger.parts.items() if part_kind(name) not in ONCE}
