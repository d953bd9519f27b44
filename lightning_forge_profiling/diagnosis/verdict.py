"""The order of findings, their place in the user's code, and the verdict: the first of them that is certain."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from msgspec.structs import replace

from lightning_forge_profiling.diagnosis.calls import SLOW_CALL
from lightning_forge_profiling.diagnosis.catalogue import place_of, reads
from lightning_forge_profiling.diagnosis.ledger_costs import LedgerCosts, in_steps_pct, lines_in
from lightning_forge_profiling.diagnosis.optimizer import FASTER, NONE_KNOWN
from lightning_forge_profiling.diagnosis.rule import (
    COMPUTE,
    MIN_SHARE_PCT,
    NAMED_FROM,
    REGION_OF,
    WAITS,
    RunTimes,
    in_ms,
)
from lightning_forge_profiling.names import REGIONS, VALIDATION_DATA, hook_region
from lightning_forge_profiling.schema import (
    NO_VERDICT,
    NOTHING_STANDS_OUT,
    VALIDATION_WORKER_LINES,
    WORKER_LINES,
    Finding,
    ModuleTime,
    RankSummary,
    RunEvidence,
    SampledLine,
    SpentIn,
)

# the work itself: it has to be done, and is made cheaper at best. So it comes after what the user can remove, however
# much of the step it takes. `gpu-idle` has no known fix.
WORK: Final = frozenset({"launch-bound", "compute-bound", "memory-bandwidth-bound", "python-bound", "gpu-idle"})

# what can be removed comes before the work only if its fix may save `MIN_SHARE_PCT`: less does not show in the next
# run. In a step it takes more where no trace shows what the GPU waits for: of the time of a region some has to stay
# (loading is 6 to 10 % of a healthy step of a millisecond on a CPU), and what looks like work may be a larger cause
# (`.item()` in each layer on an H200: transfer 8 %, launch-bound 52 %).
_REGION_FROM_PCT: Final = 10.0

_MOST_NEEDED: Final = 20.0  # a longer run is asked for only if so many times the steps would do

# -- the order -------------------------------------------------------------------------------------------------------


def loses_pct(finding: Finding, run: RunEvidence | None = None) -> float:
    """What the wall time of the fit, or of a trace's steps, would lose without a finding's cause; 0 if not measured."""
    if finding.of == "memory":
        return 0.0
    in_run = in_steps_pct(run) / 100 if run is not None and finding.of == "step" else 1.0
    if finding.saves is None:
        return finding.share_pct * in_run
    # on a GPU a share is what the GPU waits, which bounds a bound
    return in_run * (min(finding.saves.pct, finding.share_pct) if finding.saves.at_most else finding.saves.pct)


def in_order(findings: Iterable[Finding], run: RunEvidence | None = None, *, gpu: bool = True) -> tuple[Finding, ...]:
    """The findings: what is certain, of that what can be removed, of that what the fit would lose most of."""

    def key(finding: Finding) -> tuple[bool, bool, float]:
        return not is_certain(finding), not _comes_first(finding, gpu=gpu), -loses_pct(finding, run)

    return tuple(sorted(findings, key=key))


def is_removable(finding: Finding) -> bool:
    """Whether work is no other than a call that the user can remove: the time of Python in one function of his."""
    return finding.code == "python-bound" and "where" in finding.evidence


def _comes_first(finding: Finding, *, gpu: bool) -> bool:
    """Whether a finding is of a cause that can be removed, and large enough to come before the work itself."""
    if finding.code in WORK or finding.evidence.get(FASTER) == NONE_KNOWN:
        return is_removable(finding)
    is_measured = finding.of == "run" or finding.code == SLOW_CALL or (gpu and finding.source == "trace")
    may_save_pct = max(finding.saves.pct, finding.saves.high_pct or 0.0) if finding.saves else finding.share_pct
    least_pct = MIN_SHARE_PCT if is_measured else _REGION_FROM_PCT
    is_known = finding.share_pct > 0  # 0 for a setting whose cost nothing measures: after all that is measured
    return finding.of != "memory" and (not is_known or min(may_save_pct, finding.share_pct) >= least_pct)


# -- the intervals of shares -----------------------------------------------------------------------------------------


def is_certain(finding: Finding) -> bool:
    """Whether a finding's interval lies above the share from which it is named, so that it may be the verdict."""
    return finding.low_pct is None or finding.low_pct >= _threshold_pct(finding)


def _threshold_pct(finding: Finding) -> float:
    return NAMED_FROM.get((finding.code, finding.source), MIN_SHARE_PCT)


def with_intervals(findings: Iterable[Finding], run: RunEvidence) -> list[Finding]:
    """The findings with the intervals of their shares, as far as the run's own steps give them."""
    # a share follows from the times of regions or of a part of the ledger: its interval is as wide, in proportion, as
    # theirs together.
    return [finding if finding.low_pct is not None else _with_interval(finding, run) for finding in findings]


def _with_interval(finding: Finding, run: RunEvidence) -> Finding:
    known = [run.timing.intervals[name] for name in measured_by(finding) if name in run.timing.intervals]
    pct = sum(interval.pct for interval in known)
    if pct <= 0:
        return finding
    scale = finding.share_pct / pct
    return replace(
        finding,
        low_pct=scale * sum(interval.low_pct for interval in known),
        high_pct=min(scale * sum(interval.high_pct for interval in known), 100.0),
    )


def measured_by(finding: Finding) -> tuple[str, ...]:
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
    """The verdict on ordered findings: the first whose interval lies above its threshold."""
    if not findings and not gpu:
        return NOTHING_STANDS_OUT, (
            "Nothing stands out: training does not wait for the data loader. A recorded window (ForgeProfilerCallback) "
            "shows which operators take the rest of the step."
        )
    if not findings:
        return NOTHING_STANDS_OUT, "Nothing stands out: no single cause costs enough of the step to be worth naming."
    if not is_certain(findings[0]):
        return _uncertain(max(findings, key=lambda finding: finding.share_pct), steps)
    return findings[0].code, f"{findings[0].code}: {findings[0].title}. {findings[0].remedy}"


def _uncertain(finding: Finding, steps: int) -> tuple[str, str]:
    """What is said where no finding is certain: how many steps would be needed, if that is the reason."""
    low, high, least = finding.low_pct or 0.0, finding.high_pct or 100.0, _threshold_pct(finding)
    share = f"{finding.share_pct:.0f} % of {finding.whole} ({low:.0f} to {high:.0f} %)"
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

_OPERATORS: Final = ("torch.", "lightning.", "pytorch_lightning.")
_AT_MOST: Final = 1.25
_INNER: Final = re.compile(r"\.<locals>\.<\w+>")  # a comprehension is part of its function
_THAT_FUNCTION: Final = "Make that function cheaper, or call it once, ahead of time, or in the loader's workers."
# of which the line is a better description
_CHEAPER: Final = re.compile(r"^Make a sample cheaper \([^)]*\)\. ")
_OR_CHEAPER: Final = re.compile(r"Or make a sample cheaper \([^)]*\)\.")
_THAT_LINE: Final = "Make that line cheaper, or do what it does once, ahead of time."

_REGIONS: Final[dict[str, tuple[str, ...]]] = {
    **{code: (name,) for code, name in REGION_OF.items()},
    **dict.fromkeys(
        ("python-bound", "launch-bound", "sync-bound", "compute-bound"),
        ("transfer", "forward", "backward", "optimizer", "other"),
    ),
}


# a GPU that waits for the host does so for a host that waits, too, which fewer launches do not change
_HELD_UP: Final = ("launch-bound", "slow-optimizer")


def with_lines(findings: Iterable[Finding], run: RunEvidence) -> list[Finding]:
    """The findings with the line that most of their time is in, if there is one and none is named yet."""
    read = _longest_read(run)
    return [
        finding
        if finding.evidence.keys() & {"where", "line"}
        else _at_line(finding, f"one such call is {place_of(read)}", _name(read), read.pct)
        if read is not None and finding.code == "sync-bound"
        else _in_python(finding, run)
        if finding.code == "python-bound"
        else _with_line(finding, run)
        for finding in findings
    ]


def _in_python(finding: Finding, run: RunEvidence) -> Finding:
    """Python between operators, with the function of the user's that most of it is in, as far as that calls no module.

    A line that calls Python code of torch or Lightning is left out: what it takes is operators, and Python that is not
    the user's.
    """
    step_ms = run.timing.step_ms.mean
    took_ms, spent_ms = finding.share_pct * step_ms / 100, defaultdict[tuple[str, str], float](float)
    lines: dict[tuple[str, str], SampledLine] = {}
    for name in _REGIONS["python-bound"]:
        part_ms = RunTimes.of(run).region(name).host_ms
        for line in lines_in(run, name):
            if line.file and not line.callee.startswith(_OPERATORS):
                where = line.file, _INNER.split(line.function)[0]
                spent_ms[where] += part_ms * line.pct / 100
                lines.setdefault(where, line)
    where = max(spent_ms, key=spent_ms.__getitem__, default=("", ""))
    pct = min(100 * spent_ms[where] / took_ms, 100.0) if took_ms > 0 else 0.0
    # lines that take more than all Python does are operators, too, as of `x @ w`, which calls no function
    if pct < LEAST_PCT or sum(spent_ms.values()) > _AT_MOST * took_ms:
        return finding
    if pct > _MOST_PCT:
        finding = replace(finding, advice=_THAT_FUNCTION)
    line = lines[where]
    words = f"{in_ms(pct * took_ms / 100)} of it in {where[1]} at {line.file}:{line.line}"
    return _at_line(finding, words, _name(line), pct)


def _with_line(finding: Finding, run: RunEvidence) -> Finding:
    part, mostly = finding.evidence.get("part"), finding.evidence.get("mostly")
    workers = VALIDATION_WORKER_LINES if mostly == VALIDATION_DATA else WORKER_LINES
    if (finding.code == "input-bound" or mostly == VALIDATION_DATA) and workers in run.lines:
        line = run.lines[workers][0]
        words = f"a worker spends {line.pct:.0f} % of its time on batches in {place_of(line)}"
        return _at_line(finding, words, _name(line), line.pct)
    times, waits_for_host = RunTimes.of(run), finding.evidence.get("waits_for") == "host"
    if isinstance(mostly, str):
        weights = {mostly: 1.0}
    elif isinstance(part, str):
        weights = {part: 1.0}
    else:
        code = "launch-bound" if waits_for_host else finding.code
        weights = {name: times.region(name).host_ms for name in _REGIONS.get(code, ())}
    spent: defaultdict[str, float] = defaultdict(float)
    waiting: defaultdict[str, float] = defaultdict(float)
    places: dict[str, str] = {}
    for name, weight in weights.items():
        for line in filter(lambda line: line.file, lines_in(run, name)):
            spent[_name(line)] += weight * line.pct
            places.setdefault(_name(line), place_of(line))
            waiting[_name(line)] += weight * line.pct * (line.waiting_pct or 0.0) / 100
    where, whole = max(spent, key=spent.__getitem__, default=""), sum(weights.values())
    pct = spent[where] / whole if whole > 0 else 0.0
    if pct < LEAST_PCT:
        return _in_forward(finding, run, weights)
    took_ms = finding.share_pct * run.timing.step_ms.mean / 100
    share = f"{pct:.0f} % of it" if finding.of == "run" else f"{in_ms(pct * took_ms / 100)} of it"
    waits = " (waiting, not computing)" if 100 * waiting[where] > _WAITING_PCT * spent[where] else ""
    if finding.code == "input-bound" and pct > _MOST_PCT:
        finding = _with_advice_on(where, finding, run)
    if waits and pct > _MOST_PCT and finding.code in _HELD_UP and run.timing.on_device and run.ranks.world_size == 1:
        finding = replace(finding, advice=WAITS, fix="")
    if waits_for_host:
        finding = replace(finding, advice=WAITS if waits else _THAT_LINE)
    return _at_line(finding, f"{share} in {places[where]}{waits}", where, pct)


def _in_forward(finding: Finding, run: RunEvidence, weights: Mapping[str, float]) -> Finding:
    """The model's work on a CPU with the line of most of forward: what backward does for it has no line."""
    line = next((line for line in lines_in(run, "forward") if line.file and line.pct >= _MOST_PCT), None)
    if line is None or finding.code != "compute-bound" or run.timing.on_device:
        return finding
    pct = line.pct * weights["forward"] / max(sum(weights.values()), 1e-9)
    return _at_line(finding, f"{line.pct:.0f} % of forward in {place_of(line)}", _name(line), pct)


def _longest_read(run: RunEvidence) -> SampledLine | None:
    """The line of a step that takes longest of those which wait for a value of the GPU."""
    regions, costs = run.timing.regions, LedgerCosts(run)
    ms = {part: regions[part].host_ms if part in regions else costs.per_step_ms(part) for part in run.lines}
    in_steps = [(ms[part], lines) for part, lines in run.lines.items() if part in regions or hook_region(part)]
    waits = [(part_ms * line.pct, line) for part_ms, lines in in_steps for line in lines if line.file and reads(line)]
    return max(waits, key=lambda each: each[0], default=(0.0, None))[1]


def _with_advice_on(where: str, finding: Finding, run: RunEvidence) -> Finding:
    """A wait for the loader with what to do about the line that most of it is in."""
    if _is_sampler(where, run):
        return replace(finding, advice=_SAMPLER, fix="")
    if finding.fix:
        return finding
    if run.settings.loader is not None and run.settings.loader.unsplit:
        return replace(finding, advice=_OR_CHEAPER.sub(f"Or m{_THAT_LINE[1:]}", finding.advice))
    return replace(finding, advice=f"{_THAT_LINE} {_CHEAPER.sub('', finding.advice)}")


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
        "gpu-idle": "waiting",
        **{f"blocked-{name}": name for name in COMPUTE},
    }
)


def in_function(rank: RankSummary, code: str) -> SpentIn | None:
    """The user's function that holds most of a finding's time; None if it is unknown, as without stacks."""
    return None if rank.python is None else rank.python.spent.get(_SPENT.get(code, ""))


_MOST_OF_IT: Final = 2 / 3


def longest_module(modules: Sequence[ModuleTime]) -> ModuleTime | None:
    """The innermost module that takes two thirds of what the one around it takes; None without modules."""
    within = [f"{each.name}." for each in modules]
    of_pct = sum(each.pct for each in modules if not each.name.startswith(tuple(within)))
    longest = None
    for each in modules:  # each before those in it, the longest first
        if each.pct >= _MOST_OF_IT * of_pct and (longest is None or each.name.startswith(f"{longest.name}.")):
            longest, of_pct = each, each.pct
    return longest


def located(finding: Finding, rank: RankSummary) -> Finding:
    """The finding with the module, or the user's function, that holds most of its time where the trace shows it."""
    if "module" in finding.evidence:
        return finding
    if finding.code == "compute-bound" and (module := longest_module(rank.modules)) is not None:
        kind = f" ({module.kind})" if module.kind else ""
        return replace(
            finding,
            title=f"{finding.title}; {module.pct:.0f} % of the recorded step goes to {module.name}{kind}",
            evidence={**finding.evidence, "module": module.name, "module_pct": round(module.pct, 1)},
        )
    held = in_function(rank, finding.code)
    if held is None or {"where", "line"} & finding.evidence.keys():
        return finding
    ms, of = in_ms(held.ms_per_step), in_ms(held.of_ms_per_step)
    return replace(
        finding,
        title=f"{finding.title}; recorded with stacks, {ms} of {of} are in {held.where}",
        evidence={**finding.evidence, "where": held.where, "recorded_there_ms_per_step": held.ms_per_step},
    )
