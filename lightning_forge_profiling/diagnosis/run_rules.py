"""Causes of lost time in a whole run, as rules on its regions: no trace, but all of its steps.

Regions tell how long the GPU waits for data and copies, and whether the host or the GPU is ahead. They show neither
what the GPU does while it works nor what the host does between launches. So they name fewer causes than a trace, and
say which ones they cannot distinguish.
"""

from dataclasses import replace
from functools import partial
from typing import Final

from lightning_forge_profiling.diagnosis.cpu_rules import cpu_update_advice
from lightning_forge_profiling.diagnosis.ledger_costs import in_s
from lightning_forge_profiling.diagnosis.ledger_rules import self_times
from lightning_forge_profiling.diagnosis.loader_advice import (
    LoaderWait,
    accumulating,
    loader_advice,
    loader_evidence,
    only_bounded,
    pin_memory_advice,
)
from lightning_forge_profiling.diagnosis.rule import (
    COMPUTE,
    NAMED_FROM_PCT,
    Evidence,
    Explanation,
    Rule,
    all_told_apart,
    backward_is_heavy,
    finding,
    in_ms,
    region,
    share_pct,
    unpredicted,
)
from lightning_forge_profiling.diagnosis.verdict import NAMED_FROM
from lightning_forge_profiling.results.analysis import Finding, RunEvidence

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
"""Where the GPU waits for the host, both finish a region at the same time: on an H200 within 0.1 %, and the length of
the last kernels. Where the GPU takes longer, the host has queued work ahead."""

_SLOW_OPTIMIZER_PCT: Final = NAMED_FROM["slow-optimizer", "run"]
_OTHER_PCT: Final = NAMED_FROM[BETWEEN_REGIONS, "run"]


def run_findings(evidence: RunEvidence) -> tuple[Finding, ...]:
    """What costs at least `NAMED_FROM_PCT` of a step. No two findings count the same time, those of hooks included.

    Example:
        >>> from lightning_forge_profiling.results.rank import Distribution
        >>> from lightning_forge_profiling.results.analysis import RunRegion
        >>> spread = Distribution(mean=49.5, p50=49.4, min=49.0, max=51.0)
        >>> regions = {"data": RunRegion(device_ms=12.1, host_ms=25.0)}
        >>> [found] = run_findings(RunEvidence(steps=90, on_device=True, step_ms=spread, regions=regions))
        >>> found.title
        'the GPU waits 12.1 ms of each 49.5 ms step for the data loader (host wait 25.0 ms, 12.9 ms of it hidden)'
    """
    if evidence.steps < MIN_STEPS or evidence.step_ms.mean <= 0:
        return ()
    evidence = self_times(evidence)
    rules = RUN_RULES if evidence.on_device else _CPU_RULES
    costs = [(rule, 100 * rule.cost(evidence) / evidence.step_ms.mean) for rule in rules]
    return tuple(_finding(rule, evidence, share_pct) for rule, share_pct in costs if share_pct >= NAMED_FROM_PCT)


def _finding(rule: Rule[RunEvidence], evidence: RunEvidence, share_pct: float) -> Finding:
    step = evidence.step_ms
    rank = evidence.rank if evidence.world_size > 1 else None
    found = finding(rule, evidence, step_ms=step.mean, share_pct=share_pct, source="run", rank=rank)
    numbers = {**found.evidence, "step_ms": step.mean, "median_step_ms": step.p50, "steps": evidence.steps}
    if evidence.drained_pct is not None:
        numbers["drained_pct"] = evidence.drained_pct
    if found.code == WORKER_RESTARTS and found.saves is not None:  # which do not come in each step
        saved, steps = (in_s(ms * evidence.steps / 1e3) for ms in (found.saves.ms_per_step, step.mean))
        text = f"That saves about {saved} of the {steps} that the steps take ({found.saves.pct:.0f} %)."
        found = replace(found, saves=replace(found.saves, text=text))
    of_region = evidence.regions.get(_REGION_OF.get(found.code, ""))
    if of_region is not None and of_region.p50_ms is not None and of_region.p50_ms < of_region.device_ms / 2:
        found = replace(found, title=f"{found.title}; {in_ms(of_region.p50_ms)} in the median step")
    rounded = {name: value if isinstance(value, str) else round(value, 3) for name, value in numbers.items()}
    return replace(found, evidence=rounded)


def leaf_of(found: Finding) -> str:
    """The region, or the part of the ledger, that a finding is about; "" for none, or for several."""
    return _REGION_OF.get(found.code) or str(found.evidence.get("part", ""))


def region_advice(name: str, evidence: RunEvidence) -> str:
    """What to do about a region that takes long: the advice of its rule; "" without one."""
    explain = {"data": _input, "optimizer": _optimizer, **({"transfer": _transfer} if evidence.on_device else {})}.get(
        name
    )
    return "" if explain is None else explain(evidence).advice


# -- rules -----------------------------------------------------------------------------------------------------------


def _input_cost(evidence: RunEvidence) -> float:
    return region(evidence, "data").device_ms


def _wait(evidence: RunEvidence) -> LoaderWait:
    data = region(evidence, "data")
    return LoaderWait(
        host_ms=data.host_ms,
        exposed_ms=data.device_ms,
        step_ms=evidence.step_ms.mean,
        on_gpu=evidence.on_device,
        cpu=evidence.cpu,
    )


def _input(evidence: RunEvidence) -> Explanation:
    data = region(evidence, "data")
    if evidence.on_device:
        hidden = max(data.host_ms - data.device_ms, 0.0)
        title = (
            f"the GPU waits {_of_step(evidence, data.device_ms)} for the data loader "
            f"(host wait {in_ms(data.host_ms)}, {in_ms(hidden)} of it hidden)"
        )
    else:
        title = f"training waits {_of_step(evidence, data.device_ms)} for the data loader"
    numbers: Evidence = {"exposed_wait_ms_per_step": data.device_ms, "host_wait_ms_per_step": data.host_ms}
    advice = loader_advice(_wait(evidence), evidence.loader)
    return Explanation(title, numbers | loader_evidence(evidence.loader), advice)


def _restarts_cost(evidence: RunEvidence) -> float:
    return 0.0 if evidence.worker_restarts is None else evidence.worker_restarts.device_ms


def _restarts(evidence: RunEvidence) -> Explanation:
    restarts = evidence.worker_restarts
    if restarts is None:
        raise ValueError("a run without restarts")
    each_ms = restarts.host_ms * evidence.steps / restarts.count
    exposed, steps = (in_s(ms * evidence.steps / 1e3) for ms in (restarts.device_ms, evidence.step_ms.mean))
    workers, new = (f"{restarts.workers} workers", "new ones") if restarts.workers > 1 else ("worker", "a new one")
    return Explanation(
        f"the DataLoader ends its {workers} and starts {new} each epoch: {in_ms(each_ms)} each time until the first "
        f"batch, {exposed} of the {steps} that {evidence.steps} steps take",
        {
            "restarts": restarts.count,
            "workers": restarts.workers,
            "restart_ms": each_ms,
            "exposed_wait_ms_per_step": restarts.device_ms,
            "host_wait_ms_per_step": restarts.host_ms,
        },
        "Set persistent_workers=True in the DataLoader: its workers then stay from epoch to epoch. With "
        "Trainer(reload_dataloaders_every_n_epochs=...) they cannot: reload less often, or make epochs longer.",
    )


def _transfer_cost(evidence: RunEvidence) -> float:
    return region(evidence, "transfer").device_ms


def _transfer(evidence: RunEvidence) -> Explanation:
    transfer = region(evidence, "transfer")
    if transfer.host_ms < transfer.device_ms / 2:
        how = "non-blocking, as from pinned memory"
        advice = "Copy less: uint8 or bf16 instead of float32 with the conversion on the GPU, no unused fields."
    else:
        how = "blocking, as from pageable memory"
        advice = (
            f"{pin_memory_advice(evidence.loader)}, and copy less: uint8 or bf16 instead of float32 with the "
            "conversion on the GPU."
        )
    numbers: Evidence = {
        "transfer_ms_per_step": transfer.device_ms,
        "transfer_host_ms_per_step": transfer.host_ms,
    }
    return Explanation(
        f"moving the batch to the GPU takes {_of_step(evidence, transfer.device_ms)} "
        f"({in_ms(transfer.host_ms)} on the host: {how})",
        numbers | loader_evidence(evidence.loader),
        advice,
    )


def _tells_waits(evidence: RunEvidence) -> bool:
    """Whether a wait in the module's code is known from its time without a core.

    Where another thread of the process waits for a core, no thread may use one; several ranks wait for each other, and
    on a GPU the training thread waits for autograd's.
    """
    cpu = evidence.cpu
    if cpu is None or evidence.on_device or evidence.world_size > 1:
        return False
    return cpu.contended is False or cpu.threads == 1


def _blocked_cost(name: str, evidence: RunEvidence) -> float:
    if evidence.cpu is None or not _tells_waits(evidence):
        return 0.0
    return evidence.cpu.blocked_pct(name) * region(evidence, name).device_ms / 100


def blocked_ms(evidence: RunEvidence) -> float:
    """Milliseconds per step in which the module's own code waits, of evidence as `self_times` gives it."""
    return sum(_blocked_cost(name, evidence) for name in ("forward", "backward"))


def _blocked(name: str, evidence: RunEvidence) -> Explanation:
    waits_ms, what = _blocked_cost(name, evidence), {"forward": "the module's training_step"}.get(name, name)
    return Explanation(
        f"{what} waits {_of_step(evidence, waits_ms)} without using a core",
        {"blocked_ms_per_step": waits_ms, f"{name}_ms_per_step": region(evidence, name).device_ms},
        "Look there for what waits: a lock, a file, a request to a server, a subprocess, sleep().",
    )


def computing(evidence: RunEvidence) -> tuple[Finding, ...]:
    """What a step on the CPU computes, as a finding beside others: without the waits, and without what those name."""
    if evidence.steps < MIN_STEPS or evidence.step_ms.mean <= 0 or evidence.on_device:
        return ()
    evidence = self_times(evidence)
    share_pct = 100 * sum(_computing(evidence).values()) / evidence.step_ms.mean
    return (_finding(_COMPUTING, evidence, share_pct),) if share_pct >= NAMED_FROM_PCT else ()


def _computing(evidence: RunEvidence) -> dict[str, float]:
    """Milliseconds per step by region."""
    return {
        name: max(region(evidence, name).device_ms - _blocked_cost(name, evidence), 0.0) for name in _ahead(evidence)
    }


def _computes(evidence: RunEvidence) -> Explanation:
    by_region = _computing(evidence)
    each = ", ".join(f"{name} {in_ms(ms)}" for name, ms in by_region.items())
    what = "computing" if _tells_waits(evidence) else "computing, or waiting in it,"
    return Explanation(
        f"{what} takes {_of_step(evidence, sum(by_region.values()))} on the CPU: {each}",
        {f"{name}_computes_ms_per_step": ms for name, ms in by_region.items()},
        "A recorded window (ForgeProfilerCallback) shows which operators take it. Cheaper: torch.compile, a smaller "
        "model, or a GPU if its operations are large.",
    )


def _optimizer_cost(evidence: RunEvidence) -> float:
    is_slow = share_pct(evidence, "optimizer") >= _SLOW_OPTIMIZER_PCT
    return region(evidence, "optimizer").device_ms if is_slow else 0.0


def _optimizer(evidence: RunEvidence) -> Explanation:
    optimizer = region(evidence, "optimizer")
    return Explanation(
        f"the optimizer's update, with clipping and zero_grad, takes {_of_step(evidence, optimizer.device_ms)}",
        {"optimizer_ms_per_step": optimizer.device_ms, "optimizer_host_ms_per_step": optimizer.host_ms},
        _update_advice(evidence),
    )


def _update_advice(evidence: RunEvidence) -> str:
    often = f"a larger batch, or a larger accumulate_grad_batches{accumulating(evidence.loader)}"
    optimizer = evidence.optimizer
    if optimizer is not None and optimizer.fused:
        return f"It is fused already: update less often ({often})."
    if evidence.on_device:
        return (
            "Give the optimizer fused=True, which replaces many kernels with a few; if it is fused already, update "
            f"less often: {often}."
        )
    kind, threads = "" if optimizer is None else optimizer.kind, None if evidence.cpu is None else evidence.cpu.threads
    return cpu_update_advice(kind, threads, evidence, often)


def _paced(evidence: RunEvidence) -> list[str]:
    """The regions in which the host sets the pace."""
    return [name for name in (*COMPUTE, "other") if _host_paced(evidence, name) and not _named_apart(evidence, name)]


def _paced_ms(evidence: RunEvidence) -> float:
    return sum(region(evidence, name).device_ms for name in _paced(evidence))


def _launch_cost(evidence: RunEvidence) -> float:
    drained = evidence.drained_pct
    return 0.0 if drained is None or drained < _MOSTLY_PCT else _paced_ms(evidence) * drained / 100


def _launch(evidence: RunEvidence) -> Explanation:
    paced, paced_ms = _paced(evidence), _paced_ms(evidence)
    return Explanation(
        f"the host sets the pace in {_of_step(evidence, paced_ms)} ({', '.join(paced)}): the GPU had caught up with it "
        f"at {evidence.drained_pct:.0f} % of the batch ends",
        {
            "host_paced_ms_per_step": paced_ms,
            **{f"{name}_host_ms_per_step": region(evidence, name).host_ms for name in paced},
        },
        'Launch less: a larger batch, torch.compile(mode="reduce-overhead") or CUDA graphs, if the model has none yet. '
        "Calls that wait for the GPU (.item(), .cpu(), printing a tensor) and cudaMalloc look the same here; a "
        "recorded window (ForgeProfilerCallback) distinguishes them and shows how long the GPU idles.",
    )


def _ahead(evidence: RunEvidence) -> list[str]:
    """The regions for which the host queues work ahead, where the GPU sets the pace."""
    return [name for name in COMPUTE if not _named_apart(evidence, name)]


def _compute_cost(evidence: RunEvidence) -> float:
    drained = evidence.drained_pct
    if drained is None or drained > _RARELY_PCT or backward_is_heavy(evidence) or _allocates(evidence):
        return 0.0
    return sum(region(evidence, name).device_ms for name in _ahead(evidence))


def _compute(evidence: RunEvidence) -> Explanation:
    work_ms, several = _compute_cost(evidence), evidence.world_size > 1
    communication = f" (communication of the {evidence.world_size} processes included)" if several else ""
    return Explanation(
        f"the run is GPU-bound: {_of_step(evidence, work_ms)} are work that the host had queued ahead in "
        f"{', '.join(_ahead(evidence))}{communication}; the GPU had caught up with it at {evidence.drained_pct:.0f} % "
        "of the batch ends",
        {"gpu_paced_ms_per_step": work_ms},
        'Make the work cheaper: Trainer(precision="bf16-mixed"), torch.compile, fused attention. A recorded '
        "window (ForgeProfilerCallback) shows which kernels take the time.",
    )


def _between_cost(evidence: RunEvidence) -> float:
    is_much = all_told_apart(evidence) and 100 * _between_ms(evidence) >= _OTHER_PCT * evidence.step_ms.mean
    return _between_ms(evidence) if is_much else 0.0


def _between_ms(evidence: RunEvidence) -> float:
    """Time between regions without what timing takes, which costs a GPU that is behind nothing."""
    hidden = evidence.on_device and (evidence.drained_pct or 0.0) < _MOSTLY_PCT
    own_ms = 0.0 if hidden or evidence.overhead_us is None else evidence.overhead_us / 1e3
    return max(region(evidence, "other").device_ms - own_ms, 0.0)


def _between(evidence: RunEvidence) -> Explanation:
    other = region(evidence, "other")
    on_host = f" ({in_ms(other.host_ms)} on the host)" if evidence.on_device else ""
    return Explanation(
        f"{_of_step(evidence, _between_ms(evidence))}{on_host} are spent outside data, transfer, forward, backward and "
        "optimizer: in callbacks, loggers, the progress bar, learning-rate schedulers and Lightning's loop",
        {"between_regions_ms_per_step": _between_ms(evidence), "between_regions_host_ms_per_step": other.host_ms},
        "The ledger of the run shows the time of each hook: make the longest cheaper, or call it every few steps. For "
        "loggers that is log_every_n_steps, for the progress bar TQDMProgressBar(refresh_rate=...). A larger batch "
        "shrinks its share: this time does not grow with it.",
    )


_CPU_RULES: Final = (
    Rule("input-bound", _input_cost, _input, at_most=lambda run: only_bounded(_wait(run), run.loader)),
    Rule(WORKER_RESTARTS, _restarts_cost, _restarts, at_most=lambda _: False),
    # a fused update takes little, and on a GPU the host is ahead again for the next step
    Rule("slow-optimizer", _optimizer_cost, _optimizer, at_most=lambda run: not run.on_device),
    Rule(BETWEEN_REGIONS, _between_cost, _between),
    Rule("blocked-forward", partial(_blocked_cost, "forward"), partial(_blocked, "forward")),
    Rule("blocked-backward", partial(_blocked_cost, "backward"), partial(_blocked, "backward")),
)
_COMPUTING: Final = Rule("compute-bound", lambda run: sum(_computing(run).values()), _computes, unpredicted)
_REGION_OF: Final = {
    "input-bound": "data", "transfer-bound": "transfer", "slow-optimizer": "optimizer", BETWEEN_REGIONS: "other",
    "blocked-forward": "forward", "blocked-backward": "backward",
}  # fmt: skip
RUN_RULES: Final = (
    *_CPU_RULES,
    Rule("transfer-bound", _transfer_cost, _transfer),
    Rule("launch-bound", _launch_cost, _launch, _paced_ms),
    Rule("compute-bound", _compute_cost, _compute, unpredicted),
)


# -- what the rules have in common -----------------------------------------------------------------------------------


def _host_paced(evidence: RunEvidence, name: str) -> bool:
    """Whether the GPU finished a region about when the host did."""
    found = region(evidence, name)
    return found.device_ms <= _FELL_BEHIND * found.host_ms + _LAST_KERNELS_MS


def _allocates(evidence: RunEvidence) -> bool:
    """Whether every step called `cudaMalloc`, for which the GPU may have waited; only a trace shows how long."""
    gpu = evidence.telemetry
    return gpu is not None and (gpu.device_allocs_per_step or 0.0) >= 1


def _named_apart(evidence: RunEvidence, name: str) -> bool:
    """Whether a region has a finding of its own, and so no part in the others."""
    cost = {"other": _between_cost, "optimizer": _optimizer_cost}.get(name)
    return cost is not None and cost(evidence) > 0


def _of_step(evidence: RunEvidence, ms: float) -> str:
    return f"{in_ms(ms)} of each {in_ms(evidence.step_ms.mean)} step"
