"""The order of findings, their place in the user's code, and the verdict: the finding whose fix may save most."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Final

from msgspec.structs import replace

from lightning_forge_profiling.diagnosis.machine_rules import MACHINE
from lightning_forge_profiling.diagnosis.rule import (
    COMPUTE,
    MIN_SHARE_PCT,
    NAMED_FROM,
    REGION_OF,
    WAITS,
    RunTimes,
    in_ms,
)
from lightning_forge_profiling.names import REGIONS
from lightning_forge_profiling.schema import (
    NO_VERDICT,
    NOTHING_STANDS_OUT,
    WORKER_LINES,
    Finding,
    RankSummary,
    RunEvidence,
    SampledLine,
    SpentIn,
)

# the part of a finding's share that its fix can be expected to save, where that is less than its bound. A wait can be
# removed. But recording slows the host, so that launching costs less without it: on an H200, steps that Python paces
# took 1.4 to 1.8 times as long while they were recorded. Work has to be done, and can be done somewhat better (a lower
# precision, fused kernels): those two figures are a judgement, not a measurement. All of them only decide which finding
# comes first, and `order_note` says so where it does.
RECOVERABLE: Final = MappingProxyType(
    {"launch-bound": 0.6, "python-bound": 0.6, "compute-bound": 0.15, "memory-bandwidth-bound": 0.2}
)

_MUCH_MORE: Final = 3.0  # a cause that may cost so many times as much leaves one that is certain no verdict
_MOST_NEEDED: Final = 20.0  # a longer run is asked for only if so many times the steps would do

# -- the order -------------------------------------------------------------------------------------------------------


def by_gain(findings: Iterable[Finding], *, in_steps_pct: float = 100.0) -> tuple[Finding, ...]:
    """The findings, the one whose fix can be expected to save most first."""

    def gain(finding: Finding) -> float:
        if finding.of == "memory":
            return 0.0
        in_run = in_steps_pct / 100 if finding.of == "step" else 1.0
        if finding.saves is not None and finding.saves.low_pct is not None:
            return finding.saves.pct * in_run
        return finding.share_pct * RECOVERABLE.get(finding.code, 1.0) * in_run

    return tuple(sorted(findings, key=gain, reverse=True))


def order_note(findings: Sequence[Finding]) -> str:
    """Why a finding is below one that costs less; "" where the shares descend."""
    order = "machine findings first, then " if any(finding.code in MACHINE for finding in findings) else ""
    findings = [
        finding
        for finding in findings
        if is_certain(finding) and finding.code not in MACHINE and finding.of != "memory"
    ]
    shares = [finding.share_pct for finding in findings]
    if len({finding.of for finding in findings}) > 1:
        return f"Order of the findings: {order}by the expected saving of the fit's wall time."
    if shares == sorted(shares, reverse=True):
        return ""
    played = [finding.code for finding in findings if finding.saves is not None and finding.saves.low_pct is not None]
    codes = dict.fromkeys(finding.code for finding in findings if finding.code not in played)
    counted = [f"{100 * RECOVERABLE[code]:.0f} % of {code}'s share" for code in codes if code in RECOVERABLE]
    counted += [f"what {code} was predicted to save" for code in dict.fromkeys(played)]
    shares_used = f"{', '.join(counted)}; the whole share of all others"
    return f"Order of the findings: {order}by the expected saving ({shares_used})."


# -- the intervals of shares -----------------------------------------------------------------------------------------


def is_certain(finding: Finding) -> bool:
    """Whether a finding's interval lies above the share from which it is named, so that it may be the verdict."""
    # so must its typical share: a few slow steps make a region uneven, not slow.
    least = _threshold_pct(finding)
    return all(pct is None or pct >= least for pct in (finding.low_pct, finding.typical_pct))


def _threshold_pct(finding: Finding) -> float:
    return NAMED_FROM.get((finding.code, finding.source), MIN_SHARE_PCT)


def with_intervals(findings: Iterable[Finding], run: RunEvidence) -> list[Finding]:
    """The findings with the intervals of their shares, as far as the run's own steps give them."""
    # a share follows from the times of regions or of a part of the ledger: its interval is as wide, in proportion, as
    # theirs together.
    return [finding if finding.low_pct is not None else _with_interval(finding, run) for finding in findings]


def _with_interval(finding: Finding, run: RunEvidence) -> Finding:
    known = [run.timing.intervals[name] for name in _measured_by(finding) if name in run.timing.intervals]
    pct = sum(interval.pct for interval in known)
    if pct <= 0:
        return finding
    scale, typical_pct = finding.share_pct / pct, None
    if finding.code in REGION_OF and all(interval.typical_pct is not None for interval in known):
        typical_pct = scale * sum(interval.typical_pct or 0.0 for interval in known)
    return replace(
        finding,
        low_pct=scale * sum(interval.low_pct for interval in known),
        high_pct=min(scale * sum(interval.high_pct for interval in known), 100.0),
        typical_pct=typical_pct,
    )


def _measured_by(finding: Finding) -> tuple[str, ...]:
    """The regions, or the part of the ledger, that a finding's share is of; none for one that only a trace shows."""
    part = finding.evidence.get("part")
    if isinstance(part, str):
        return (part,) if finding.of == "step" else ()  # of a whole run it is no sample
    if finding.code == "launch-bound" and finding.source == "run":
        return tuple(name for name in REGIONS if f"{name}_host_ms_per_step" in finding.evidence)
    if finding.code == "compute-bound" and finding.source == "run":
        return COMPUTE
    return (REGION_OF[finding.code],) if finding.code in REGION_OF else ()


# -- the verdict -----------------------------------------------------------------------------------------------------


def decide(findings: Sequence[Finding], *, gpu: bool = True, steps: int = 0) -> tuple[str, str]:
    """The verdict on findings in the order of `by_gain`: the first whose interval lies above its threshold."""
    if not findings and not gpu:
        return NOTHING_STANDS_OUT, (
            "Nothing stands out: training does not wait for the data loader. A recorded window (ForgeProfilerCallback) "
            "shows which operators take the rest of the step."
        )
    if not findings:
        return NOTHING_STANDS_OUT, "Nothing stands out: no single cause costs enough of the step to be worth naming."
    first = next(filter(is_certain, findings), None)
    if first is None:
        return _uncertain(findings[0], steps)
    largest = max((finding for finding in findings if finding.of == first.of), key=lambda finding: finding.share_pct)
    if not is_certain(largest) and largest.share_pct > _MUCH_MORE * first.share_pct:
        verdict, text = _uncertain(largest, steps)
        if verdict == NO_VERDICT:
            return verdict, f"{text} {first.code} takes {first.share_pct:.0f} %."
    return first.code, f"{first.code}: {first.title}. {first.remedy}"


def _uncertain(finding: Finding, steps: int) -> tuple[str, str]:
    """What is said where no finding is certain: how many steps would be needed, if that is the reason."""
    low, high, least = finding.low_pct or 0.0, finding.high_pct or 100.0, _threshold_pct(finding)
    share = f"{finding.share_pct:.0f} % of {finding.whole} ({low:.0f} to {high:.0f} %)"
    if finding.typical_pct is not None and finding.typical_pct < least <= low:
        return NOTHING_STANDS_OUT, (
            f"Nothing stands out: {finding.code} takes {share}, but {finding.typical_pct:.0f} % of typical steps: it "
            "is uneven, not slow."
        )
    beyond = finding.share_pct - least
    needed = steps * ((finding.share_pct - low) / beyond) ** 2 if beyond > 0 else 0.0
    if not steps < needed <= _MOST_NEEDED * steps:
        return NOTHING_STANDS_OUT, (
            f"Nothing stands out: {finding.code}, the largest cause, takes {share}, which is not certain to be above "
            f"the {least:.0f} % from which it is named."
        )
    return NO_VERDICT, (
        f"Not enough steps to tell: {finding.code} takes {share}. {steps} steps counted, about "
        f"{float(f'{needed:.2g}'):.0f} needed."
    )


def no_verdict(cut_off: str) -> str:
    """The text in place of a verdict."""
    return (
        f"No verdict: {cut_off} The figures cover the part before the cut. Record the trace again, or copy it again if "
        "the original is complete."
    )


# -- where in the user's code a finding's time is spent ----------------------------------------------------------------

LEAST_PCT: Final = 25.0  # a line with a smaller share of a finding's time is not what to change first

_WAITING_PCT: Final = 50.0
_MOST_PCT: Final = 50.0
_SAMPLER: Final = (
    "The sampler runs in the training process, whatever num_workers is: make its __iter__ cheaper, as by drawing the "
    "order of an epoch at once."
)

_REGIONS: Final[dict[str, tuple[str, ...]]] = {
    **{code: (name,) for code, name in REGION_OF.items()},
    **dict.fromkeys(
        ("python-bound", "launch-bound", "sync-bound"), ("transfer", "forward", "backward", "optimizer", "other")
    ),
}


# a GPU that waits for the host does so for a host that waits, too, which fewer launches do not change
_HELD_UP: Final = ("launch-bound", "slow-optimizer")


def with_lines(findings: Iterable[Finding], run: RunEvidence) -> list[Finding]:
    """The findings with the line that most of their time is in, if there is one and none is named yet."""
    return [
        finding if finding.evidence.keys() & {"where", "line"} else _with_line(finding, run) for finding in findings
    ]


def _with_line(finding: Finding, run: RunEvidence) -> Finding:
    if finding.code == "input-bound" and WORKER_LINES in run.lines:
        line = run.lines[WORKER_LINES][0]
        words = f"a worker spends {line.pct:.0f} % of its time on batches in {_name(line)}"
        return _at_line(finding, words, _name(line), line.pct)
    part, times = finding.evidence.get("part"), RunTimes.of(run)
    if isinstance(part, str):
        weights = {part: 1.0}
    else:
        weights = {name: times.region(name).host_ms for name in _REGIONS.get(finding.code, ())}
    spent: defaultdict[str, float] = defaultdict(float)
    waiting: defaultdict[str, float] = defaultdict(float)
    for name, weight in weights.items():
        for line in run.lines.get(name, ()):
            spent[_name(line)] += weight * line.pct
            waiting[_name(line)] += weight * line.pct * (line.waiting_pct or 0.0) / 100
    where, whole = max(spent, key=spent.__getitem__, default=""), sum(weights.values())
    pct = spent[where] / whole if whole > 0 else 0.0
    if pct < LEAST_PCT:
        return finding
    took_ms = finding.share_pct * run.timing.step_ms.mean / 100
    share = f"{pct:.0f} % of it" if finding.of == "run" else f"{in_ms(pct * took_ms / 100)} of it"
    waits = " (waiting, not computing)" if 100 * waiting[where] > _WAITING_PCT * spent[where] else ""
    if finding.code == "input-bound" and pct > _MOST_PCT and _is_sampler(where, run):
        finding = replace(finding, advice=_SAMPLER, fix="")
    if waits and pct > _MOST_PCT and finding.code in _HELD_UP and run.timing.on_device and run.ranks.world_size == 1:
        finding = replace(finding, advice=WAITS, fix="")
    return _at_line(finding, f"{share} in {where}{waits}", where, pct)


def _is_sampler(where: str, run: RunEvidence) -> bool:
    return (
        run.settings.loader is not None
        and bool(run.settings.loader.sampler)
        and f" {run.settings.loader.sampler}." in where
    )


def _name(line: SampledLine) -> str:
    return f"{line.file}:{line.line} {line.function}"


def _at_line(finding: Finding, words: str, where: str, pct: float) -> Finding:
    evidence = {**finding.evidence, "line": where, "line_pct": round(pct, 1)}
    return replace(finding, title=f"{finding.title}; {words}", evidence=evidence)


# -- recorded stacks ---------------------------------------------------------------------------------------------------

# by code the kind of its time in `PythonFunctions.spent`
_SPENT: Final = MappingProxyType(
    {
        "python-bound": "python",
        "input-bound": "data",
        "launch-bound": "launching",
        **{f"blocked-{name}": name for name in COMPUTE},
    }
)


def in_function(rank: RankSummary, code: str) -> SpentIn | None:
    """The user's function that holds most of a finding's time; None if it is unknown, as without stacks."""
    return None if rank.python is None else rank.python.spent.get(_SPENT.get(code, ""))


def located(finding: Finding, rank: RankSummary) -> Finding:
    """The finding with the user's function that holds most of its time, if stacks show it and samples do not."""
    held = in_function(rank, finding.code)
    if held is None or {"where", "line"} & finding.evidence.keys():
        return finding
    ms, of = in_ms(held.ms_per_step), in_ms(held.of_ms_per_step)
    return replace(
        finding,
        title=f"{finding.title}; recorded with stacks, {ms} of {of} are in {held.where}",
        evidence={**finding.evidence, "where": held.where, "recorded_there_ms_per_step": held.ms_per_step},
    )
