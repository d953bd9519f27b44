"""The optimizer's update takes long: `slow-optimizer`."""

from dataclasses import replace
from typing import Final

from lightning_forge_profiling.diagnosis.loader import accumulating
from lightning_forge_profiling.diagnosis.rule import (
    MEASURE,
    MIN_SHARE_PCT,
    NAMED_FROM,
    Case,
    Evidence,
    Explanation,
    Rule,
    RuleContext,
    RunTimes,
    in_ms,
)
from lightning_forge_profiling.schema import OptimizerSettings, Region, RunEvidence

# -- an optimizer's update, recorded on a GPU --------------------------------------------------------------------------

# a fused optimizer launches 3 to 7 kernels, a foreach one 10 to 50 for the same GPT; a loop over parameters, several
# for each of them
_UNFUSED_LAUNCHES: Final = 100


def _unfused(context: RuleContext) -> Region | None:
    """The region of an update that is many launches."""
    regions = (part for part in context.rank.regions if part.name == "optimizer" and not part.user)
    return next((part for part in regions if part.launches_per_step >= _UNFUSED_LAUNCHES), None)


def _gpu_update_ms(context: RuleContext) -> float:
    update = _unfused(context)
    return 0.0 if update is None else update.gpu_ms_per_step + update.idle_ms_per_step


def update_is_slow(context: RuleContext) -> bool:
    """Whether a GPU's update has a finding, so that it is no part of others."""
    return context.pct(_gpu_update_ms(context)) >= MIN_SHARE_PCT


def _explain_gpu_update(context: RuleContext) -> Explanation:
    update, cost_ms = _unfused(context), _gpu_update_ms(context)
    if update is None:
        raise ValueError("a step without an optimizer")
    return Explanation(
        f"the optimizer takes {context.of_step(cost_ms)}: {update.launches_per_step:.0f} launches, "
        f"{in_ms(update.gpu_ms_per_step)} of GPU work and {in_ms(update.idle_ms_per_step)} of waiting",
        {
            "optimizer_ms_per_step": cost_ms,
            "gpu_busy_ms_per_step": update.gpu_ms_per_step,
            "gpu_waits_ms_per_step": update.idle_ms_per_step,
            "launches_per_step": update.launches_per_step,
        },
        "Give the optimizer fused=True (or foreach=True where it has no fused kernel).",
        _fused(
            "" if context.run is None or context.run.settings.optimizer is None else context.run.settings.optimizer.kind
        ),
    )


def _update_saving(context: RuleContext) -> float:
    """Its GPU work, and waiting for the host, which runs ahead once the update is a few launches."""
    # the host gains no more lead than the update takes it, so waits of more than that stay.
    update = _unfused(context)
    return 0.0 if update is None else update.gpu_ms_per_step + min(context.late_host_ms, update.host_ms_per_step)


# -- an optimizer's update, recorded on a CPU --------------------------------------------------------------------------

_FUSED_IS_SLOW_PCT: Final = 20.0  # an update that is fused already is named from here on, as in a run without a trace


def _cpu_update_ms(context: RuleContext) -> float:
    cpu = context.cpu
    fused_enough = cpu.update == "fused" and context.pct(cpu.optimizer_ms_per_step) < _FUSED_IS_SLOW_PCT
    return 0.0 if fused_enough else cpu.optimizer_ms_per_step


def _explain_cpu_update(context: RuleContext) -> Explanation:
    cpu = context.cpu
    called = f"{cpu.optimizer}'s update" if cpu.optimizer else "the optimizer's update"
    often = "a larger batch" if _is_manual(context.run) else "a larger batch, accumulate_grad_batches"
    how = {"loop": " in a loop over the parameters", "foreach": " with foreach", "fused": ", already fused", "": ""}
    fix = ""
    if cpu.update == "fused":
        advice = f"{_LESS_OFTEN} ({often})."
    else:
        advice, fix = _unfused_cpu_advice(cpu.optimizer, cpu.intra_op_threads, context.run, often)
    return Explanation(
        f"{called} takes {context.of_step(cpu.optimizer_ms_per_step)} on the CPU: "
        f"{cpu.update_calls_per_step:.0f} operator calls{how[cpu.update]}",
        {
            "optimizer_ms_per_step": cpu.optimizer_ms_per_step,
            "operator_calls_per_step": cpu.update_calls_per_step,
            "optimizer_class": cpu.optimizer,
            "update": cpu.update,
            **_faster(context.run, fused=cpu.update == "fused"),
        },
        advice,
        fix,
    )


# with fused=True, from PyTorch 2.4 on, and one thread their update took 0.1 to 0.5 of the time of the CPU's default, a
# loop over the parameters, for 6 to 300 tensors of 256 to 1,048,576 elements; SGD's 0.3 to 1.0, and so it is left out.
# Steps with Adam took 0.5 to 0.6, also beside a busy process (`python -m docs.measure_fixes --cpu fused`).
_FUSED_ON_CPU: Final = frozenset({"Adam", "AdamW", "Adagrad"})

# those of torch.optim that have foreach=, and most of them fused=
_FOREACH: Final = frozenset(
    {"ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)


# with several threads each tensor is an OpenMP region, for which all threads need a core at the same time: that was
# measured with two; with more it takes tensors of so many elements, which the loop divides among the threads, too
_MEASURED_THREADS: Final = 2
_LARGE: Final = 65_536


_LBFGS: Final = "LBFGS"
_LESS_OFTEN: Final = "Update less often"
FASTER: Final = "faster_update"
NONE_KNOWN: Final = "none known"


# fused=True made SGD's update of 44 tensors 0.46 to 0.69 as long, that of 4 tensors 0.99 to 1.06 (one thread, torch
# 2.13, 2026-11-29)
_FEW_TENSORS: Final = 40


# a fit with AdamW and as many groups as tensors took 4.6 s, fused 3.6, fused in two groups 2.4, with foreach 6.6 (one
# thread, torch 2.13, 2026-11-29)
_MANY_GROUPS: Final = 20
_SMALL_GROUPS: Final = 4  # tensors in one


def _by_group(explained: Explanation, run: RunEvidence | None) -> Explanation:
    """The words with what to do first about parameter groups of a tensor or two each."""
    optimizer = None if run is None else run.settings.optimizer
    if optimizer is None or not _has_small_groups(optimizer):
        return explained
    groups = (
        f"Its {optimizer.tensors} tensors are in {optimizer.groups} parameter groups, and foreach or fused, it works "
        "group by group: put parameters with the same settings into one."
    )
    numbers: Evidence = {"parameter_groups": optimizer.groups}
    advice = groups if optimizer.fused else f"{groups} {explained.advice}"
    return replace(explained.after(numbers), advice=advice, fix="")


def _has_small_groups(optimizer: OptimizerSettings) -> bool:
    return optimizer.groups >= _MANY_GROUPS and optimizer.tensors < _SMALL_GROUPS * optimizer.groups


def _faster(run: RunEvidence | None, *, fused: bool) -> dict[str, str]:
    """Evidence that no faster update is known, so that it is a part of the work."""
    optimizer = None if run is None else run.settings.optimizer
    if optimizer is not None and _has_small_groups(optimizer):
        return {}
    few = optimizer is not None and optimizer.tensors < _FEW_TENSORS and optimizer.kind not in {*_FUSED_ON_CPU, _LBFGS}
    return {FASTER: NONE_KNOWN} if fused or few else {}


def _is_manual(run: RunEvidence | None) -> bool:
    """Whether the module updates the weights by itself, where Lightning refuses to accumulate gradients."""
    return run is not None and run.settings.optimizer is not None and run.settings.optimizer.manual


def _fused(kind: str) -> str:
    return f"{kind or 'optimizer'}(..., fused=True)"


def _unfused_cpu_advice(kind: str, threads: int | None, run: RunEvidence | None, often: str) -> tuple[str, str]:
    """What to do about an update on the CPU that is not fused, and code; `often` says how to update less often."""
    optimizer, use = (None, None) if run is None else (run.settings.optimizer, run.machine.cpu)
    large = optimizer is not None and optimizer.median_elements >= _LARGE
    few_threads = threads is not None and threads <= _MEASURED_THREADS
    gains = threads == 1 or (use is not None and use.contended is False and (few_threads or large))
    if kind in _FUSED_ON_CPU and gains:
        return f"Use {kind}(fused=True), or update less often ({often}).", _fused(kind)
    if kind == _LBFGS:
        return (
            "It computes forward and backward up to max_iter times an update (20 by default): lower max_iter, or take "
            "another optimizer."
        ), "LBFGS(..., max_iter=4)"
    if kind and kind not in _FOREACH:
        return f"{_LESS_OFTEN} ({often}).", ""
    if kind in _FUSED_ON_CPU:
        return (
            f"Measure {kind}(fused=True): {MEASURE}. With several threads it can be slower on a busy machine. Or "
            f"update less often ({often})."
        ), ""
    faster = f"{kind or 'the optimizer'} with fused=True or foreach=True, if it has them"
    return (
        f"{_LESS_OFTEN} ({often}). Measure {faster}: {MEASURE}. With several threads both can be slower, on a busy "
        "machine many times."
    ), ""


# -- an optimizer's update in a run ------------------------------------------------------------------------------------


def slow_update_ms(run: RunTimes) -> float:
    """What the update takes of each step; 0 for as much as a fused one may take."""
    update_ms = run.works_ms("optimizer")
    return update_ms if 100 * update_ms >= NAMED_FROM["slow-optimizer", "run"] * run.step_ms else 0.0


def _explain_run_update(run: RunTimes) -> Explanation:
    optimizer, (advice, fix) = run.region("optimizer"), _run_advice(run)
    settings = run.evidence.settings.optimizer
    return Explanation(
        f"the optimizer's update, with clipping and zero_grad, takes {run.of_step(slow_update_ms(run))}",
        {
            "optimizer_ms_per_step": optimizer.device_ms,
            "optimizer_host_ms_per_step": optimizer.host_ms,
            **_faster(run.evidence, fused=settings is not None and settings.fused),
        },
        advice,
        fix,
    )


def _run_advice(run: RunTimes) -> tuple[str, str]:
    optimizer = run.evidence.settings.optimizer
    often = f"a larger batch, or a larger accumulate_grad_batches{accumulating(run.evidence.settings.loader)}"
    if _is_manual(run.evidence):
        often = "a larger batch, or step() after several backward passes"
    if optimizer is not None and optimizer.fused:
        return f"{_LESS_OFTEN} ({often}): it is fused already.", ""
    kind = "" if optimizer is None else optimizer.kind
    if run.evidence.timing.on_device:
        return (
            "Give the optimizer fused=True, which replaces many kernels with a few; if it is fused already, update "
            f"less often: {often}."
        ), _fused(kind)
    return _unfused_cpu_advice(kind, None if run.cpu is None else run.cpu.threads, run.evidence, often)


RULES: Final = (
    Rule(
        "slow-optimizer",
        gpu=Case(_gpu_update_ms, lambda context: _by_group(_explain_gpu_update(context), context.run), _update_saving),
        cpu=Case(_cpu_update_ms, lambda context: _by_group(_explain_cpu_update(context), context.run)),
        # a fused update takes little, and on a GPU the host is ahead again for the next step
        run=Case(
            slow_update_ms,
            lambda run: _by_group(_explain_run_update(run), run.evidence),
            at_most=lambda run: not run.evidence.timing.on_device,
        ),
    ),
)
