"""What bounds a run, from its regions alone: no trace, over all of its steps.

Regions tell how long the GPU waits for data and copies, and who of host and GPU waits for the other. They do not show
what the GPU does while it works, nor what the host does between launches. So findings from them name fewer causes than
a trace gives, and say what they cannot tell apart.
"""

from collections.abc import Callable
from typing import Final

from lightning_forge_profiling.diagnosis.loader_advice import (
    LoaderWait,
    accumulating,
    loader_advice,
    loader_evidence,
    only_bounded,
    pin_memory_advice,
)
from lightning_forge_profiling.diagnosis.rule import NAMED_FROM_PCT, Evidence
from lightning_forge_profiling.diagnosis.run_regions import (
    COMPUTE,
    all_told_apart,
    backward_is_heavy,
    ms_words,
    region,
    share_pct,
)
from lightning_forge_profiling.results.analysis import Finding, RunEvidence
from lightning_forge_profiling.results.saving import saving

__all__ = ["BETWEEN_REGIONS", "MIN_STEPS", "WORKER_RESTARTS", "run_findings"]

MIN_STEPS: Final = 5
"""One odd step in fewer would decide over the mean."""

WORKER_RESTARTS: Final = "worker-restarts"
"""A cause that only the run shows: epochs end in few windows, and one restart there would count too much."""

BETWEEN_REGIONS: Final = "between-regions"
"""Another: a trace has no mark for callbacks and loggers."""

_MOSTLY_PCT: Final = 50.0
"""The GPU waits for the host when it had caught up at most batch ends. On an H200 this was 92 to 100 % wherever Python,
synchronizations or cudaMalloc set the pace, and 0 % in every run whose GPU did; what lies between is seldom met."""

_RARELY_PCT: Final = 20.0
"""The GPU sets the pace when it had caught up at few. Between the two limits, neither is claimed for a whole step."""

_FELL_BEHIND: Final = 1.05
_LAST_KERNELS_MS: Final = 0.02
"""Where the GPU waits for the host, both are through with a region at the same time: on an H200 within 0.1 %, and the
length of the last kernels. Where the GPU takes longer, the host has queued work ahead."""

_SLOW_OPTIMIZER_PCT: Final = 20.0
"""A fused update of a model that is trained with a sensible batch takes 1 to 10 % of the step."""

_OTHER_PCT: Final = 10.0
"""Lightning's own loop with its default callbacks takes some 0.3 ms a step."""


def run_findings(evidence: RunEvidence) -> tuple[Finding, ...]:
    """What costs at least `NAMED_FROM_PCT` of a step. No two findings count the same time.

    Args:
        evidence: what the callbacks measured.

    Returns:
        The findings in no particular order; none where there are fewer than `MIN_STEPS` steps. On a CPU only
        `input-bound`, `worker-restarts`, `slow-optimizer` and `between-regions` are looked for: there is no second
        timeline that would tell whether host or GPU waits.

    Example:
        >>> from lightning_forge_profiling.results.rank import Distribution
        >>> from lightning_forge_profiling.results.analysis import RunRegion
        >>> spread = Distribution(mean=49.5, p50=49.4, min=49.0, max=51.0)
        >>> regions = {"data": RunRegion(device_ms=12.1, host_ms=25.0)}
        >>> [found] = run_findings(RunEvidence(steps=90, on_device=True, step_ms=spread, regions=regions))
        >>> found.title
        'the GPU waits 12.1 ms of each 49.5 ms step for the data loader (the host 25.0 ms, of which 12.9 ms are hidden)'
    """
    if evidence.steps < MIN_STEPS or evidence.step_ms.mean <= 0:
        return ()
    rules = _DEVICE_RULES if evidence.on_device else _CPU_RULES
    return tuple(found for rule in rules if (found := rule(evidence)) is not None)


# -- rules -----------------------------------------------------------------------------------------------------------


def _input_bound(evidence: RunEvidence) -> Finding | None:
    data, step = region(evidence, "data"), evidence.step_ms
    if evidence.on_device:
        hidden = max(data.host_ms - data.device_ms, 0.0)
        title = (
            f"the GPU waits {ms_words(data.device_ms)} of each {ms_words(step.mean)} step for the data loader "
            f"(the host {ms_words(data.host_ms)}, of which {ms_words(hidden)} are hidden)"
        )
    else:
        title = f"training waits {ms_words(data.device_ms)} of each {ms_words(step.mean)} step for the data loader"
    wait = LoaderWait(host_ms=data.host_ms, exposed_ms=data.device_ms, step_ms=step.mean, on_gpu=evidence.on_device)
    numbers: Evidence = {"exposed_wait_ms_per_step": data.device_ms, "host_wait_ms_per_step": data.host_ms}
    return _finding(
        evidence,
        "input-bound",
        data.device_ms,
        title,
        loader_advice(wait, evidence.loader),
        numbers=numbers | loader_evidence(evidence.loader),
        saves_ms=data.device_ms,
        at_most=only_bounded(wait, evidence.loader),
    )


def _worker_restarts(evidence: RunEvidence) -> Finding | None:
    restarts, step = evidence.worker_restarts, evidence.step_ms
    if restarts is None:
        return None
    each_ms = restarts.host_ms * evidence.steps / restarts.count
    workers, them = (f"{restarts.workers} workers", "them") if restarts.workers > 1 else ("worker", "it")
    return _finding(
        evidence,
        WORKER_RESTARTS,
        restarts.device_ms,
        f"the DataLoader ends its {workers} and starts {them} anew each epoch: {ms_words(each_ms)} each time until the "
        f"first batch is there, {ms_words(restarts.device_ms)} of each {ms_words(step.mean)} step",
        "Set persistent_workers=True in the DataLoader: its workers then stay from epoch to epoch. With "
        "Trainer(reload_dataloaders_every_n_epochs=...) they cannot: reload less often, or make epochs longer.",
        numbers={
            "restarts": restarts.count,
            "workers": restarts.workers,
            "restart_ms": each_ms,
            "exposed_wait_ms_per_step": restarts.device_ms,
            "host_wait_ms_per_step": restarts.host_ms,
        },
        saves_ms=restarts.device_ms,
        at_most=False,
    )


def _transfer_bound(evidence: RunEvidence) -> Finding | None:
    transfer, step = region(evidence, "transfer"), evidence.step_ms
    if transfer.host_ms < transfer.device_ms / 2:
        how = "the copy runs beside the host already, as from pinned memory"
        advice = "Copy less: uint8 or bf16 instead of float32 with the conversion on the GPU, no unused fields."
    else:
        how = "the host is held up in it, as by a copy from pageable memory"
        advice = (
            f"{pin_memory_advice(evidence.loader)}, and copy less: uint8 or bf16 instead of float32 with the "
            "conversion on the GPU."
        )
    numbers: Evidence = {
        "transfer_ms_per_step": transfer.device_ms,
        "transfer_host_ms_per_step": transfer.host_ms,
    }
    return _finding(
        evidence,
        "transfer-bound",
        transfer.device_ms,
        f"moving the batch to the GPU takes {ms_words(transfer.device_ms)} of each {ms_words(step.mean)} step "
        f"({ms_words(transfer.host_ms)} on the host: {how})",
        advice,
        numbers=numbers | loader_evidence(evidence.loader),
        saves_ms=transfer.device_ms,
    )


def _slow_optimizer(evidence: RunEvidence) -> Finding | None:
    optimizer = region(evidence, "optimizer")
    if not _optimizer_is_slow(evidence):
        return None
    return _finding(
        evidence,
        "slow-optimizer",
        optimizer.device_ms,
        f"the optimizer's update, with clipping and zero_grad, takes {ms_words(optimizer.device_ms)} of each "
        f"{ms_words(evidence.step_ms.mean)} step",
        "Give the optimizer fused=True, which makes a few kernels of many; if it has that already, update less often: "
        f"a larger batch, or a larger accumulate_grad_batches{accumulating(evidence.loader)}.",
        numbers={"optimizer_ms_per_step": optimizer.device_ms, "optimizer_host_ms_per_step": optimizer.host_ms},
        saves_ms=optimizer.device_ms,
        at_most=not evidence.on_device,  # a fused update takes little, and the host is ahead again for the next step
    )


def _launch_bound(evidence: RunEvidence) -> Finding | None:
    drained = evidence.drained_pct
    paced = [name for name in (*COMPUTE, "other") if _host_paced(evidence, name) and not _named_apart(evidence, name)]
    if drained is None or drained < _MOSTLY_PCT or not paced:
        return None
    paced_ms = sum(region(evidence, name).device_ms for name in paced)
    return _finding(
        evidence,
        "launch-bound",
        paced_ms * drained / 100,
        f"the host sets the pace in {ms_words(paced_ms)} of each {ms_words(evidence.step_ms.mean)} step "
        f"({', '.join(paced)}): the GPU had caught up with it at {drained:.0f} % of the batch ends",
        'Launch less: a larger batch, torch.compile(mode="reduce-overhead") or CUDA graphs, if the model has none yet. '
        "Calls that wait for the GPU (.item(), .cpu(), printing a tensor) and cudaMalloc look the same from here; a "
        "recorded window (ForgeProfilerCallback) tells, and how much of it the GPU idles.",
        numbers={
            "host_paced_ms_per_step": paced_ms,
            **{f"{name}_host_ms_per_step": region(evidence, name).host_ms for name in paced},
        },
        saves_ms=paced_ms,
    )


def _compute_bound(evidence: RunEvidence) -> Finding | None:
    drained = evidence.drained_pct
    if drained is None or drained > _RARELY_PCT or backward_is_heavy(evidence) or _allocates(evidence):
        return None
    ahead = [name for name in COMPUTE if not _named_apart(evidence, name)]
    work_ms = sum(region(evidence, name).device_ms for name in ahead)
    communication = (
        f" (communication of the {evidence.world_size} processes included)" if evidence.world_size > 1 else ""
    )
    return _finding(
        evidence,
        "compute-bound",
        work_ms,
        f"the run is GPU-bound: {ms_words(work_ms)} of each {ms_words(evidence.step_ms.mean)} step are work that the "
        f"host had queued ahead in {', '.join(ahead)}{communication}; the GPU had caught up with it at {drained:.0f} % "
        "of the batch ends",
        'Make the work cheaper: Trainer(precision="bf16-mixed"), torch.compile, fused attention. Which kernels it is '
        "takes a recorded window (ForgeProfilerCallback) to tell.",
        numbers={"gpu_paced_ms_per_step": work_ms},
        saves_ms=None,
    )


def _between_regions(evidence: RunEvidence) -> Finding | None:
    other = region(evidence, "other")
    if not _much_between(evidence):
        return None
    on_host = f" ({ms_words(other.host_ms)} on the host)" if evidence.on_device else ""
    return _finding(
        evidence,
        BETWEEN_REGIONS,
        other.device_ms,
        f"{ms_words(other.device_ms)} of each {ms_words(evidence.step_ms.mean)} step{on_host} pass outside of data, "
        "transfer, forward, backward and optimizer: in callbacks, loggers, the progress bar, learning-rate schedulers "
        "and Lightning's loop",
        'Trainer(profiler="simple") lists what each hook takes: make the longest cheaper, or call it every few steps. '
        "For loggers that is log_every_n_steps, for the progress bar TQDMProgressBar(refresh_rate=...). A larger batch "
        "shrinks its share: this time does not grow with it.",
        numbers={"between_regions_ms_per_step": other.device_ms, "between_regions_host_ms_per_step": other.host_ms},
        saves_ms=other.device_ms,
    )


_CPU_RULES: Final[tuple[Callable[[RunEvidence], Finding | None], ...]] = (
    _input_bound,
    _worker_restarts,
    _slow_optimizer,
    _between_regions,
)
_DEVICE_RULES: Final = (*_CPU_RULES, _transfer_bound, _launch_bound, _compute_bound)


# -- what the rules have in common -----------------------------------------------------------------------------------


def _host_paced(evidence: RunEvidence, name: str) -> bool:
    """Whether the GPU was through with a region about when the host was."""
    found = region(evidence, name)
    return found.device_ms <= _FELL_BEHIND * found.host_ms + _LAST_KERNELS_MS


def _optimizer_is_slow(evidence: RunEvidence) -> bool:
    return share_pct(evidence, "optimizer") >= _SLOW_OPTIMIZER_PCT


def _allocates(evidence: RunEvidence) -> bool:
    """Whether every step called `cudaMalloc`, for which the GPU may have waited: how long, only a trace shows."""
    gpu = evidence.telemetry
    return gpu is not None and (gpu.device_allocs_per_step or 0.0) >= 1


def _much_between(evidence: RunEvidence) -> bool:
    return all_told_apart(evidence) and share_pct(evidence, "other") >= _OTHER_PCT


def _named_apart(evidence: RunEvidence, name: str) -> bool:
    """Whether a region has a finding of its own, and so no part in the others."""
    if name == "other":
        return _much_between(evidence)
    return name == "optimizer" and _optimizer_is_slow(evidence)


def _finding(
    evidence: RunEvidence,
    code: str,
    cost_ms: float,
    title: str,
    advice: str,
    *,
    numbers: Evidence,
    saves_ms: float | None,
    at_most: bool = True,
) -> Finding | None:
    step = evidence.step_ms
    share = 100 * cost_ms / step.mean
    if share < NAMED_FROM_PCT:
        return None
    numbers |= {"step_ms": step.mean, "median_step_ms": step.p50, "steps": evidence.steps}
    if evidence.drained_pct is not None:
        numbers["gpu_caught_up_pct"] = evidence.drained_pct
    return Finding(
        code=code,
        share_pct=share,
        rank=0 if evidence.world_size > 1 else None,
        source="run",
        title=title,
        evidence={name: value if isinstance(value, str) else round(value, 3) for name, value in numbers.items()},
        advice=advice,
        saves=saving(saves_ms, step.mean, at_most=at_most),
    )
