"""What bounds a run, from its regions alone: no trace, over all of its steps.

Regions tell how long the GPU waits for data and copies, and who of host and GPU waits for the other. They do not show
what the GPU does while it works, nor what the host does between launches. So findings from them name fewer causes than
a trace gives, and say what they cannot tell apart.
"""

from collections.abc import Callable, Iterator
from typing import Final

from lightning_forge_profiling.analysis.results import Finding, Hint, RunEvidence, RunRegion
from lightning_forge_profiling.analysis.rule import HANDED_OVER_MS, NAMED_FROM_PCT, SMALL_BATCHES
from lightning_forge_profiling.analysis.telemetry_findings import telemetry_hints

__all__ = ["MIN_STEPS", "NAMED_FROM_PCT", "WORKER_RESTARTS", "run_findings", "run_hints", "share_pct"]

MIN_STEPS: Final = 5
"""One odd step in fewer would decide over the mean."""

WORKER_RESTARTS: Final = "worker-restarts"
"""The one cause that only the run shows: epochs end in few windows, and one restart there would count too much."""

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

_BACKWARD_TO_FORWARD: Final = 3.0
"""Backward computes twice what forward does, three times with activation checkpointing. What it takes beyond that in
several processes is likely communication, or waiting for the others."""

_UNEVEN: Final = 1.2
"""A mean so much above the median says that few steps take a good part of the time."""

_OTHER_PCT: Final = 10.0
"""Lightning's own loop with its default callbacks takes some 0.3 ms a step."""

_COMPUTE: Final = ("forward", "backward", "optimizer")
_NO_REGION: Final = RunRegion(device_ms=0.0, host_ms=0.0)


def run_findings(evidence: RunEvidence) -> tuple[Finding, ...]:
    """What costs at least `NAMED_FROM_PCT` of a step. No two findings count the same time.

    Args:
        evidence: what the callbacks measured.

    Returns:
        The findings in no particular order; none where there are fewer than `MIN_STEPS` steps. On a CPU only
        `input-bound`, `worker-restarts` and `slow-optimizer` are looked for: there is no second timeline that would
        tell who waits.

    Example:
        >>> from lightning_forge_profiling.analysis.rank_summary import Distribution
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


def run_hints(evidence: RunEvidence) -> tuple[Hint, ...]:
    """What is worth a look without being a cause."""
    if evidence.steps < MIN_STEPS or evidence.step_ms.mean <= 0:
        return ()
    sensors = () if evidence.telemetry is None else telemetry_hints(evidence.telemetry, steps=evidence.steps)
    return (*_hints(evidence), *sensors)


def share_pct(evidence: RunEvidence, *regions: str) -> float:
    """What the device times of some regions are of the step, in percent. Worker restarts are no part of `data` here."""
    total = sum(_region(evidence, name).device_ms for name in regions)
    return 100 * total / evidence.step_ms.mean if evidence.step_ms.mean > 0 else 0.0


# -- rules -----------------------------------------------------------------------------------------------------------


def _input_bound(evidence: RunEvidence) -> Finding | None:
    data, step = _region(evidence, "data"), evidence.step_ms
    if evidence.on_device:
        hidden = max(data.host_ms - data.device_ms, 0.0)
        title = (
            f"the GPU waits {_ms(data.device_ms)} of each {_ms(step.mean)} step for the data loader "
            f"(the host {_ms(data.host_ms)}, of which {_ms(hidden)} are hidden)"
        )
        workers = "a larger prefetch_factor and pin_memory=True"
    else:
        title = f"training waits {_ms(data.device_ms)} of each {_ms(step.mean)} step for the data loader"
        workers = "if the training leaves them a core"
    advice = (
        f"Give the DataLoader more num_workers with persistent_workers=True, {workers}, or make a sample cheaper: "
        "decode and augment less, or ahead of time."
    )
    if data.host_ms < HANDED_OVER_MS:
        advice = f"The wait for a batch is short, and {SMALL_BATCHES}"
    return _finding(
        evidence,
        "input-bound",
        ("data",),
        title,
        advice,
        exposed_wait_ms_per_step=data.device_ms,
        host_wait_ms_per_step=data.host_ms,
    )


def _worker_restarts(evidence: RunEvidence) -> Finding | None:
    restarts, step = evidence.worker_restarts, evidence.step_ms
    if restarts is None:
        return None
    each_ms = restarts.host_ms * evidence.steps / restarts.count
    workers, them = (f"{restarts.workers} workers", "them") if restarts.workers > 1 else ("worker", "it")
    return _finding_of(
        evidence,
        WORKER_RESTARTS,
        100 * restarts.device_ms / step.mean,
        f"the DataLoader ends its {workers} and starts {them} anew each epoch: {_ms(each_ms)} each time until the "
        f"first batch is there, {_ms(restarts.device_ms)} of each {_ms(step.mean)} step",
        "Set persistent_workers=True in the DataLoader: its workers then stay from epoch to epoch. With "
        "Trainer(reload_dataloaders_every_n_epochs=...) they cannot: reload less often, or make epochs longer.",
        restarts=restarts.count,
        workers=restarts.workers,
        restart_ms=each_ms,
        exposed_wait_ms_per_step=restarts.device_ms,
        host_wait_ms_per_step=restarts.host_ms,
    )


def _transfer_bound(evidence: RunEvidence) -> Finding | None:
    transfer = _region(evidence, "transfer")
    if transfer.host_ms < transfer.device_ms / 2:
        how = "the copy runs beside the host already, as from pinned memory"
        advice = "Copy less: uint8 or bf16 instead of float32 with the conversion on the GPU, no unused fields."
    else:
        how = "the host is held up in it, as by a copy from pageable memory"
        advice = (
            "Set pin_memory=True in the DataLoader (only from pinned memory is a copy asynchronous), and copy less: "
            "uint8 or bf16 instead of float32 with the conversion on the GPU."
        )
    title = (
        f"moving the batch to the GPU takes {_ms(transfer.device_ms)} of each {_ms(evidence.step_ms.mean)} step "
        f"({_ms(transfer.host_ms)} on the host: {how})"
    )
    return _finding(
        evidence,
        "transfer-bound",
        ("transfer",),
        title,
        advice,
        transfer_ms_per_step=transfer.device_ms,
        transfer_host_ms_per_step=transfer.host_ms,
    )


def _slow_optimizer(evidence: RunEvidence) -> Finding | None:
    optimizer = _region(evidence, "optimizer")
    if not _optimizer_is_slow(evidence):
        return None
    return _finding(
        evidence,
        "slow-optimizer",
        ("optimizer",),
        f"the optimizer's update, with clipping and zero_grad, takes {_ms(optimizer.device_ms)} of each "
        f"{_ms(evidence.step_ms.mean)} step",
        "Give the optimizer fused=True, which makes a few kernels of many; if it has that already, update less often: "
        "a larger batch, or accumulate_grad_batches.",
        optimizer_ms_per_step=optimizer.device_ms,
        optimizer_host_ms_per_step=optimizer.host_ms,
    )


def _launch_bound(evidence: RunEvidence) -> Finding | None:
    drained = evidence.drained_pct
    paced = [name for name in (*_COMPUTE, "other") if _host_paced(evidence, name) and not _named_apart(evidence, name)]
    if drained is None or drained < _MOSTLY_PCT or not paced:
        return None
    paced_ms = sum(_region(evidence, name).device_ms for name in paced)
    return _finding(
        evidence,
        "launch-bound",
        paced,
        f"the host sets the pace in {_ms(paced_ms)} of each {_ms(evidence.step_ms.mean)} step ({', '.join(paced)}): "
        f"the GPU had caught up with it at {drained:.0f} % of the batch ends",
        'Launch less: torch.compile(mode="reduce-overhead"), CUDA graphs, a larger batch. Calls that wait for the GPU '
        "(.item(), .cpu(), printing a tensor) and cudaMalloc look the same from here; a recorded window "
        "(ForgeProfilerCallback) tells, and how much of it the GPU idles.",
        weight=drained / 100,
        host_paced_ms_per_step=paced_ms,
        **{f"{name}_host_ms_per_step": _region(evidence, name).host_ms for name in paced},
    )


def _compute_bound(evidence: RunEvidence) -> Finding | None:
    drained = evidence.drained_pct
    if drained is None or drained > _RARELY_PCT or _backward_is_heavy(evidence) or _allocates(evidence):
        return None
    ahead = [name for name in _COMPUTE if not _named_apart(evidence, name)]
    work_ms = sum(_region(evidence, name).device_ms for name in ahead)
    communication = (
        f" (communication of the {evidence.world_size} processes included)" if evidence.world_size > 1 else ""
    )
    return _finding(
        evidence,
        "compute-bound",
        ahead,
        f"the run is GPU-bound: {_ms(work_ms)} of each {_ms(evidence.step_ms.mean)} step are work that the host had "
        f"queued ahead in {', '.join(ahead)}{communication}; the GPU had caught up with it at {drained:.0f} % of the "
        "batch ends",
        'Make the work cheaper: Trainer(precision="bf16-mixed"), torch.compile, fused attention. Which kernels it is '
        "takes a recorded window (ForgeProfilerCallback) to tell.",
        gpu_paced_ms_per_step=work_ms,
    )


_CPU_RULES: Final[tuple[Callable[[RunEvidence], Finding | None], ...]] = (
    _input_bound,
    _worker_restarts,
    _slow_optimizer,
)
_DEVICE_RULES: Final = (_input_bound, _worker_restarts, _transfer_bound, _slow_optimizer, _launch_bound, _compute_bound)


def _hints(evidence: RunEvidence) -> Iterator[Hint]:
    step = evidence.step_ms
    restarts_ms = 0.0 if evidence.worker_restarts is None else evidence.worker_restarts.device_ms
    like_ms = step.p50 if evidence.like_ms is None else evidence.like_ms
    if step.mean - restarts_ms > _UNEVEN * like_ms:
        yield Hint(
            code="uneven-steps",
            rank=0,
            text=f"Steps are uneven: {_ms(step.mean)} in the mean, {_ms(step.p50)} in the median, {_ms(step.max)} the "
            "longest, beyond what gradient accumulation and workers' restarts make of it. Something comes now and "
            "then: a callback or a logger, or workers that deliver their batches at the same time.",
        )
    # where forward, say, is not told apart, it is in there
    if evidence.regions.keys() >= {"data", "transfer", *_COMPUTE} and share_pct(evidence, "other") >= _OTHER_PCT:
        other = _region(evidence, "other")
        yield Hint(
            code="between-regions",
            rank=0,
            text=f"{_ms(other.device_ms)} of each step pass outside of the regions ({_ms(other.host_ms)} on the host): "
            "callbacks, loggers, the progress bar, learning-rate schedulers.",
        )
    if _backward_is_heavy(evidence):
        times = _region(evidence, "backward").device_ms / max(_region(evidence, "forward").device_ms, 1e-3)
        yield Hint(
            code="backward-heavy",
            rank=0,
            text=f"Backward takes {times:.1f} times as long as forward, where twice is usual. With "
            f"{evidence.world_size} processes the rest is likely the exchange of gradients or waiting for a slower "
            "rank; a recorded window of all ranks tells which.",
        )


# -- what the rules have in common -----------------------------------------------------------------------------------


def _host_paced(evidence: RunEvidence, name: str) -> bool:
    """Whether the GPU was through with a region about when the host was."""
    region = _region(evidence, name)
    return region.device_ms <= _FELL_BEHIND * region.host_ms + _LAST_KERNELS_MS


def _optimizer_is_slow(evidence: RunEvidence) -> bool:
    return share_pct(evidence, "optimizer") >= _SLOW_OPTIMIZER_PCT


def _allocates(evidence: RunEvidence) -> bool:
    """Whether every step called `cudaMalloc`, for which the GPU may have waited: how long, only a trace shows."""
    gpu = evidence.telemetry
    return gpu is not None and (gpu.device_allocs_per_step or 0.0) >= 1


def _named_apart(evidence: RunEvidence, name: str) -> bool:
    """Whether the optimizer has a finding of its own, and so no part in the others."""
    return name == "optimizer" and _optimizer_is_slow(evidence)


def _backward_is_heavy(evidence: RunEvidence) -> bool:
    forward, backward = (_region(evidence, name).device_ms for name in ("forward", "backward"))
    return evidence.on_device and evidence.world_size > 1 and backward > _BACKWARD_TO_FORWARD * forward


def _region(evidence: RunEvidence, name: str) -> RunRegion:
    region, restarts = evidence.regions.get(name, _NO_REGION), evidence.worker_restarts
    if name != "data" or name not in evidence.regions or restarts is None:
        return region
    return RunRegion(
        device_ms=max(region.device_ms - restarts.device_ms, 0.0), host_ms=max(region.host_ms - restarts.host_ms, 0.0)
    )


def _ms(ms: float) -> str:
    return f"{ms:.1f} ms" if ms >= 10 else f"{ms:.2f} ms"  # noqa: PLR2004  (three digits)


def _finding(
    evidence: RunEvidence,
    code: str,
    regions: tuple[str, ...] | list[str],
    title: str,
    advice: str,
    *,
    weight: float = 1.0,
    **numbers: float,
) -> Finding | None:
    return _finding_of(evidence, code, weight * share_pct(evidence, *regions), title, advice, **numbers)


def _finding_of(
    evidence: RunEvidence, code: str, share: float, title: str, advice: str, **numbers: float
) -> Finding | None:
    if share < NAMED_FROM_PCT:
        return None
    numbers |= {"step_ms": evidence.step_ms.mean, "median_step_ms": evidence.step_ms.p50, "steps": evidence.steps}
    if evidence.drained_pct is not None:
        numbers["gpu_caught_up_pct"] = evidence.drained_pct
    return Finding(
        code=code,
        share_pct=share,
        rank=0 if evidence.world_size > 1 else None,
        source="run",
        title=title,
        evidence={name: round(value, 3) for name, value in numbers.items()},
        advice=advice,
    )
