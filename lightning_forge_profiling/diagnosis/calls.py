"""The cause that a call or a setting of the user's is: one of the catalogue's, with what the whole fit spends on it."""

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from lightning_forge_profiling.diagnosis.catalogue import Made, Mistake, mistakes_in, reads
from lightning_forge_profiling.diagnosis.ledger_costs import LedgerCosts
from lightning_forge_profiling.diagnosis.rule import (
    MIN_SHARE_PCT,
    REGION_OF,
    Explanation,
    Interval,
    RunTimes,
    as_finding,
    expected,
    in_ms,
    in_s,
    saving,
    saving_of_fit,
    subtract,
)
from lightning_forge_profiling.names import BEFORE_FIT, GC_FULL, VALIDATION_DATA, hook_region
from lightning_forge_profiling.schema import (
    VALIDATION_WORKER_LINES,
    WORKER_LINES,
    Finding,
    Operator,
    RunEvidence,
    RunLedger,
    SampledLine,
    Saving,
)

SLOW_CALL: Final = "slow-call"

# where training waits for the lines of a worker
_WAITS_FOR: Final = {WORKER_LINES: "data", VALIDATION_WORKER_LINES: VALIDATION_DATA}

_NEARLY: Final = 0.9  # of the waits for values: what other lines read is then no cause of its own

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
    explains: str = ""  # the code of a finding, in a trace or of the fit, that goes with it
    explains_ms: float = 0.0  # of each step: what that finding saves besides

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


def find_calls(
    run: RunEvidence, recorded: Sequence[Operator] = (), idle_ms: float = 0.0, *, synced: bool = False
) -> tuple[Call, ...]:
    """The mistakes of the catalogue on which the fit spends at least `MIN_SHARE_PCT` of its time.

    Args:
        run: the run.
        recorded: operators of some of its steps, if a trace has them.
        idle_ms: what the GPU idles in a live step, by a trace; 0 without one.
        synced: whether that trace shows waits for values of the GPU which cost time.
    """
    made_by_name: defaultdict[str, list[Made]] = defaultdict(list)
    for made in _loops_as_one(mistakes_in(run, recorded)):
        made_by_name[made.mistake.name].append(made)
    syncs = {made.line for each in made_by_name.values() for made in each if synced and made.mistake.syncs}
    of_reads = _reads_ms(run, syncs)
    waits = _shared(idle_ms, of_reads) if RunTimes.of(run).host_is_ahead else {}
    calls = [_call(run, each, of_reads, waits) for each in made_by_name.values()]
    return tuple(call for call in calls if 100 * call.seconds >= MIN_SHARE_PCT * LedgerCosts(run).whole_s > 0)


def _call(
    run: RunEvidence,
    each: Sequence[Made],
    of_reads: Mapping[SampledLine | None, float],
    waits: Mapping[SampledLine | None, float],
) -> Call:
    """A mistake with what the fit spends on it, and with the GPU's waits for values if nearly all are for its lines."""
    lines, whole = {made.line for made in each}, sum(of_reads.values())
    has_reads = sum(of_reads.get(line, 0.0) for line in lines) >= _NEARLY * whole > 0
    spent = []
    for made in each:
        seconds, in_steps = _part_s(run, made)
        seconds *= made.share
        if has_reads and made.line in waits:
            seconds = max(seconds, waits[made.line] * LedgerCosts(run).steps / 1e3)
        spent.append(_Spent(made, seconds, in_steps))
    longest_first = tuple(sorted(spent, key=lambda one: -one.seconds))
    mistake = longest_first[0].made.mistake
    return Call(mistake, longest_first, "sync-bound" if has_reads else mistake.explains)


def _loops_as_one(made: Iterable[Made]) -> Iterator[Made]:
    """The mistakes; those that one change of a loop takes away are one, the longest, which has as much of backward."""
    of_loops: defaultdict[tuple[str, str, str], list[Made]] = defaultdict(list)
    for each in made:
        if each.mistake.in_loop and each.line is not None:
            of_loops[each.mistake.instead, each.line.file, each.line.function].append(each)
        else:
            yield each
    for lines in of_loops.values():
        mistake = max(lines, key=lambda one: one.share).mistake
        yield from (one._replace(mistake=mistake) for one in lines)


def _reads_ms(run: RunEvidence, syncs: Collection[SampledLine | None]) -> dict[SampledLine | None, float]:
    """By line that reads values of the GPU, of these or by itself, how long the host is in it in a step."""
    regions = run.timing.regions
    return {
        line: regions[part].host_ms * line.pct / 100
        for part in regions.keys() & run.lines.keys()
        for line in run.lines[part]
        if line in syncs or reads(line)
    }


def _shared(idle_ms: float, of_reads: Mapping[SampledLine | None, float]) -> dict[SampledLine | None, float]:
    """How long the GPU waits for each line that reads its values, of a step in which it does for nothing else.

    A host that is ahead at the batch ends would be so within the step: there it waits for a value, and the GPU then for
    all that it does until it is ahead again.
    """
    whole = sum(of_reads.values())
    return {line: idle_ms * ms / whole for line, ms in of_reads.items()} if idle_ms and whole else {}


def _part_s(run: RunEvidence, made: Made) -> tuple[float, bool]:
    """Seconds that the fit spends in a part, and whether it is one of the steps: there on a GPU what the GPU waits."""
    timing, costs, part = run.timing, LedgerCosts(run), _WAITS_FOR.get(made.part, made.part)
    if part == GC_FULL:  # of hooks in steps
        return costs.seconds(part), True
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
    for call, each in ((one, spent) for one in calls for spent in one.spent):
        named.add(each.made.line)
        part = _WAITS_FOR.get(each.made.part, each.made.part)
        shares[each.made.part] += each.made.share
        region = hook_region(part) or part
        if part == GC_FULL:  # in the region of the hook that asks for it
            region = next(filter(None, (hook_region(other.made.part) for other in call.spent)), region)
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


def with_explained(calls: Iterable[Call], findings: Iterable[Finding], run: RunEvidence) -> tuple[Call, ...]:
    """The calls with what the trace's findings that go with them save besides."""
    saves_ms = {finding.code: finding.saves.ms_per_step for finding in findings if finding.saves}
    return tuple(
        dataclasses.replace(call, explains_ms=_besides_ms(call, saves_ms.get(call.explains, 0.0), run))
        for call in calls
    )


def _besides_ms(call: Call, saves_ms: float, run: RunEvidence) -> float:
    if not call.in_steps:
        return 0.0
    # the GPU waits for what a call reads itself while the host is in it
    inside_ms = 0.0 if call.explains == call.mistake.explains else 1e3 * call.seconds / LedgerCosts(run).steps
    return max(saves_ms - inside_ms, 0.0)


def call_findings(run: RunEvidence, calls: Iterable[Call]) -> list[Finding]:
    """The finding that each of these calls is."""
    return [_finding(call, run) for call in calls]


def beside_calls(findings: Iterable[Finding], calls: Sequence[Call], run: RunEvidence) -> tuple[Finding, ...]:
    """The findings on a region with what of it these calls take, which have findings of their own."""
    return tuple(_beside(finding, calls, run) for finding in findings)


def _beside(finding: Finding, calls: Sequence[Call], run: RunEvidence) -> Finding:
    region, step_ms = REGION_OF.get(finding.code), run.timing.step_ms.mean
    for call in calls:
        spent = (each for each in call.spent if region == _WAITS_FOR.get(each.made.part, each.made.part))
        ms = 1e3 * sum(each.seconds for each in spent) / LedgerCosts(run).steps
        if 100 * ms >= MIN_SHARE_PCT * step_ms:
            finding = replace(finding, title=f"{finding.title}; beside {in_ms(ms)} in {call.place}")
    return finding


def _finding(call: Call, run: RunEvidence) -> Finding:
    costs, mistake = LedgerCosts(run), call.mistake
    at_most = bool(mistake.left) or (run.timing.on_device and mistake.setting is None)
    samples = sum(line.samples for line in {each.made.line for each in call.spent} if line is not None)
    error = min(_Z / max(samples, 1) ** 0.5, 1.0)  # of a count

    def known(share_pct: float) -> Interval | None:
        return (share_pct * (1 - error), min(share_pct * (1 + error), 100.0)) if samples else None

    saves: Saving | None
    if call.in_steps:
        step_ms = run.timing.step_ms.mean
        ms = min(1e3 * call.seconds / costs.steps + call.explains_ms, step_ms)
        share_pct, took = 100 * ms / step_ms, f"{in_ms(ms)} of each {in_ms(step_ms)} step"
        if at_most:
            saves = saving(ms, step_ms, at_most=True, left=mistake.left, between_pct=known(share_pct))
        else:
            saves = expected(ms, step_ms, SLOW_CALL, known(share_pct))
    else:
        seconds = min(call.seconds, costs.whole_s)
        share_pct = 100 * seconds / costs.whole_s
        took = f"{in_s(seconds)} of the fit's {in_s(costs.whole_s)}"
        saves = saving_of_fit(
            seconds, costs.whole_s, costs.steps, at_most=at_most, left=mistake.left, between_pct=known(share_pct)
        )
    explained = Explanation(
        f"{took} go to {call.place}: {mistake.wrong}",
        {
            "mistake": mistake.name,
            "where": call.place,
            "seconds": round(call.seconds, 3),
            "parts": ", ".join(dict.fromkeys(each.made.part for each in call.spent)),
        },
        mistake.instead,
        mistake.fix,
    )
    return as_finding(
        SLOW_CALL,
        explained,
        share_pct=share_pct,
        saves=saves if mistake.predicted else None,
        run=run,
        of="step" if call.in_steps else "run",
        between_pct=known(share_pct),
    )
