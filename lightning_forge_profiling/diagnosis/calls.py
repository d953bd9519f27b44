"""The cause that a call or a setting of the user's is: one of the catalogue's, with what the whole fit spends on it."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from lightning_forge_profiling.diagnosis.catalogue import Made, Mistake, mistakes_in
from lightning_forge_profiling.diagnosis.ledger_costs import LedgerCosts
from lightning_forge_profiling.diagnosis.rule import (
    MIN_SHARE_PCT,
    Explanation,
    as_finding,
    in_ms,
    in_s,
    saving,
    saving_of_fit,
    subtract,
)
from lightning_forge_profiling.names import BEFORE_FIT, VALIDATION_DATA, hook_region
from lightning_forge_profiling.schema import (
    VALIDATION_WORKER_LINES,
    WORKER_LINES,
    Finding,
    Operator,
    RunEvidence,
    RunLedger,
    SampledLine,
)

SLOW_CALL: Final = "slow-call"

# where training waits for the lines of a worker
_WAITS_FOR: Final = {WORKER_LINES: "data", VALIDATION_WORKER_LINES: VALIDATION_DATA}

_Z: Final = 1.96  # of a 95 % interval


@dataclass(frozen=True, slots=True)
class _Spent:
    """What the fit spends on a mistake within one part of it."""

    made: Made
    seconds: float  # that it costs: in steps on a GPU no more than the GPU waits for a call
    in_steps: bool  # whether the part is one of each step


@dataclass(frozen=True, slots=True)
class Call:
    """A mistake with all that it costs, wherever it is made."""

    mistake: Mistake
    spent: tuple[_Spent, ...]  # the longest first

    @property
    def seconds(self) -> float:
        """Of the whole fit."""
        return sum(each.seconds for each in self.spent)

    @property
    def in_steps(self) -> bool:
        """Whether all of it is in the steps."""
        return all(each.in_steps for each in self.spent)

    @property
    def place(self) -> str:
        """The call and its line, as `self.auc.compute() at model.py:41`, or the setting."""
        return self.spent[0].made.place


def find_calls(run: RunEvidence, recorded: Sequence[Operator] = ()) -> tuple[Call, ...]:
    """The mistakes of the catalogue on which the fit spends at least `MIN_SHARE_PCT` of its time."""
    spent: defaultdict[str, list[_Spent]] = defaultdict(list)
    for made in mistakes_in(run, recorded):
        seconds, in_steps = _part_s(run, made)
        spent[made.mistake.name].append(_Spent(made, seconds * made.share, in_steps))
    calls = [Call(each[0].made.mistake, tuple(sorted(each, key=lambda one: -one.seconds))) for each in spent.values()]
    return tuple(call for call in calls if 100 * call.seconds >= MIN_SHARE_PCT * LedgerCosts(run).whole_s > 0)


def _part_s(run: RunEvidence, made: Made) -> tuple[float, bool]:
    """Seconds that the fit spends in a part, and whether it is one of the steps: there on a GPU what the GPU waits."""
    timing, costs, part = run.timing, LedgerCosts(run), _WAITS_FOR.get(made.part, made.part)
    region = timing.regions.get(part)
    if region is None:
        seconds = 0.0 if run.ledger is None or part in BEFORE_FIT else run.ledger.parts.get(part, 0.0)
        in_steps, ms = bool(hook_region(part)), costs.per_step_ms(part)
        return seconds * costs.exposed_ms(part) / ms if in_steps and ms else seconds, in_steps
    is_work = made.line is None or made.part == WORKER_LINES or not timing.on_device
    ms = region.device_ms if is_work else region.host_ms
    if timing.on_device and timing.gpu_starved_pct is not None and made.line is not None:
        ms = min(ms, timing.step_ms.mean * timing.gpu_starved_pct / 100)
    return ms * costs.steps / 1e3, True


def without_calls(run: RunEvidence, calls: Iterable[Call]) -> RunEvidence:
    """The run without the time that is these calls', and no other cause's."""
    ms: defaultdict[str, float] = defaultdict(float)
    host_ms: defaultdict[str, float] = defaultdict(float)
    shares: defaultdict[str, float] = defaultdict(float)
    named = set()
    for each in (each for call in calls for each in call.spent):
        named.add(each.made.line)
        part = _WAITS_FOR.get(each.made.part, each.made.part)
        shares[each.made.part] += each.made.share
        region = hook_region(part) or part
        each_ms = 1e3 * each.seconds / LedgerCosts(run).steps
        ms[region] += each_ms
        if each.made.line is not None or not run.timing.on_device:  # on a GPU a setting's time is the GPU's work
            host_ms[region] += each_ms
    if not named:
        return run
    regions = {name: subtract(times, ms[name], host_ms[name], ms[name]) for name, times in run.timing.regions.items()}
    lines = {part: _lines_without(lines, named, shares[part]) for part, lines in run.lines.items()}
    shares[VALIDATION_DATA] += shares[VALIDATION_WORKER_LINES]
    return replace(run, timing=replace(run.timing, regions=regions), ledger=_ledger_without(run, shares), lines=lines)


def _lines_without(
    lines: Iterable[SampledLine], named: Collection[SampledLine | None], share: float
) -> tuple[SampledLine, ...]:
    """The other lines, with their shares of what is left."""
    left = max(1 - share, 0.0)
    return tuple(replace(line, pct=min(line.pct / left, 100.0)) for line in lines if line not in named and left)


def _ledger_without(run: RunEvidence, shares: Mapping[str, float]) -> RunLedger | None:
    if run.ledger is None:
        return None

    def less(times: Mapping[str, float]) -> dict[str, float]:
        return {part: s * max(1 - shares.get(part, 0.0), 0.0) for part, s in times.items()}

    ledger, counted = run.ledger, run.ledger.counted_s
    return replace(
        ledger,
        parts=less(ledger.parts),
        first_s=less(ledger.first_s),
        counted_s=None if counted is None else less(counted),
    )


def call_findings(run: RunEvidence, calls: Iterable[Call]) -> list[Finding]:
    """The finding that each of these calls is."""
    return [_finding(call, run) for call in calls]


def _finding(call: Call, run: RunEvidence) -> Finding:
    costs, mistake = LedgerCosts(run), call.mistake
    at_most = bool(mistake.left) or (run.timing.on_device and mistake.setting is None)
    if call.in_steps:
        ms, step_ms = 1e3 * call.seconds / costs.steps, run.timing.step_ms.mean
        share_pct, took = 100 * ms / step_ms, f"{in_ms(ms)} of each {in_ms(step_ms)} step"
        saves = saving(ms, step_ms, at_most=at_most)
    else:
        share_pct = 100 * call.seconds / costs.whole_s
        took = f"{in_s(call.seconds)} of the fit's {in_s(costs.whole_s)}"
        saves = saving_of_fit(call.seconds, costs.whole_s, costs.steps, at_most=at_most)
    explained = Explanation(
        f"{took} go to {call.place}: {mistake.wrong}",
        {
            "mistake": mistake.name,
            "where": call.place,
            "seconds": round(call.seconds, 3),
            "parts": ", ".join(each.made.part for each in call.spent),
        },
        mistake.instead,
        mistake.fix,
    )
    samples = sum(line.samples for line in {each.made.line for each in call.spent} if line is not None)
    error = min(_Z / max(samples, 1) ** 0.5, 1.0)  # of a count
    return as_finding(
        SLOW_CALL,
        explained,
        share_pct=share_pct,
        saves=saves,
        run=run,
        of="step" if call.in_steps else "run",
        between_pct=(share_pct * (1 - error), min(share_pct * (1 + error), 100.0)) if samples else None,
    )
