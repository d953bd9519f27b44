"""Where in the user's code a finding's time is spent, by samples of the training thread or by recorded stacks."""

from collections import defaultdict
from collections.abc import Iterable
from types import MappingProxyType
from typing import Final

from msgspec.structs import replace

from lightning_forge_profiling.diagnosis.rule import COMPUTE, REGION_OF, WAITS, in_ms, region
from lightning_forge_profiling.schema import WORKER_LINES, Finding, RankSummary, RunEvidence, SampledLine, SpentIn

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
    part = finding.evidence.get("part")
    if isinstance(part, str):
        weights = {part: 1.0}
    else:
        weights = {name: region(run, name).host_ms for name in _REGIONS.get(finding.code, ())}
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
