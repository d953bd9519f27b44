"""What a rule is, and how it becomes a finding: the one model for causes in traces, in runs, and for hints.

To add one, write a function for its cost and one for its words, and add a `Rule` of both to the tuple at the end of
`trace_rules.py` (a rank of a trace), `cpu_rules.py` (a rank without a GPU), `run_rules.py` (a whole run) or `hints.py`
(a rank; less than a cause).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, Generic, Literal, TypeVar

from lightning_forge_profiling.results.analysis import Finding, RunEvidence, RunRegion, Saving
from lightning_forge_profiling.results.rank import RankSummary, SpentIn

NAMED_FROM_PCT: Final = 5.0
"""What costs less of a step is not named: run-to-run variation is of that size."""

_BEYOND: Final = 1.2
"""From this multiple of the cause's cost on, a saving needs an explanation."""

_ONE_DECIMAL_FROM_MS: Final = 10

Evidence = dict[str, float | str]
Context = TypeVar("Context")


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a rule says about one case.

    Attributes:
        title: one sentence with the numbers that matter.
        evidence: the numbers, each named with its unit.
        advice: what to change, naming the setting.
    """

    title: str
    evidence: Evidence = field(default_factory=dict)
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Rule(Generic[Context]):
    """One cause of lost time, or one thing worth a look.

    Attributes:
        code: the code of its finding or hint.
        cost: milliseconds per step that it costs, 0 where it is not the case; for a hint, the figure it looks at.
        explain: the words for it, called only where it applies.
        saves_ms: milliseconds per step that its fix saves, None if that cannot be predicted; by default all that it
            costs.
        at_most: whether that is a bound, and not the expected value; always by default.
        above: the rule applies where the cost is greater. Causes also have to cost `NAMED_FROM_PCT` of a step.
    """

    code: str
    cost: Callable[[Context], float]
    explain: Callable[[Context], Explanation]
    saves_ms: Callable[[Context], float | None] | None = None
    at_most: Callable[[Context], bool] = lambda _: True
    above: float = 0.0


MEASURE: Final = "forge-profiling run --no-window train.py with each, then forge-profiling compare A B"
"""How to measure a setting where there is no evidence that it gains."""


def unpredicted(_: object) -> None:
    """For `Rule.saves_ms`: there is no fix, or nothing bounds what it saves."""


def finding(
    rule: Rule[Context],
    context: Context,
    *,
    step_ms: float,
    share_pct: float,
    source: Literal["trace", "run"],
    rank: int | None = None,
) -> Finding:
    """A rule that applies, as a finding."""
    cost_ms, explained = rule.cost(context), rule.explain(context)
    return Finding(
        code=rule.code,
        share_pct=share_pct,
        rank=rank,
        source=source,
        title=explained.title,
        evidence=explained.evidence,
        advice=explained.advice,
        saves=saving(
            cost_ms if rule.saves_ms is None else rule.saves_ms(context),
            step_ms,
            at_most=rule.at_most(context),
            cost_ms=cost_ms,
        ),
    )


def saving(ms: float | None, step_ms: float, *, at_most: bool, cost_ms: float | None = None) -> Saving | None:
    """A predicted saving.

    Example:
        >>> saving(29.5, 38.3, at_most=False).text
        'That saves about 29.5 ms a step (77 %).'
    """
    if ms is None or ms <= 0 or step_ms <= 0:
        return None
    ms = min(ms, step_ms)
    pct = 100 * ms / step_ms
    text = f"That saves {'at most' if at_most else 'about'} {in_ms(ms)} a step ({pct:.0f} %)."
    if cost_ms is not None and ms > _BEYOND * cost_ms:
        text = f"{text[:-1]}, other waits for the host included: without this delay, the host runs ahead of the GPU."
    return Saving(ms_per_step=ms, pct=pct, at_most=at_most, text=text)


def in_ms(value: float) -> str:
    """A time with three digits.

    Example:
        >>> in_ms(53.27), in_ms(9.14), in_ms(0.386)
        ('53.3 ms', '9.14 ms', '0.39 ms')
    """
    return f"{value:.{1 if value >= _ONE_DECIMAL_FROM_MS else 2}f} ms"


_MATH: Final = frozenset({"matmul", "convolution", "attention"})
"""Kinds of kernels that multiply matrices, in one way or another."""
NO_BANDWIDTH: Final = _MATH | {"comm", "memcpy", "memset", "other"}
"""Kinds that memory bandwidth does not limit, or of which that is unknown."""

RECORD_STACKS: Final = "forge-profiling run --stacks, or ForgeProfilerCallback(with_stack=True),"
"""What to do where Python functions were not recorded."""

_SPENT: Final = MappingProxyType(
    {
        "python-bound": "python",
        "input-bound": "data",
        "launch-bound": "launching",
        "blocked-forward": "forward",
        "blocked-backward": "backward",
    }
)
"""By code the kind of its time in `PythonFunctions.spent`."""


@dataclass(frozen=True, slots=True)
class RuleContext:
    """The figures of one rank.

    Attributes:
        rank: the rank.
        wait_ms: how long it waits for other ranks in collectives, per step; None where none could be matched.
        least_exposed_ms: the least exposed communication of any rank, which is that of the rank that waits least.
        live: whether its CPU times are upper bounds for an unrecorded step, and not those of the recorded steps.
        run: evidence of the whole run; None for a trace alone.
    """

    rank: RankSummary
    wait_ms: float | None = None
    least_exposed_ms: float | None = None
    live: bool = False
    run: RunEvidence | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether GPU work was recorded."""
        return self.rank.gpu.busy_ms_per_step > 0

    @property
    def exposed_wait_ms(self) -> float:
        """Waiting for other ranks while nothing else ran.

        It is what this rank has more exposed communication than the rank with least. If ranks wait by turns, each has
        it: then it is as much of all waiting as of all communication.
        """
        comm = self.rank.comm
        if not self.wait_ms or not comm.ms_per_step:
            return 0.0
        in_turns_ms = min(self.wait_ms / comm.ms_per_step, 1.0) * comm.exposed_ms_per_step
        least_ms = comm.exposed_ms_per_step if self.least_exposed_ms is None else self.least_exposed_ms
        return max(in_turns_ms, min(comm.exposed_ms_per_step - least_ms, self.wait_ms))

    @property
    def has_stacks(self) -> bool:
        """Whether Python functions were recorded."""
        return self.rank.python is not None

    def pct(self, ms_per_step: float) -> float:
        """A time per step as a share of the step."""
        return 100 * ms_per_step / self.rank.step_ms.mean if self.rank.step_ms.mean else 0.0

    def of_step(self, ms_per_step: float, *, bound: bool = False) -> str:
        """A time per step beside the mean step, as `2.70 ms of each 3.25 ms step`."""
        most = "at most " if bound and self.live else ""
        return f"{most}{in_ms(ms_per_step)} of each {in_ms(self.rank.step_ms.mean)} {'live ' if self.live else ''}step"

    @property
    def math_ms(self) -> float:
        """Kernels that multiply matrices, in one way or another."""
        return sum(kind.ms_per_step for name, kind in self.rank.kinds.items() if name in _MATH)

    @property
    def bandwidth_ms(self) -> float:
        """Kernels that read and write memory and compute little: element-wise, copies, normalization, ..."""
        return sum(kind.ms_per_step for name, kind in self.rank.kinds.items() if name not in NO_BANDWIDTH)

    @property
    def host_idle_ms(self) -> float:
        """Idle time for which the host is the cause, the data loader apart: none is left once it runs ahead."""
        return sum(share.ms_per_step for cause, share in self.rank.idle.items() if cause not in {"data", "gpu"})

    @property
    def compute_ms(self) -> float:
        """Busy time without copies and exposed communication."""
        return sum(self.rank.categories[category].ms_per_step for category in ("matmul", "other"))


def in_function(rank: RankSummary | None, code: str) -> SpentIn | None:
    """The user's function that holds most of a finding's time; None if it is unknown, as without stacks."""
    python = None if rank is None else rank.python
    return None if python is None else python.spent.get(_SPENT.get(code, ""))


def located(found: Finding, rank: RankSummary | None) -> Finding:
    """The finding with the user's function that holds most of its time, if stacks show it and samples do not."""
    held = in_function(rank, found.code)
    if held is None or {"where", "line"} & found.evidence.keys():
        return found
    ms, of = in_ms(held.ms_per_step), in_ms(held.of_ms_per_step)
    return replace(
        found,
        title=f"{found.title}; recorded with stacks, {ms} of {of} are in {held.where}",
        evidence={**found.evidence, "where": held.where, "recorded_there_ms_per_step": held.ms_per_step},
    )


COMPUTE: Final = ("forward", "backward", "optimizer")

_NO_REGION: Final = RunRegion(device_ms=0.0, host_ms=0.0)

_BACKWARD_TO_FORWARD: Final = 3.0
"""Backward computes twice what forward does, three times with activation checkpointing. What it takes more in
several processes is likely communication, or waiting for the others."""


def region(evidence: RunEvidence, name: str) -> RunRegion:
    """A region's times per step. Worker restarts are no part of `data` here."""
    found, restarts = evidence.regions.get(name, _NO_REGION), evidence.worker_restarts
    if name != "data" or name not in evidence.regions or restarts is None:
        return found
    return RunRegion(
        device_ms=max(found.device_ms - restarts.device_ms, 0.0), host_ms=max(found.host_ms - restarts.host_ms, 0.0)
    )


def share_pct(evidence: RunEvidence, *regions: str) -> float:
    """What the device times of some regions are of the step, in percent."""
    total = sum(region(evidence, name).device_ms for name in regions)
    return 100 * total / evidence.step_ms.mean if evidence.step_ms.mean > 0 else 0.0


def all_told_apart(evidence: RunEvidence) -> bool:
    """Whether each region was timed; where forward, say, was not, it is in `other`."""
    return evidence.regions.keys() >= {"data", "transfer", *COMPUTE}


def backward_is_heavy(evidence: RunEvidence) -> bool:
    """Whether backward in several processes takes more than its computation explains."""
    forward, backward = (region(evidence, name).device_ms for name in ("forward", "backward"))
    return evidence.on_device and evidence.world_size > 1 and backward > _BACKWARD_TO_FORWARD * forward
