"""The cause that a call of the user's is: one of the catalogue's, with what the whole fit spends in it."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from lightning_forge_profiling.diagnosis.catalogue import CATALOGUE, Mistake
from lightning_forge_profiling.diagnosis.ledger_costs import LedgerCosts
from lightning_forge_profiling.diagnosis.rule import (
    MIN_SHARE_PCT,
    Explanation,
    as_finding,
    in_ms,
    in_s,
    saving,
    saving_of_fit,
)
from lightning_forge_profiling.names import BEFORE_FIT, REGIONS
from lightning_forge_profiling.schema import WORKER_LINES, Finding, RunEvidence, SampledLine

SLOW_CALL: Final = "slow-call"

_MOSTLY: Final = 0.5  # from this share of a finding's time on, a call in it is its cause
_Z: Final = 1.96  # of a 95 % interval


@dataclass(frozen=True, slots=True)
class _Spent:
    """What the fit spends in a line within one part of it."""

    part: str
    line: SampledLine
    seconds: float
    whole_s: float  # of the part

    @property
    def in_steps(self) -> bool:
        """Whether the part is one of each step."""
        return self.part in {*REGIONS, WORKER_LINES}


@dataclass(frozen=True, slots=True)
class _Call:
    """A mistake with all that it costs, wherever it is made."""

    mistake: Mistake
    spent: tuple[_Spent, ...]  # the longest first

    @property
    def seconds(self) -> float:
        """Of the whole fit."""
        return sum(each.seconds for each in self.spent)

    @property
    def samples(self) -> int:
        """How often it was seen."""
        return sum(each.line.samples for each in self.spent)

    @property
    def in_steps(self) -> bool:
        """Whether all of it is in the steps."""
        return all(each.in_steps for each in self.spent)

    @property
    def place(self) -> str:
        """The call and its line, as `self.auc.compute() at model.py:41`."""
        line = self.spent[0].line
        if not line.file:
            return line.function.rpartition(".")[2]
        return f"{line.call or line.function} at {line.file}:{line.line}"


def call_findings(run: RunEvidence) -> tuple[Finding, ...]:
    """The calls of the catalogue in which the fit spends at least `MIN_SHARE_PCT` of its time."""
    whole_s = _fit_s(run)
    if whole_s <= 0:
        return ()
    found = (_finding(call, run, whole_s) for call in _calls(run) if 100 * call.seconds >= MIN_SHARE_PCT * whole_s)
    return tuple(found)


def explained_by_calls(findings: Iterable[Finding], calls: Iterable[Finding]) -> list[Finding]:
    """The findings without those of parts of the fit whose time is mostly in a call that is named."""
    parts = {part for call in calls for part in str(call.evidence.get("explains", "")).split(", ")}
    return [finding for finding in findings if _part_of(finding) not in parts]


def _part_of(finding: Finding) -> str:
    return "data" if finding.code == "input-bound" else str(finding.evidence.get("part") or finding.code)


def _fit_s(run: RunEvidence) -> float:
    """Seconds of the fit, or of its steps where there is no ledger."""
    if run.ledger is not None:
        return run.ledger.fit_s
    return run.timing.step_ms.mean * LedgerCosts(run).steps / 1e3


def _part_s(run: RunEvidence, part: str) -> float:
    """Seconds that the fit spends in a part: on a GPU, in steps, no more than the GPU waits."""
    timing, name = run.timing, "data" if part == WORKER_LINES else part
    region = timing.regions.get(name)
    if region is None:
        return 0.0 if run.ledger is None or part in BEFORE_FIT else run.ledger.parts.get(part, 0.0)
    ms = min(region.host_ms, timing.step_ms.mean) if part != WORKER_LINES else region.device_ms
    if timing.on_device and timing.gpu_starved_pct is not None:
        ms = min(ms, timing.step_ms.mean * timing.gpu_starved_pct / 100)
    return ms * LedgerCosts(run).steps / 1e3


def _calls(run: RunEvidence) -> list[_Call]:
    """Each mistake of the catalogue that is made."""
    spent: defaultdict[str, list[_Spent]] = defaultdict(list)
    mistakes = {mistake.name: mistake for mistake in CATALOGUE}
    for part, lines in run.lines.items():
        part_s = _part_s(run, part)
        for line in lines:
            mistake = next((each for each in CATALOGUE if each.is_in(part, line, run)), None)
            if mistake is not None and part_s:
                spent[mistake.name].append(_Spent(part, line, part_s * line.pct / 100, part_s))
    return [
        _Call(mistakes[name], tuple(sorted(each, key=lambda one: -one.seconds)))
        for name, each in spent.items()
    ]


def _finding(call: _Call, run: RunEvidence, whole_s: float) -> Finding:
    mistake, steps = call.mistake, LedgerCosts(run).steps
    at_most = bool(mistake.left) or run.timing.on_device
    seconds = min(call.seconds, whole_s)
    share_pct = 100 * seconds / whole_s
    if call.in_steps:
        ms, step_ms = 1e3 * seconds / steps, run.timing.step_ms.mean
        share_pct = 100 * ms / step_ms
        took = f"{in_ms(ms)} of each {in_ms(step_ms)} step"
        saves = saving(ms, step_ms, at_most=at_most)
    else:
        took = f"{in_s(seconds)} of the fit's {in_s(whole_s)}"
        saves = saving_of_fit(seconds, whole_s, steps, at_most=at_most)
    explains = [each.part for each in call.spent if each.seconds > _MOSTLY * each.whole_s]
    explained = Explanation(
        f"{took} go to {call.place}: {mistake.wrong}",
        {
            "mistake": mistake.name,
            "where": call.place,
            "seconds": round(seconds, 3),
            "parts": ", ".join(each.part for each in call.spent),
            "explains": ", ".join("data" if part == WORKER_LINES else part for part in explains),
        },
        mistake.instead,
        mistake.fix,
    )
    error = min(_Z / max(call.samples, 1) ** 0.5, 1.0)  # of a count
    return as_finding(
        SLOW_CALL,
        explained,
        share_pct=share_pct,
        saves=saves,
        run=run,
        of="step" if call.in_steps else "run",
        between_pct=(share_pct * (1 - error), min(share_pct * (1 + error), 100.0)),
    )
