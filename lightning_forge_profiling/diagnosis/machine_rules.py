"""What distorts a run's times, and a GPU's memory that gets full.

Settings that slow every operator or line, and waits for a core or the interpreter lock, lengthen any region: they come
before all other causes.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from msgspec.structs import replace

from lightning_forge_profiling.diagnosis.ledger_costs import in_steps_pct
from lightning_forge_profiling.diagnosis.rule import (
    MIN_SHARE_PCT,
    Evidence,
    Explanation,
    as_finding,
    listed,
    of_step,
    saving,
)
from lightning_forge_profiling.diagnosis.verdict import WORK, is_removable
from lightning_forge_profiling.schema import (
    GIB,
    KIB,
    MIB,
    OTHERS,
    Analysis,
    CpuUse,
    Finding,
    MemoryGrowth,
    RunEvidence,
    RunMemory,
    Switches,
)

DISTORTED: Final = "distorted-times"
STARVED: Final = "cpu-starved"
THROTTLED: Final = "cpu-throttled"
GIL_HELD: Final = "gil-held"
MACHINE: Final = frozenset({STARVED, THROTTLED, GIL_HELD})
UNRELIABLE: Final = MACHINE | {DISTORTED}  # as the verdict: shares beside it do not hold for the run without it

_OF_WORKERS: Final = frozenset({"worker-restarts", "input-bound", "loader-startup"})

_MOSTLY: Final = 0.5
_DECIDES_PCT: Final = 10.0


class _Setting(NamedTuple):
    """A setting that all times of a run include, so that the run without it would have others."""

    code: str
    on: str  # what is on, and in brackets what it does
    off: str  # how to switch it off
    fix: str = ""  # the same as code or as a command


def _distorting(switches: Switches | None) -> list[_Setting]:
    """Those that are on."""
    found: list[_Setting] = []
    if switches is None:
        return found
    if switches.anomaly_detection:
        on = "anomaly detection is on (a stack for each operator, a check of each gradient)"
        off = "Leave out Trainer(detect_anomaly=True) or torch.autograd.set_detect_anomaly(True)."
        fix = "Trainer(detect_anomaly=False)  # or torch.autograd.set_detect_anomaly(False)"
        found.append(_Setting("anomaly-detection", on, off, fix))
    if switches.launch_blocking:
        on = "CUDA_LAUNCH_BLOCKING=1 is set (the host waits for each kernel)"
        found.append(_Setting("launch-blocking", on, "Unset the variable.", "unset CUDA_LAUNCH_BLOCKING"))
    if switches.tracer:
        on = f"{switches.tracer} traces the training thread (it runs at each call or line of Python)"
        off = 'Run without the debugger, the coverage tool or Trainer(profiler="advanced").'
        found.append(_Setting("tracer", on, off))
    if switches.profiler:
        # Lightning's records four steps, and marks hooks and modules in all: steps of 2.1 ms took 4.1 (torch 2.13, CPU)
        on = "another torch profiler is on (it marks or records operators in each step)"
        off = 'Leave out Trainer(profiler="pytorch"), or limit torch.profiler to a few steps with a schedule.'
        found.append(_Setting("other-profiler", on, off))
    if switches.distributed_debug == "DETAIL":
        on = "TORCH_DISTRIBUTED_DEBUG=DETAIL is set (each collective is first compared over all ranks)"
        found.append(_Setting("distributed-debug", on, "Unset the variable.", "unset TORCH_DISTRIBUTED_DEBUG"))
    return found


def prioritize_distorting_settings(analysis: Analysis, run: RunEvidence) -> Analysis:
    """The analysis with the settings that all times include as its verdict, if any is on."""
    settings = _distorting(run.settings.switches)
    if not settings:
        return analysis
    it, them = ("it", "switch it off") if len(settings) == 1 else ("them", "switch them off")
    finding = Finding(
        code=DISTORTED,
        share_pct=100.0,
        of="times",
        rank=None,
        source="run",
        title=f"{listed([setting.on for setting in settings])}, and all times include {it}: {them}, then look again",
        evidence={"settings": ", ".join(setting.code for setting in settings)},
        advice=" ".join(dict.fromkeys(setting.off for setting in settings)),
        fix="; ".join(setting.fix for setting in settings if setting.fix),
    )
    return replace(
        analysis,
        verdict=DISTORTED,
        verdict_text=f"{DISTORTED}: {finding.title}. {finding.advice}",
        findings=(finding, *analysis.findings),
    )


def prioritize_machine_findings(analysis: Analysis, run: RunEvidence) -> Analysis:
    """The analysis with what the machine does to the run as its verdict, if it costs enough."""
    # it leaves the verdict to a cause that costs more by itself, or is one at all if the machine takes under 10 %.
    machine = machine_findings(run)
    if any(finding.code in _OF_WORKERS for finding in analysis.findings) and _workers_take_the_cores(run):
        machine = tuple(finding for finding in machine if finding.code != STARVED)
    if not machine:
        return analysis
    first, others = machine[0], analysis.findings
    unreliable = "All other shares include such waits and are unreliable."
    note = _joined(analysis.findings_note, unreliable.rstrip("."))
    largest = others[0] if others and others[0].code == analysis.verdict else None
    pct = sum(finding.share_pct for finding in machine)
    in_steps = in_steps_pct(run) / 100
    least_pct = in_steps * (MIN_SHARE_PCT if pct < _DECIDES_PCT else pct)
    if largest is not None and _by_itself_pct(largest, pct, in_steps) > least_pct:
        note = _joined(analysis.findings_note, f"Shares include waits for the machine ({pct:.0f} % of the step)")
        return replace(analysis, findings=(largest, *machine, *others[1:]), findings_note=note)
    return replace(
        analysis,
        verdict=first.code,
        verdict_text=f"{first.code}: {first.title}. {first.remedy} {unreliable}",
        findings=(*machine, *others),
        findings_note=note,
    )


def _workers_take_the_cores(run: RunEvidence) -> bool:
    """Whether waits for a core are no case of their own beside a finding on the loader: its workers are the cause."""
    cpu, loader = run.machine.cpu, run.settings.loader
    if cpu is None or loader is None or not loader.num_workers:
        return False
    return cpu.workers > max(OTHERS, _others(cpu)) and cpu.stolen_pct <= _MOSTLY * (cpu.waits_pct or 0.0)


def _by_itself_pct(finding: Finding, machine_pct: float, in_steps: float) -> float:
    """What a finding takes of the fit at the least, without the waits for the machine in it.

    They come whenever the thread runs, and so in proportion. But all of them may be in the wait for a worker, whose own
    waits for a core are not this thread's. The work itself cannot be taken away, so the machine comes before it.
    """
    if finding.code in WORK and not is_removable(finding) and machine_pct >= _DECIDES_PCT:
        return 0.0
    # of the fit, restarts and what a trace has are measured each time; else no interval is too few steps for one
    is_measured = finding.of == "run" or finding.source == "trace" or finding.code == "worker-restarts"
    at_least_pct = (finding.share_pct if is_measured else 0.0) if finding.low_pct is None else finding.low_pct
    of_fit_pct = at_least_pct if finding.of == "run" else in_steps * at_least_pct
    if finding.code in _OF_WORKERS:
        return of_fit_pct - in_steps * machine_pct
    return of_fit_pct * (1 - machine_pct / 100)


def _joined(*sentences: str) -> str:
    return ". ".join(filter(None, sentences))


def machine_findings(run: RunEvidence) -> tuple[Finding, ...]:
    """What the machine does to the run, the costliest first."""
    cpu = run.machine.cpu
    if cpu is None or run.timing.step_ms.mean <= 0:
        return ()
    findings = []
    waits_pct = _exposed(run, (cpu.waits_pct or 0.0) + cpu.stolen_pct)
    if waits_pct >= MIN_SHARE_PCT:
        throttled = cpu.throttled_periods > 0 and cpu.throttled_pct >= MIN_SHARE_PCT
        code, explain = (THROTTLED, _throttled) if throttled else (STARVED, _starved)
        findings.append(_finding(code, explain, waits_pct, run, cpu))
    if cpu.gil is not None and _exposed(run, cpu.gil.low_pct) >= MIN_SHARE_PCT:
        findings.append(_finding(GIL_HELD, _held, _exposed(run, cpu.gil.pct), run, cpu))
    return tuple(sorted(findings, key=lambda finding: -finding.share_pct))


def _exposed(run: RunEvidence, pct: float) -> float:
    """The part of the host's waits that the GPU waits for too."""
    return (
        pct * run.timing.gpu_starved_pct / 100
        if run.timing.on_device and run.timing.gpu_starved_pct is not None
        else pct
    )


def _finding(
    code: str, explain: Callable[[RunEvidence, CpuUse, str], Explanation], pct: float, run: RunEvidence, cpu: CpuUse
) -> Finding:
    interval = cpu.gil if code == GIL_HELD else cpu.waits
    step_ms, waits_ms = run.timing.step_ms.mean, pct * run.timing.step_ms.mean / 100
    numbers: Evidence = {"waits_ms_per_step": round(waits_ms, 3), "step_ms": round(step_ms, 3)}
    explained = explain(run, cpu, f"training waits {of_step(waits_ms, step_ms)} for").after(numbers)
    between_pct = None if interval is None else (interval.low_pct, interval.high_pct)
    saves = saving(waits_ms, step_ms, at_most=True)
    return as_finding(code, explained, share_pct=pct, saves=saves, run=run, between_pct=between_pct)


def _waiting(cpu: CpuUse) -> Evidence:
    numbers: Evidence = {
        "usable_cores": cpu.cores,
        "used_cores": round(cpu.used, 2),
        "child_processes_cores": round(cpu.workers, 2),
        "operator_threads": cpu.threads,
        "involuntary_switches_per_s": round(cpu.switches_per_s, 1),
        "cpu_pressure_pct": round(cpu.pressure_pct, 1),
        "stolen_pct": round(cpu.stolen_pct, 1),
        "throttled_pct": round(cpu.throttled_pct, 1),
    }
    return numbers | ({"unknown": ", ".join(cpu.missing)} if cpu.missing else {})


def _others(cpu: CpuUse) -> float:
    """Cores that processes use which are not the run's."""
    return 0.0 if cpu.idle is None else cpu.cores - cpu.used - cpu.idle - cpu.workers


def _starved(run: RunEvidence, cpu: CpuUse, waits: str) -> Explanation:
    others = _others(cpu)
    cores = "the one usable core" if cpu.cores == 1 else f"the {cpu.cores:g} usable cores"
    title, advice, fix = f"{waits} a core", [], ""
    if cpu.stolen_pct > _MOSTLY * (cpu.waits_pct or 0.0):
        title += f": the hypervisor gave {cpu.stolen_pct:.0f} % of the cores' time to other machines"
        advice.append("Move to a machine whose cores are not shared.")
    elif others > OTHERS:
        title += f"; other processes use {others:.1f} of {cores}"
        advice.append(
            "Stop the other processes (top shows them), or give training cores of its own: taskset -c, the batch "
            "system's --cpus-per-task."
        )
    if cpu.workers > max(OTHERS, others):
        title += f"; processes that the run has started use {cpu.workers:.1f} of {cores}"
        workers = run.settings.loader.num_workers if run.settings.loader is not None else 0
        advice.append(f"Start fewer{f' than num_workers={workers}' if workers else ''}, or let them compute less.")
    if cpu.threads > max(cpu.cores, 1):
        fix = f"OMP_NUM_THREADS={max(int(cpu.cores), 1)}"
        advice.append(f"An operator uses {cpu.threads} threads: set {fix}.")
    if not advice:
        advice.append(
            f"This process has {cpu.cores:g} cores for itself (nproc, divided by the ranks on the machine): run fewer "
            f"processes and threads (OMP_NUM_THREADS, now {cpu.threads}), or on more cores."
        )
    return Explanation(title, _waiting(cpu), " ".join(advice), fix)


def _throttled(_: RunEvidence, cpu: CpuUse, waits: str) -> Explanation:
    return Explanation(
        f"{waits} its CPU quota, which stopped its control group in {cpu.throttled_periods} periods",
        _waiting(cpu),
        "Raise the quota (docker --cpus, resources.limits.cpu of Kubernetes, CPUQuota of systemd), or use fewer "
        f"threads: OMP_NUM_THREADS (now {cpu.threads}), num_workers.",
    )


def _held(_: RunEvidence, cpu: CpuUse, waits: str) -> Explanation:
    thread = f"the Python thread {cpu.gil_thread}" if cpu.gil_thread else "another Python thread"
    return Explanation(
        f"{waits} the interpreter lock, which {thread} holds",
        {"thread": cpu.gil_thread or "unknown"},
        "Move that thread's work to a process (multiprocessing, DataLoader workers), or to calls that release the "
        "lock, as most of NumPy's and PyTorch's do.",
    )


# -- memory on a GPU that grows until it is full -----------------------------------------------------------------------

MEMORY: Final = "memory-near-limit"

ACTIVATIONS: Final = "activations and temporaries"
CACHE: Final = "cached by the allocator"

_LEAST_GIB: Final = 0.01
_MANY_TIMES: Final = 10.0
_WHAT: Final = {
    "parameters": "the model's parameters",
    "gradients": "gradients",
    "optimizer": "the optimizer's state",
    "buffers": "the model's buffers",
    "other tensors": "tensors that are kept from one step to the next and are not the model's",
    "activations": "activations and temporaries, which a step frees again",
    "host": "what keeps it is not known",
    "workers": "it is the DataLoader's workers that grow",
}
_ADVICE: Final = {
    "host": (
        "Look for what is added to in each step and never cleared: a list, a dictionary or a cache in a function, a "
        "closure or a library. tracemalloc shows the lines: start() before the fit, and compare two take_snapshot() "
        "some hundred steps apart."
    ),
    "workers": (
        "Look in the dataset for what is added to and never cleared, as a cache of samples, which fills once in each "
        "worker: bound it (functools.lru_cache(maxsize=...)), or leave it out."
    ),
    "other tensors": (
        "Look for a list or a dictionary that gets a tensor in each step: a loss that is appended holds the graph of "
        "its step (append loss.detach(), or loss.item() every few steps), and predictions that are kept for a metric "
        "belong on the CPU (preds.cpu()). ForgeProfilerCallback(memory_snapshot=N) shows the line that allocates them."
    ),
    "activations": (
        "Batches get larger: bound the length of a sequence or the number of tokens of a batch. Activation "
        "checkpointing (torch.utils.checkpoint) needs less of each."
    ),
}
_OF_MODEL: Final = (
    "Look for a layer, a buffer or an entry of the optimizer's state that is added or enlarged in each step."
)


_ON_HOST: Final = frozenset({"host", "workers"})
_HELD: Final = {"graphs": "a tensor with its graph", "tensors": "a tensor", "": "an entry"}
_RELEASES: Final = {
    "graphs": "Keep loss.detach(), or loss.item() every few steps: a tensor that is kept with its graph keeps all that "
    "its step computed.",
    "tensors": "Keep what is needed of each tensor, as a sum or a number, or clear it at the end of each epoch; a "
    "metric that keeps all predictions has to be reset.",
    "": "Clear it at the end of each epoch, or bound its length (collections.deque(maxlen=...)).",
}


def growth_words(growth: MemoryGrowth) -> str:
    """What grows, and when the memory is full."""
    memory, held = "host memory" if growth.category in _ON_HOST else "memory on the GPU", growth.holder
    grows = f"{memory} grows by {_amount(growth.bytes_per_step)} a step"
    if held is None:
        what = f"{grows} (steps {growth.from_step:,} to {growth.to_step:,}): {_WHAT[growth.category]}"
    else:
        times = f"{held.per_step:.2g} times "
        gets, at = f"{'' if times == '1 times ' else times}{_HELD[held.holds]}", held.where and f", {held.where}"
        what = f"{grows}: {held.name} ({held.kind} of {held.owner}{at}) gets {gets} in each"
    full = "" if growth.full_step is None else f". If that goes on, it is full at about step {growth.full_step:,}"
    return f"{what}{full}"


def growth_evidence(growth: MemoryGrowth) -> Evidence:
    """The numbers, and what keeps the memory."""
    evidence: Evidence = {"grows": growth.category, "mib_per_step": round(growth.bytes_per_step / MIB, 3)}
    if growth.holder is not None:
        held = growth.holder
        evidence |= {"where": f"{held.name} at {held.where}" if held.where else held.name, "entries": held.entries}
    return evidence if growth.full_step is None else evidence | {"full_step": growth.full_step}


def growth_advice(growth: MemoryGrowth) -> str:
    """What to do about it."""
    if growth.holder is not None:
        return _RELEASES[growth.holder.holds]
    return _ADVICE.get(growth.category, _OF_MODEL)


def _amount(count: float) -> str:
    """Bytes with three digits: 16.0 MiB, 0.50 KiB."""
    unit, size = ("MiB", MIB) if count >= MIB / 10 else ("KiB", KIB)
    return f"{count / size:.{0 if count >= 100 * size else 1 if count >= 10 * size else 2}f} {unit}"


def memory_findings(run: RunEvidence) -> tuple[Finding, ...]:
    """A finding where memory grows towards the GPU's limit. It costs no time: its share is of the memory."""
    memory = run.memory
    if memory is None or memory.growth is None or not memory.curve.peak_gib or memory.limit_gib <= 0:
        return ()
    growth, peak = memory.growth, memory.curve.peak_gib[-1]
    explained = Explanation(
        growth_words(growth),
        growth_evidence(growth) | {"peak_gib": peak, "limit_gib": round(memory.limit_gib, 3)},
        growth_advice(growth),
    )
    return (as_finding(MEMORY, explained, share_pct=100 * peak / memory.limit_gib, run=run, of="memory"),)


def memory_layers(memory: RunMemory, *, least_gib: float = _LEAST_GIB) -> dict[str, list[float]]:
    """What fills the memory at each point of the curve, in GiB by name; smaller layers are left out."""
    model, curve = memory.model, memory.curve
    of_model = {
        "parameters": model.parameters_bytes,
        "gradients": model.gradients_bytes,
        "optimizer": model.optimizer_bytes,
        "buffers": model.buffers_bytes,
    }
    layers = {name: [count / GIB] * len(curve.steps) for name, count in of_model.items()}
    layers["other tensors"] = [max(kept - model.bytes / GIB, 0.0) for kept in curve.kept_gib]
    if memory.peak_known:
        pairs = zip(curve.peak_gib, curve.kept_gib, strict=True)
        layers[ACTIVATIONS] = [max(peak - kept, 0.0) for peak, kept in pairs]
        held = zip(curve.reserved_gib, curve.peak_gib, strict=True)
        layers[CACHE] = [max(reserved - peak, 0.0) for reserved, peak in held]
    return {name: gib for name, gib in layers.items() if max(gib, default=0.0) >= least_gib}


def largest_batch(memory: RunMemory) -> float | None:
    """How many times larger a batch may be; None where that is unknown, or not near.

    The peak is in backward, most often, before which Lightning frees the gradients: they are counted to what a batch
    takes.
    """
    kept, peak = memory.curve.kept_gib[-1], memory.curve.peak_gib[-1]
    if memory.growth is not None or not memory.peak_known or peak - kept < _LEAST_GIB:
        return None
    at_peak = max(kept - memory.model.gradients_bytes / GIB, 0.0)
    times = (memory.limit_gib - at_peak) / (peak - at_peak)
    return times if 0 < times < _MANY_TIMES else None
