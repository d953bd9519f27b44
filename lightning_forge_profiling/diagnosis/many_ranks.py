"""Many ranks in few numbers: how their steps spread, and which of them a report shows."""

from collections.abc import Iterable, Sequence
from itertools import chain, islice, zip_longest
from operator import attrgetter
from statistics import fmean, median, quantiles
from typing import Final

from lightning_forge_profiling.schema import Distribution, Finding, Hint, RankSummary, RankWait

MOST_SHOWN: Final = 16  # two machines of eight GPUs: a table of more is not read

_FEWEST_FOR_P95: Final = 20
_PAIR: Final = 2


def spread(ranks: Sequence[RankSummary], waits: Iterable[RankWait]) -> dict[str, Distribution]:
    """Distributions over the ranks of their mean times per step, in milliseconds; {} without ranks."""
    figures = {
        "step": [rank.step_ms.mean for rank in ranks],
        "busy": [rank.gpu.busy_ms_per_step for rank in ranks],
        "idle": [rank.gpu.idle_ms_per_step for rank in ranks],
        "comm": [rank.categories["comm"].ms_per_step for rank in ranks],
        "waits": [wait.wait_ms_per_step for wait in waits],
    }
    return {name: _distribution(values) for name, values in figures.items() if values}


def _distribution(values: Sequence[float]) -> Distribution:
    return Distribution(
        mean=fmean(values),
        p50=median(values),
        min=min(values),
        max=max(values),
        p95=quantiles(values, n=20, method="inclusive")[-1] if len(values) >= _FEWEST_FOR_P95 else None,
    )


def shown(
    ranks: Sequence[RankSummary], waits: Iterable[RankWait], findings: Iterable[Finding], hints: Iterable[Hint]
) -> tuple[RankSummary, ...]:
    """Those of many ranks that a report shows, by number: rank 0, those that are named, a typical one, the worst."""
    if len(ranks) <= MOST_SHOWN:
        return tuple(ranks)
    of_rank = {rank.rank: rank for rank in ranks}
    by_step = sorted(ranks, key=lambda rank: rank.step_ms.mean)
    named = [ranks[0].rank, *_named(findings), *_named(hints), by_step[len(by_step) // 2].rank]
    worst = (
        [wait.rank for wait in sorted(waits, key=attrgetter("wait_ms_per_step"))],  # that others wait for
        [rank.rank for rank in reversed(by_step)],
        [rank.rank for rank in sorted(ranks, key=lambda rank: -rank.gpu.idle_ms_per_step)],
        [rank.rank for rank in sorted(ranks, key=lambda rank: -rank.gpu.busy_ms_per_step)],
    )
    by_turns = dict.fromkeys((*named, *chain.from_iterable(zip_longest(*worst))))
    chosen = islice((number for number in by_turns if number in of_rank), MOST_SHOWN)
    return tuple(of_rank[number] for number in sorted(chosen))


def _named(marks: Iterable[Finding | Hint]) -> list[int]:
    return [mark.rank for mark in marks if mark.rank is not None]


def rank_list(numbers: Iterable[int]) -> str:
    """Ranks in words.

    Examples:
        >>> rank_list([3]), rank_list([0, 1, 2, 3, 7])
        ('rank 3', 'ranks 0 to 3, 7')
    """
    numbers = sorted(numbers)
    starts = [place for place, number in enumerate(numbers) if not place or number != numbers[place - 1] + 1]
    runs = [numbers[start:end] for start, end in zip(starts, [*starts[1:], len(numbers)], strict=True)]
    parts = [f"{run[0]} to {run[-1]}" if len(run) > _PAIR else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(parts)}"
