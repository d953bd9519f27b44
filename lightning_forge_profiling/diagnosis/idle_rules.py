"""Rules for idle time of the GPU that no other rule explains: slow launches, and the largest part of what is left."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from lightning_forge_profiling.analysis.kernel_names import base_name
from lightning_forge_profiling.diagnosis.rule import (
    NAMED_FROM_PCT,
    Evidence,
    Explanation,
    Rule,
    in_ms,
    unpredicted,
)
from lightning_forge_profiling.diagnosis.rule_context import RECORD_STACKS, RuleContext
from lightning_forge_profiling.results.rank import IdlePart

_EXPLAINED_BY: Final = MappingProxyType(
    {
        "data": {"input-bound"},
        "launch": {"slow-launches"},
        "allocator": {"allocator-churn"},
        "sync": {"sync-bound"},
        "copy": {"transfer-bound"},
        "python": {"launch-bound", "slow-optimizer", "sync-bound", "allocator-churn"},
        "gpu": set(),
    }
)
"""By idle cause the findings of which it is a part."""


def _launch_cost(context: RuleContext) -> float:
    return context.rank.idle["launch"].ms_per_step if "launch" in context.rank.idle else 0.0


def _slow_launches(context: RuleContext) -> Explanation:
    parts = [part for part in context.rank.idle_parts if _cause(part) == "launch"]
    waits = context.rank.idle["launch"].ms_per_step
    where = f", {in_ms(min(parts[0].ms_per_step, waits))} of it in {_activity(parts[0])}" if parts else ""
    title = f"the GPU waits {context.of_step(waits)} inside launch calls of 0.1 ms or more{where}"
    evidence: Evidence = {"idle_in_launches_ms_per_step": waits, **(_evidence(parts[0]) if parts else {})}
    advice = (
        "The first launch of a kernel loads its module: record later steps (a larger start_step), or load all modules "
        "at the start (CUDA_MODULE_LOADING=EAGER, on AMD HIP_ENABLE_DEFERRED_LOADING=0). If later steps show it too, "
        "new kernels keep being loaded: keep shapes constant, look for recompilations (TORCH_LOGS=recompiles)."
    )
    return Explanation(title, evidence, advice)


SLOW_LAUNCHES: Final = Rule("slow-launches", _launch_cost, _slow_launches)


def largest_idle(rules: Sequence[Rule[RuleContext]]) -> Rule[RuleContext]:
    """The rule for the largest part of the idle time, where none of the others explains it."""

    def cost(context: RuleContext) -> float:
        cause = _largest(context)
        explaining = _EXPLAINED_BY.get(cause, set())
        named = any(rule.code in explaining and context.pct(rule.cost(context)) >= NAMED_FROM_PCT for rule in rules)
        return 0.0 if named or not cause else context.rank.idle[cause].ms_per_step

    return Rule("gpu-idle", cost, _unexplained, unpredicted)


def _largest(context: RuleContext) -> str:
    return max(context.rank.idle, key=lambda cause: context.rank.idle[cause].ms_per_step, default="")


def _unexplained(context: RuleContext) -> Explanation:
    cause = _largest(context)
    launched = cause == "gpu"
    idle = context.rank.idle[cause].ms_per_step
    parts = [part for part in context.rank.idle_parts if part.launched == launched]
    title = f"the GPU idles {context.of_step(idle)}"
    title += " although its next work has been launched" if launched else " and waits for the host"
    evidence: Evidence = {"idle_ms_per_step": idle}
    if parts:
        part = parts[0]
        title += f", mostly before {_short(part.following)}" if launched and part.following else ""
        if part.activity or not launched:
            title += f"; for {in_ms(min(part.ms_per_step, idle))} of it the host is in {_activity(part)}"
        evidence |= _evidence(part)
    if launched:
        advice = (
            "The GPU waits for something on its own side: another stream's event, a dependency inside a CUDA graph, "
            "another process on this GPU. The timeline shows what runs on the other streams just before the gap ends."
        )
    else:
        shows = "The Python functions in the report show" if context.has_stacks else f"{RECORD_STACKS} shows"
        advice = f"No fix is known. {shows} what the host is in."
    return Explanation(title, evidence, advice)


def _cause(part: IdlePart) -> str:
    return "launch" if not part.launched and "Launch" in part.activity else ""


def _activity(part: IdlePart) -> str:
    """What the host was in, in words."""
    if not part.activity:
        return f"Python outside of all operators (thread {part.thread})" if part.thread else "no recorded activity"
    around = f" of {part.operator}" if part.operator else ""
    return f"{part.activity}{around} (thread {part.thread})"


def _short(kernel: str) -> str:
    return base_name(kernel).rpartition("::")[2]


def _evidence(part: IdlePart) -> Evidence:
    return {
        "longest_ms_per_step": part.ms_per_step,
        "activity": part.activity,
        "operator": part.operator,
        "thread": part.thread,
        "before": _short(part.following),
    }
