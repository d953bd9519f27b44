"""What a rule is, and how it becomes a finding: the one model for causes in traces and in runs.

To add one, write a function for its cost and one for its words into the file of its subject (`loader`, `host_rules`,
`optimizer`, `compute`), and add them as a `Case` of a `Rule` to that file's `RULES`; less than a cause is a hint in
`hints.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from types import MappingProxyType
from typing import Final, Generic, Literal, NamedTuple, TypeVar

from msgspec import structs

from lightning_forge_profiling.schema import (
    CpuTime,
    CpuUse,
    Finding,
    RankSummary,
    Replay,
    RunEvidence,
    RunRegion,
    Saving,
    hosts_of,
)

MIN_SHARE_PCT: Final = 5.0  # what costs less of a step is not named: run-to-run variation is of that size

# the share from which a finding is named where it is not `MIN_SHARE_PCT`, by its code and source. A fused update of a
# model that is trained with a sensible batch takes 1 to 10 % of the step. Lightning's own loop with its default
# callbacks takes some 0.3 ms a step.
NAMED_FROM: Final = MappingProxyType({("slow-optimizer", "run"): 20.0, ("between-regions", "run"): 10.0})

MIN_STEPS: Final = 5  # fewest steps of a run to diagnose: one odd step in fewer would decide over the mean

COMPUTE: Final = ("forward", "backward", "optimizer")

# by code the one region that a finding's time is in
REGION_OF: Final = MappingProxyType(
    {
        "input-bound": "data",
        "transfer-bound": "transfer",
        "slow-optimizer": "optimizer",
        "between-regions": "other",
        **{f"blocked-{name}": name for name in COMPUTE},
    }
)

# the GPU waits for the host when it had caught up at most batch ends. On an H200 this was 92 to 100 % wherever Python,
# synchronizations or cudaMalloc set the pace, and 0 % in every run whose GPU did; what lies between is seldom met.
_MOSTLY_PCT: Final = 50.0
# and it does when it had caught up at few; between the two, neither is claimed for a whole step
_RARELY_PCT: Final = 20.0

# how to measure a setting where there is no evidence that it gains
MEASURE: Final = "forge-profiling run --no-window train.py with each, then forge-profiling compare A B"

# what to do about a training thread that uses no core
WAITS: Final = "Look there for what waits: a lock, a file, a request to a server, a subprocess, sleep()."

# fuses kernels and replays them as CUDA graphs, which is what is predicted (`analysis/fixes.py`, `compiled`). Six
# models took 1.4 to 3.5 times as long per step without the mode (H200, torch 2.11, 2026-11-28; docs/measured.md)
COMPILE: Final = 'torch.compile(model, mode="reduce-overhead")'

# a fix of two findings: the workers stay from epoch to epoch
PERSISTENT: Final = "DataLoader(..., persistent_workers=True)"

# what to do where Python functions were not recorded
RECORD_STACKS: Final = "forge-profiling run --stacks, or ForgeProfilerCallback(with_stack=True),"

Evidence = dict[str, float | str]
Interval = tuple[float, float]
Context = TypeVar("Context")


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a rule says about one case: a sentence, the numbers with their units, what to change, code to copy."""

    title: str
    evidence: Evidence = field(default_factory=dict)
    advice: str = ""
    fix: str = ""
    saves_s: float | None = None  # seconds of the fit that the fix saves; None for all that the cause takes
    certain: bool = False  # whether that is the expected value, and not the most

    def after(self, numbers: Evidence) -> "Explanation":
        """The same with some numbers first."""
        return replace(self, evidence={**numbers, **self.evidence})


@dataclass(frozen=True, slots=True)
class Case(Generic[Context]):
    """How a cause shows in one source of figures; it has to cost `MIN_SHARE_PCT` of a step."""

    cost: Callable[[Context], float]  # milliseconds per step that it costs, 0 where it is not the case
    explain: Callable[[Context], Explanation]  # the words for it, called only where it applies
    # milliseconds per step that its fix saves, None if that cannot be predicted; by default all that it costs
    saves_ms: Callable[[Context], float | None] | None = None
    # whether that is for all of the cause going, and not the expected value; always by default
    at_most: Callable[[Context], bool] = lambda _: True

    def saving(self, context: Context, step_ms: float) -> Saving | None:
        """What its fix saves of each step."""
        cost_ms = self.cost(context)
        saves_ms = cost_ms if self.saves_ms is None else self.saves_ms(context)
        return saving(saves_ms, step_ms, at_most=self.at_most(context), cost_ms=cost_ms)


@dataclass(frozen=True, slots=True)
class Rule:
    """One cause of lost time, and how it shows in each source: in recorded steps, and in the regions of a whole run.

    Where there are both, `live_step.py` says which of them stands.
    """

    code: str  # of its finding
    gpu: "Case[RuleContext] | None" = None  # on a recorded rank with GPU work
    cpu: "Case[RuleContext] | None" = None  # on one without
    run: "Case[RunTimes] | None" = None


def unpredicted(_: object) -> None:
    """For `Case.saves_ms`: there is no fix, or nothing bounds what it saves."""


def as_finding(
    code: str,
    explained: Explanation,
    *,
    share_pct: float,
    saves: Saving | None = None,
    run: RunEvidence | None = None,
    rank: int | None = None,
    of: Literal["step", "run", "memory"] = "step",
    between_pct: Interval | None = None,
) -> Finding:
    """A finding in its words, of a trace or of a run; by default a run's is on its own rank, if there are several."""
    if run is not None and rank is None and run.ranks.world_size > 1:
        rank = run.ranks.rank
    low_pct, high_pct = between_pct or (None, None)
    return Finding(
        code=code,
        share_pct=min(share_pct, 100.0),
        rank=rank,
        source="trace" if run is None else "run",
        title=explained.title,
        evidence=explained.evidence,
        advice=explained.advice,
        saves=saves,
        of=of,
        low_pct=low_pct,
        high_pct=high_pct,
        fix=explained.fix,
    )


_BEYOND: Final = 1.2  # from this multiple of the cause's cost on, a saving needs an explanation


_BOUND: Final = ", if all of it goes"


def saving(
    ms: float | None,
    step_ms: float,
    *,
    at_most: bool,
    cost_ms: float | None = None,
    left: str = "",
    between_pct: Interval | None = None,
) -> Saving | None:
    """A predicted saving of so much of each step.

    Args:
        ms: milliseconds of a step; None if unknown.
        step_ms: the step.
        at_most: whether it is what is saved if all of the cause goes.
        cost_ms: milliseconds of a step that the cause takes; None for as many as are saved.
        left: what of it stays, in words.
        between_pct: the interval that they are known to, in percent of the step.
    """
    if ms is None or ms <= 0 or step_ms <= 0:
        return None
    ms = min(ms, step_ms)
    pct = 100 * ms / step_ms
    text = f"That saves {'at most' if at_most else 'about'} {in_ms(ms)} a step ({pct:.0f} %{_known_to(between_pct)})"
    if cost_ms is not None and ms > _BEYOND * cost_ms:
        text += ", other waits for the host included: without this delay, the host runs ahead of the GPU"
    elif at_most:
        text += f", less {left}" if left else _BOUND
    return _saving(ms, pct, f"{text}.", between_pct, at_most=at_most)


def _saving(ms: float, pct: float, text: str, between_pct: Interval | None, *, at_most: bool) -> Saving:
    low_pct, high_pct = between_pct or (None, None)
    return Saving(ms_per_step=ms, pct=pct, at_most=at_most, text=text, low_pct=low_pct, high_pct=high_pct)


def _known_to(between_pct: Interval | None) -> str:
    """An interval behind its percentage; "" if there is none, or it is no wider than its rounding."""
    low, high = (f"{each:.0f}" for each in between_pct or (0.0, 0.0))
    return f", {low} to {high} %" if low != high else ""


class _Measured(NamedTuple):
    """What changes that were made saved and left, as shares of what was predicted, least and most."""

    saved: tuple[float, float]
    left: tuple[float, float]


# of 13 that end a wait, and of 20 after which the GPU or the host has less to do (H100 and H200, torch 2.11, 2026-11;
# docs/measured.md, "Fixes")
_WAITS: Final = _Measured(saved=(0.45, 1.45), left=(0.7, 1.3))
_LESS_WORK: Final = _Measured(saved=(0.55, 1.3), left=(0.8, 1.6))
_OF_WORK: Final = frozenset({"launch-bound", "memory-bandwidth-bound", "compute-bound"})


def measured_pct(pct: float, code: str) -> tuple[float, float]:
    """Between what changes that were made saved, in percent of the step, for a finding that predicts so much."""
    saved, left = _LESS_WORK if code in _OF_WORK else _WAITS
    least, most = (100 - share * (100 - pct) for share in (left[1], left[0]))
    return max(saved[0] * pct, least), min(saved[1] * pct, most)


def replayed_saving(replay: Replay | None, code: str, live_ms: float | None = None) -> Saving | None:
    """The saving by the recorded steps, played again with a finding's fix; None where there is no such prediction.

    It may be 0, where the host would set the pace with the fix as without.

    Args:
        replay: of the rank.
        code: of the finding.
        live_ms: the step without recording, for which the host is played as much faster; None for the recorded step.
    """
    after = None if replay is None else replay.after_ms.get(code)
    if replay is None or after is None:
        return None
    step_ms = replay.step_ms[0] if live_ms is None else min(live_ms, replay.step_ms[0])
    left_ms = [min(each, step_ms) for each in _left(replay.step_ms, after, step_ms)]
    ms = step_ms - fmean(left_ms)
    if not ms:
        return Saving(ms_per_step=0.0, pct=0.0, at_most=False, text=_NOTHING)
    low_pct, high_pct = (
        100 * (1 - each * (1 + sign * replay.uncertain_pct / 100) / step_ms)
        for each, sign in ((max(left_ms), 1), (min(left_ms), -1))
    )
    return expected(ms, step_ms, code, (low_pct, high_pct))


_NOTHING: Final = "That saves nothing by itself: the host would set the pace."


def expected(ms: float, step_ms: float, code: str, between_pct: Interval | None = None) -> Saving:
    """A saving of so much of each step with its interval, by what changes that were made saved.

    Args:
        ms: milliseconds of a step.
        step_ms: the step.
        code: of the finding.
        between_pct: an interval of its own, which the other one widens.
    """
    pct = min(100 * ms / step_ms, 100.0)
    low_pct, high_pct = between_pct or (pct, pct)
    measured = measured_pct(pct, code)
    between_pct = max(min(low_pct, measured[0]), 0.0), min(max(high_pct, measured[1]), 100.0)
    text = f"That saves about {in_ms(ms)} a step ({pct:.0f} %{_known_to(between_pct)})."
    return _saving(ms, pct, text, between_pct, at_most=False)


def _left(step_ms: Sequence[float], after_ms: Sequence[float], live_ms: float) -> list[float]:
    """What a fix leaves of a step with the host that a live step has, or with each that it may have.

    With several where the GPU sets the pace, so that the step does not show how fast the host is. It is faster than
    recorded then, as it always is without recording.
    """
    alike = hosts_of(step_ms, live_ms)
    if len(alike) > 1:
        return [after_ms[host] for host in alike]
    for (longer, with_it), (shorter, left) in pairwise(zip(step_ms, after_ms, strict=True)):
        if shorter <= live_ms < longer:
            return [with_it + (left - with_it) * (longer - live_ms) / (longer - shorter)]
    return [after_ms[0] if live_ms >= step_ms[0] else after_ms[-1]]  # also the fastest host takes longer


def saving_of_fit(
    seconds: float,
    whole_s: float,
    steps: int,
    *,
    at_most: bool,
    whole: str = "fit",
    left: str = "",
    between_pct: Interval | None = None,
) -> Saving:
    """A predicted saving of the fit's wall time, or of the run's, which begins before it; the rest as `saving`."""
    pct, bound, known = 100 * seconds / whole_s, "at most" if at_most else "about", _known_to(between_pct)
    less = "" if not at_most else f", less {left}" if left else _BOUND
    text = f"That saves {bound} {in_s(seconds)} of the {whole}'s {in_s(whole_s)} ({pct:.0f} %{known}){less}."
    return _saving(1e3 * seconds / steps, pct, text, between_pct, at_most=at_most)


def in_ms(value: float) -> str:
    """A time with three digits: 53.3 ms, 9.14 ms, 0.39 ms."""
    return f"{value:.{1 if value >= 10 else 2}f} ms"  # noqa: PLR2004


def in_s(seconds: float) -> str:
    """A time with two or three digits: 130 s, 7.6 s, 380 ms, 0.94 ms."""
    if seconds >= 1:
        return f"{seconds:.0f} s" if seconds >= 100 else f"{seconds:.1f} s"  # noqa: PLR2004
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.01 else in_ms(1e3 * seconds)  # noqa: PLR2004


def listed(items: Sequence[str]) -> str:
    """Some items as `one`, `one and another`, `one, another and a third`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def of_step(ms: float, step_ms: float) -> str:
    """A time beside the step's, as `2.70 ms of each 3.25 ms step`."""
    return f"{in_ms(ms)} of each {in_ms(step_ms)} step"


# -- the figures of a rank -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RuleContext:
    """The figures of one rank."""

    rank: RankSummary
    wait_ms: float | None = None  # for other ranks in collectives; None where none could be matched
    least_exposed_ms: float | None = None  # communication of the rank that has least, which waits least
    live: bool = False  # whether CPU times are upper bounds for a live step, and not those of the recorded steps
    run: RunEvidence | None = None  # None for a trace alone

    @property
    def cpu(self) -> CpuTime:
        """Where the step goes on the CPU."""
        if self.rank.cpu is None:
            raise ValueError("a rank that uses a GPU")
        return self.rank.cpu

    @property
    def on_gpu(self) -> bool:
        """Whether GPU work was recorded."""
        return self.rank.gpu.busy_ms_per_step > 0

    @property
    def exposed_wait_ms(self) -> float:
        """Waiting for other ranks while nothing else ran."""
        # it is what this rank has more exposed communication than the rank with least. If ranks wait by turns, each has
        # it: then it is as much of all waiting as of all communication.
        comm = self.rank.comm
        if not self.wait_ms or not comm.ms_per_step:
            return 0.0
        in_turns_ms = min(self.wait_ms / comm.ms_per_step, 1.0) * comm.exposed_ms_per_step
        least_ms = comm.exposed_ms_per_step if self.least_exposed_ms is None else self.least_exposed_ms
        return max(in_turns_ms, min(comm.exposed_ms_per_step - least_ms, self.wait_ms))

    @property
    def more_with_stacks(self) -> str:
        """What recording stacks would show besides; "" where they were recorded."""
        return "" if self.rank.python is not None else f" {RECORD_STACKS}"

    def pct(self, ms_per_step: float) -> float:
        """A time per step as a share of the step."""
        return 100 * ms_per_step / self.rank.step_ms.mean if self.rank.step_ms.mean else 0.0

    def of_step(self, ms_per_step: float, *, bound: bool = False) -> str:
        """A time per step beside the mean step, as `2.70 ms of each 3.25 ms step`."""
        most = "at most " if bound and self.live else ""
        return f"{most}{in_ms(ms_per_step)} of each {in_ms(self.rank.step_ms.mean)} {'live ' if self.live else ''}step"

    @property
    def late_host_ms(self) -> float:
        """Idle time that goes once the host gets ahead: not the loader's, nor that in calls which take long anyway."""
        return sum(
            share.ms_per_step for cause, share in self.rank.idle.items() if cause not in {"data", "gpu", "launch"}
        )

    @property
    def compute_ms(self) -> float:
        """Busy time without copies and exposed communication."""
        return sum(self.rank.categories[category].ms_per_step for category in ("matmul", "other"))


# -- the regions of a run --------------------------------------------------------------------------------------------

_NO_REGION: Final = RunRegion(device_ms=0.0, host_ms=0.0)

# backward computes twice what forward does, three times with activation checkpointing. What it takes more in several
# processes is likely communication, or waiting for the others.
BACKWARD_TO_FORWARD: Final = 3.0


def subtract(times: RunRegion, device_ms: float, host_ms: float, p50_ms: float = 0.0) -> RunRegion:
    """A region without a part of its times."""
    return structs.replace(
        times,
        device_ms=max(times.device_ms - device_ms, 0.0),
        host_ms=max(times.host_ms - host_ms, 0.0),
        p50_ms=None if times.p50_ms is None else max(times.p50_ms - p50_ms, 0.0),
    )


@dataclass(frozen=True, slots=True)
class RunTimes:
    """A run with times of its regions and use of the cores: measured ones, or without what has its own findings."""

    evidence: RunEvidence
    regions: Mapping[str, RunRegion]
    cpu: CpuUse | None

    @classmethod
    def of(cls, run: RunEvidence) -> "RunTimes":
        """The measured times of a run."""
        return cls(run, run.timing.regions, run.machine.cpu)

    @property
    def step_ms(self) -> float:
        """The mean step."""
        return self.evidence.timing.step_ms.mean

    def of_step(self, ms: float) -> str:
        """A time beside the mean step's."""
        return of_step(ms, self.step_ms)

    @property
    def host_is_ahead(self) -> bool:
        """Whether the host has queued work ahead at nearly every batch end, so that the GPU sets the pace there."""
        starved_pct = self.evidence.timing.gpu_starved_pct
        return self.evidence.timing.on_device and starved_pct is not None and starved_pct <= _RARELY_PCT

    @property
    def host_sets_the_pace(self) -> bool:
        """Whether a step takes what the host takes for it: there is no GPU, or it mostly waits."""
        timing = self.evidence.timing
        return not timing.on_device or (timing.gpu_starved_pct or 0.0) >= _MOSTLY_PCT

    def region(self, name: str) -> RunRegion:
        """A region's times per step. Worker restarts are no part of `data` here."""
        times, restarts = self.regions.get(name, _NO_REGION), self.evidence.timing.worker_restarts
        return times if name != "data" or restarts is None else subtract(times, restarts.device_ms, restarts.host_ms)

    def share_pct(self, *regions: str) -> float:
        """What the device times of some regions are of the step, in percent."""
        return 100 * sum(self.region(name).device_ms for name in regions) / self.step_ms if self.step_ms > 0 else 0.0

    @property
    def waits_are_known(self) -> bool:
        """Whether a wait in the module's code is known from its time without a core."""
        # where another thread of the process waits for a core, no thread may use one; several ranks wait for each
        # other, and on a GPU the training thread waits for autograd's.
        if self.cpu is None or self.evidence.timing.on_device or self.evidence.ranks.world_size > 1:
            return False
        return self.cpu.contended is False or self.cpu.threads == 1

    def blocked_ms(self, *regions: str) -> float:
        """Milliseconds per step in which the module's own code waits, of times as `self_times` gives them."""
        if self.cpu is None or not self.waits_are_known:
            return 0.0
        return sum(self.cpu.blocked_pct(name) * self.region(name).device_ms / 100 for name in regions)

    def waits_each_step_ms(self, name: str) -> float:
        """Milliseconds per step in which a region waits, if the two longest waits were like the third.

        A machine interrupts some steps, which is no wait of the code's.
        """
        region = self.cpu.regions.get(name) if self.cpu is not None else None
        steady = 1 - region.longer_pct / region.blocked_pct if region is not None and region.blocked_pct else 1.0
        return steady * self.blocked_ms(name)

    def works_ms(self, name: str) -> float:
        """Milliseconds per step in which a region computes, the wait for a core that computing takes included."""
        left_ms = max(self.region(name).device_ms - self.blocked_ms(name), 0.0)
        cpu = self.cpu.regions.get(name) if self.cpu is not None and self.waits_are_known else None
        if cpu is None or not cpu.used_pct + cpu.waits_pct or not cpu.blocked_pct:
            return left_ms
        # on a busy machine a thread waits for a core also where it woke up: those waits go with what it waited for
        computing = cpu.used_pct / (cpu.used_pct + cpu.blocked_pct)
        return left_ms * (cpu.used_pct + cpu.waits_pct * computing) / (cpu.used_pct + cpu.waits_pct)

    @property
    def backward_is_heavy(self) -> bool:
        """Whether backward in several processes takes more than its computation explains."""
        forward, backward = (self.region(name).device_ms for name in ("forward", "backward"))
        many = self.evidence.timing.on_device and self.evidence.ranks.world_size > 1
        return many and backward > BACKWARD_TO_FORWARD * forward
