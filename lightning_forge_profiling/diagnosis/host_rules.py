"""The host holds training up.

On a GPU `launch-bound`, `sync-bound`, `allocator-churn`, `slow-launches` and `gpu-idle`, without one `python-bound` and
`blocked-*`, on either `between-regions`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

from lightning_forge_profiling.analysis.kernels import base_name
from lightning_forge_profiling.diagnosis.optimizer import slow_update_ms, update_is_slow
from lightning_forge_profiling.diagnosis.rule import (
    COMPILE,
    COMPUTE,
    MIN_SHARE_PCT,
    NAMED_FROM,
    WAITS,
    Case,
    Evidence,
    Explanation,
    Rule,
    RuleContext,
    RunTimes,
    in_ms,
    unpredicted,
)
from lightning_forge_profiling.diagnosis.verdict import in_function
from lightning_forge_profiling.kernel_name import loop_name, short
from lightning_forge_profiling.schema import IdlePart

# -- recorded calls that hold the host up ----------------------------------------------------------------------------


def _explain_slow_launches(context: RuleContext) -> Explanation:
    part = next((part for part in context.rank.idle_parts if not part.launched and "Launch" in part.activity), None)
    waits_ms = context.rank.idle["launch"].ms_per_step
    where = f", {in_ms(min(part.ms_per_step, waits_ms))} of it in {_activity(part)}" if part else ""
    return Explanation(
        f"the GPU waits {context.of_step(waits_ms)} inside launch calls of 0.1 ms or more{where}",
        {"idle_in_launches_ms_per_step": waits_ms, **(_evidence(part) if part else {})},
        "The first launch of a kernel loads its module: record later steps (a larger start_step), or load all modules "
        "at the start (CUDA_MODULE_LOADING=EAGER, on AMD HIP_ENABLE_DEFERRED_LOADING=0). If later steps show it too, "
        "new kernels keep being loaded: keep shapes constant, look for recompilations (TORCH_LOGS=recompiles).",
    )


def _sync_ms(context: RuleContext) -> float:
    host = context.rank.host
    return host.idle_after_sync_ms_per_step if host.device_syncs_per_step else 0.0


def _explain_sync(context: RuleContext) -> Explanation:
    host, cost_ms = context.rank.host, _sync_ms(context)
    first = next(cause for cause in host.syncs if not cause.lightning)
    where = f" from {first.where}" if first.where else ""
    more = f"{context.more_with_stacks} shows the functions that call them." if context.more_with_stacks else ""
    return Explanation(
        f"the host waits for the GPU {host.device_syncs_per_step:.0f} times a step, mostly in {first.cause}{where}: "
        f"the queue runs dry, and the GPU idles {context.of_step(cost_ms)}",
        {
            "idle_after_sync_ms_per_step": cost_ms,
            "device_syncs_per_step": host.device_syncs_per_step,
            "lightning_syncs_per_step": host.lightning_syncs_per_step,
            "cause": first.cause,
            **({"where": first.where} if first.where else {}),
        },
        "Keep values on the GPU: detach() instead of item(), log every n steps, no if on a tensor, non_blocking "
        f"copies.{more}",
    )


def _allocator_ms(context: RuleContext) -> float:
    return context.rank.host.idle_after_allocator_ms_per_step


def _explain_allocator(context: RuleContext) -> Explanation:
    host, cost_ms = context.rank.host, _allocator_ms(context)
    remove = "Remove"
    if context.rank.steps == 1:  # which may be the first of the run
        remove = (
            "The allocator grows in the first steps of a run, and a single recorded step does not show whether "
            "later ones do too: record several steps after the warm-up. If they show it too: remove"
        )
    return Explanation(
        f"{host.cuda_mallocs_per_step:.1f} cudaMalloc and {host.cuda_frees_per_step:.1f} cudaFree a step keep the GPU "
        f"waiting {context.of_step(cost_ms)}",
        {
            "idle_after_allocator_ms_per_step": cost_ms,
            "cuda_mallocs_per_step": host.cuda_mallocs_per_step,
            "cuda_frees_per_step": host.cuda_frees_per_step,
        },
        f"{remove} torch.cuda.empty_cache() from the loop; keep batch shapes constant or pad them to a few "
        "sizes; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; leave some memory free.",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    )


def _held_up(cost_ms: Callable[[RuleContext], float], context: RuleContext) -> float:
    """What a step is shorter once calls no longer hold the host up."""
    # the host gains what it waited in them: while the GPU was busy, so no longer than that, and while it was idle. With
    # that lead it can close other gaps too, but its own work between the launches stays.
    return min(context.late_host_ms, context.rank.gpu.busy_ms_per_step + cost_ms(context))


# -- recorded gaps between launches ----------------------------------------------------------------------------------


def _launching_ms(context: RuleContext) -> float:
    cost_ms = context.rank.host.idle_launching_ms_per_step
    if update_is_slow(context):
        cost_ms -= sum(part.idle_ms_per_step for part in context.rank.regions if part.name == "optimizer")
    return max(cost_ms, 0.0)


def _explain_launching(context: RuleContext) -> Explanation:
    rank, host, cost_ms = context.rank, context.rank.host, _launching_ms(context)
    others = {"data", "optimizer"} if update_is_slow(context) else {"data"}
    built_in = [part for part in rank.regions if not part.user and part.name not in others]
    where = max(built_in, key=lambda part: part.idle_ms_per_step)
    kernel_us = rank.gpu.busy_ms_per_step * 1e3 / max(rank.gpu.kernels_per_step, 1)
    inside = f", most of it in {where.name}" if where.name != "other" else ""  # which names no place
    advice = _launch_less(host.graph_launches_per_step, host.launches_per_step - host.graph_launches_per_step)
    if context.pct(_sync_ms(context)) >= MIN_SHARE_PCT:
        advice += " First fix sync-bound: a CUDA graph cannot contain calls that wait for the GPU."
    held = in_function(rank, "launch-bound")
    first = "" if held is None else f"Look at {held.where} first, which holds most of that time. "
    graphs = host.graph_launches_per_step
    return Explanation(
        f"the GPU waits {context.of_step(cost_ms)} for Python between its {host.launches_per_step:.0f} launches"
        f"{inside}; the mean kernel runs {kernel_us:.1f} µs",
        {
            "idle_launching_ms_per_step": cost_ms,
            "launches_per_step": host.launches_per_step,
            "mean_kernel_us": kernel_us,
            "most_in_region": where.name,
            **({"graph_launches_per_step": graphs} if graphs else {}),
        },
        first + advice,
        "" if graphs or held is not None else COMPILE,
    )


def _launch_less(graphs: float, single: float) -> str:
    if not graphs:
        return (
            'Launch less: torch.compile(mode="reduce-overhead"), which fuses kernels too, or CUDA graphs, a larger '
            "batch, fused modules."
        )
    if single >= 1:
        return (
            f"CUDA graphs are replayed {graphs:.0f} times a step beside {single:.0f} single launches: capture what is "
            "still outside of them (the optimizer too), or make the batch larger."
        )
    return (
        f"All work is launched as CUDA graphs, {graphs:.0f} a step: capture more in each of them, make the batch "
        "larger, or do less in Python between the replays."
    )


# -- the largest part of the recorded idle time, where no other rule explains it -------------------------------------

# by idle cause the findings of which it is a part
_EXPLAINED_BY: Final = MappingProxyType(
    {
        "data": {"input-bound"},
        "launch": {"slow-launches"},
        "allocator": {"allocator-churn"},
        "sync": {"sync-bound"},
        "copy": {"transfer-bound"},
        "python": {"launch-bound", "slow-optimizer", "sync-bound", "allocator-churn"},
        "gpu": set(),
        "others": set(),
    }
)


def largest_idle(rules: Sequence[Rule]) -> Rule:
    """The rule for the largest part of the idle time, as far as none of the others explains it."""

    def cost(context: RuleContext) -> float:
        cause = _largest(context)
        explaining = [rule.gpu for rule in rules if rule.gpu is not None and rule.code in _EXPLAINED_BY[cause]]
        costs_ms = [cost_ms for case in explaining if context.pct(cost_ms := case.cost(context)) >= MIN_SHARE_PCT]
        left_ms = context.rank.idle[cause].ms_per_step - sum(costs_ms)
        return left_ms if not costs_ms or context.pct(left_ms) >= MIN_SHARE_PCT else 0.0

    return Rule("gpu-idle", gpu=Case(cost, lambda context: _explain_idle(context, cost(context)), unpredicted))


def _largest(context: RuleContext) -> str:
    return max(context.rank.idle, key=lambda cause: context.rank.idle[cause].ms_per_step)


def _explain_idle(context: RuleContext, idle_ms: float) -> Explanation:
    cause = _largest(context)
    if cause == "others":
        return Explanation(
            f"the GPU idles {context.of_step(idle_ms)} while other GPUs of the process work",
            {"idle_ms_per_step": idle_ms},
            "Parts of a model on several GPUs take turns unless batches are split and overlapped: use a pipeline "
            "schedule (torch.distributed.pipelining), or a whole model on each GPU (DDP, FSDP), a process each.",
        )
    launched = cause == "gpu"
    part = next((part for part in context.rank.idle_parts if part.launched == launched), None)
    title = f"the GPU idles {context.of_step(idle_ms)}"
    title += " although its next work has been launched" if launched else " and waits for the host"
    evidence: Evidence = {"idle_ms_per_step": idle_ms, **({} if launched else {"waits_for": "host"})}
    if part:
        title += f", mostly before {_short(part.following)}" if launched and part.following else ""
        if part.activity or not launched:
            title += f"; for {in_ms(min(part.ms_per_step, idle_ms))} of it the host is in {_activity(part)}"
        evidence |= _evidence(part)
    if launched:
        advice = (
            "The GPU waits for something on its own side: another stream's event, a dependency inside a CUDA graph, "
            "another process on this GPU. The timeline shows what runs on the other streams just before the gap ends."
        )
    elif (held := in_function(context.rank, "gpu-idle")) is not None:
        advice = f"Look at {held.where} first: the GPU waits for what it does."
    else:
        more = context.more_with_stacks
        shows = f"{more} shows" if more else " The Python functions in the report show"
        advice = f"No fix is known.{shows} what the host is in."
    return Explanation(title, evidence, advice)


def _activity(part: IdlePart) -> str:
    """What the host was in, in words."""
    if not part.activity:
        return f"Python outside of all operators (thread {part.thread})" if part.thread else "no recorded activity"
    around = f" of {part.operator}" if part.operator else ""
    return f"{part.activity}{around} (thread {part.thread})"


_LONGEST_LOOP: Final = 80


def _short(kernel: str) -> str:
    return short(loop_name(kernel), _LONGEST_LOOP) or base_name(kernel).rpartition("::")[2]


def _evidence(part: IdlePart) -> Evidence:
    return {
        "longest_ms_per_step": part.ms_per_step,
        "activity": part.activity,
        "operator": part.operator,
        "thread": part.thread,
        "before": _short(part.following),
    }


# -- recorded Python without a GPU -----------------------------------------------------------------------------------


def _explain_python(context: RuleContext) -> Explanation:
    cpu, held = context.cpu, in_function(context.rank, "python-bound")
    advice = "Do more in each call: a larger batch, torch.compile, fewer and larger modules."
    if held is not None:
        advice = f"Look at {held.where} first: what it waits for, or computes in Python."
    elif context.more_with_stacks:
        advice += f"{context.more_with_stacks} names the Python functions."
    return Explanation(
        f"{context.of_step(cpu.python_ms_per_step, bound=True)} is Python code between operators, in the module, the "
        f"training loop or callbacks{'' if context.live else ' (recording adds to it)'}",
        {
            "outside_of_operators_ms_per_step": cpu.python_ms_per_step,
            "operators_ms_per_step": cpu.operators_ms_per_step,
        },
        advice,
    )


# -- the host sets the pace of a run ---------------------------------------------------------------------------------

# where the GPU waits for the host, both finish a region at the same time: on an H200 within 0.1 %, and the length of
# the last kernels. Where the GPU takes longer, the host has queued work ahead.
_FELL_BEHIND: Final = 1.05
_LAST_KERNELS_MS: Final = 0.02


def _host_paced(run: RunTimes) -> list[str]:
    """The regions that the GPU finished about when the host did."""
    own = {"other": _between_regions_ms(run), "optimizer": slow_update_ms(run)}  # by region with a finding of its own
    paced = []
    for name in (*COMPUTE, "other"):
        times = run.region(name)
        if times.device_ms <= _FELL_BEHIND * times.host_ms + _LAST_KERNELS_MS and not own.get(name):
            paced.append(name)
    return paced


def _host_paced_ms(run: RunTimes) -> float:
    return sum(run.region(name).device_ms for name in _host_paced(run))


def _launching_in_run_ms(run: RunTimes) -> float:
    starved_pct = run.evidence.timing.gpu_starved_pct
    waits = run.evidence.timing.on_device and starved_pct is not None and run.host_sets_the_pace
    return _host_paced_ms(run) * (starved_pct or 0.0) / 100 if waits else 0.0


def _explain_launching_in_run(run: RunTimes) -> Explanation:
    paced, paced_ms = _host_paced(run), _host_paced_ms(run)
    return Explanation(
        f"the host sets the pace in {run.of_step(paced_ms)} ({', '.join(paced)}): the GPU had caught up with it "
        f"at {run.evidence.timing.gpu_starved_pct:.0f} % of the batch ends",
        {
            "host_paced_ms_per_step": paced_ms,
            **{f"{name}_host_ms_per_step": run.region(name).host_ms for name in paced},
        },
        'Launch less: a larger batch, torch.compile(mode="reduce-overhead") or CUDA graphs, if the model has none yet. '
        "Calls that wait for the GPU (.item(), .cpu(), printing a tensor) and cudaMalloc look the same here; a "
        "recorded window (ForgeProfilerCallback) distinguishes them and shows how long the GPU idles.",
        COMPILE,
    )


# -- callbacks and the loop itself in a run ----------------------------------------------------------------------------


def _outside_regions_ms(run: RunTimes) -> float:
    """Time between regions without what timing takes, which costs a GPU that is behind nothing."""
    timing_ms = (run.evidence.timing.overhead_us or 0.0) / 1e3 if run.host_sets_the_pace else 0.0
    return max(run.region("other").device_ms - timing_ms, 0.0)


def _between_regions_ms(run: RunTimes) -> float:
    """The same where it is a cause: what was not timed by itself, as forward may be, is in `other` too."""
    all_regions_timed = run.evidence.timing.regions.keys() >= {"data", "transfer", *COMPUTE}
    ms = _outside_regions_ms(run)
    return ms if all_regions_timed and 100 * ms >= NAMED_FROM["between-regions", "run"] * run.step_ms else 0.0


def _explain_between_regions(run: RunTimes) -> Explanation:
    ms, host_ms = _outside_regions_ms(run), run.region("other").host_ms
    on_host = f" ({in_ms(host_ms)} on the host)" if run.evidence.timing.on_device else ""
    return Explanation(
        f"{run.of_step(ms)}{on_host} is neither loading nor computing: callbacks, loggers, the progress bar, "
        "learning-rate schedulers and the loop itself",
        {"between_regions_ms_per_step": ms, "between_regions_host_ms_per_step": host_ms},
        "The ledger of a fit shows the time of each hook: make the longest cheaper, or call it every few steps; in a "
        "loop without a Trainer, `with region(NAME):` times a part of it. For "
        "loggers that is log_every_n_steps, for the progress bar TQDMProgressBar(refresh_rate=...). A larger batch "
        "shrinks its share: this time does not grow with it.",
    )


# -- the module's code waits in a run --------------------------------------------------------------------------------


def _blocked(name: str) -> Rule:
    def explain(run: RunTimes) -> Explanation:
        waits_ms = run.waits_each_step_ms(name)
        return Explanation(
            f"{name} waits {run.of_step(waits_ms)} without using a core",
            {"blocked_ms_per_step": waits_ms, f"{name}_ms_per_step": run.region(name).device_ms},
            WAITS,
        )

    return Rule(f"blocked-{name}", run=Case(lambda run: run.waits_each_step_ms(name), explain))


RULES: Final = (
    Rule("sync-bound", gpu=Case(_sync_ms, _explain_sync, partial(_held_up, _sync_ms))),
    Rule("allocator-churn", gpu=Case(_allocator_ms, _explain_allocator, partial(_held_up, _allocator_ms))),
    Rule(
        "slow-launches",
        gpu=Case(lambda context: context.rank.idle["launch"].ms_per_step, _explain_slow_launches),
    ),
    Rule("between-regions", run=Case(_between_regions_ms, _explain_between_regions)),  # of which a trace has no mark
    *map(_blocked, COMPUTE),
    Rule(
        "launch-bound",
        gpu=Case(_launching_ms, _explain_launching),
        run=Case(_launching_in_run_ms, _explain_launching_in_run, _host_paced_ms),
    ),
    Rule("python-bound", cpu=Case(lambda context: context.cpu.python_ms_per_step, _explain_python)),
)
