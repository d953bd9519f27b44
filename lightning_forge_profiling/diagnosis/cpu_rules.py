"""What takes the time of a step on the CPU, as rules. Each part of the step belongs to one of them."""

from typing import Final

from lightning_forge_profiling.diagnosis.rule import Evidence, Rule, Seen, Told, in_ms
from lightning_forge_profiling.results.cpu import CpuTime

__all__ = ["CPU_RULES", "PYTHON_BOUND"]

PYTHON_BOUND: Final = "python-bound"

_FUSED_ON_CPU: Final = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})
"""With fused=True, from PyTorch 2.4 on. On one core with torch 2.13 the update of AdamW then takes 0.2 to 0.3 of the
time of the CPU's default, a loop over the parameters, with foreach=True 0.5 to 0.6; that of SGD, fused, 0.6 to 1.1."""

_FUSED_IS_SLOW_PCT: Final = 20.0
"""An update that is fused already is named from here on, as in a run without a trace."""


def _optimizer_cost(seen: Seen) -> float:
    cpu = seen.rank.cpu
    if cpu is None or (cpu.update == "fused" and seen.pct(cpu.optimizer_ms_per_step) < _FUSED_IS_SLOW_PCT):
        return 0.0
    return cpu.optimizer_ms_per_step


def _optimizer(seen: Seen) -> Told:
    cpu = _cpu(seen)
    called = f"{cpu.optimizer}'s update" if cpu.optimizer else "the optimizer's update"
    how = {"loop": ", a loop over the parameters", "foreach": ", with foreach", "fused": ", which is fused", "": ""}
    title = (
        f"{called} takes {in_ms(cpu.optimizer_ms_per_step)} of each {seen.step} step on the CPU: "
        f"{cpu.update_calls_per_step:.0f} calls of operators{how[cpu.update]}"
    )
    less_often = "update less often: a larger batch, or accumulate_grad_batches"
    if cpu.update == "fused":
        advice = f"{less_often[0].upper()}{less_often[1:]}."
    elif cpu.optimizer in _FUSED_ON_CPU:
        advice = f"Give {cpu.optimizer} fused=True (on a CPU from PyTorch 2.4 on); else {less_often}."
    elif cpu.update == "foreach":
        advice = f"Give the optimizer fused=True where it has it; else {less_often}."
    else:
        advice = f"Give the optimizer fused=True, or foreach=True where it has no fused kernel; else {less_often}."
    evidence: Evidence = {
        "optimizer_ms_per_step": cpu.optimizer_ms_per_step,
        "operator_calls_per_step": cpu.update_calls_per_step,
        "optimizer_class": cpu.optimizer,
        "update": cpu.update,
    }
    return title, evidence, advice


def _compute(seen: Seen) -> Told:
    cpu = _cpu(seen)
    costliest = ", ".join(f"{name} {seen.pct(ms):.0f} %" for name, ms in cpu.costliest_ms_per_step.items())
    title = (
        f"operators outside of data loader and optimizer take {in_ms(cpu.operators_ms_per_step)} of each {seen.step} "
        f"step on the CPU; most time of their own: {costliest} of the step"
    )
    evidence: Evidence = {
        "operators_ms_per_step": cpu.operators_ms_per_step,
        "own_time_per_step": ", ".join(f"{name} {in_ms(ms)}" for name, ms in cpu.costliest_ms_per_step.items()),
        "threads_that_run_operators": cpu.operator_threads,
    }
    if cpu.intra_op_threads is not None:
        evidence["intra_op_threads"] = cpu.intra_op_threads
    if cpu.usable_cores is not None:
        evidence["usable_cores"] = cpu.usable_cores
    return (
        title,
        evidence,
        _threads(cpu) + "Cheaper: torch.compile, a smaller model, or a GPU if its operations are large.",
    )


def _threads(cpu: CpuTime) -> str:
    """What to do about the number of threads, where it does not fit that of the cores."""
    threads, cores = cpu.intra_op_threads, cpu.usable_cores
    if threads is None:
        return "Check that torch.get_num_threads() is the number of cores that are free for it. "
    if cores is None or threads == cores:
        return ""
    mean = f"OMP_NUM_THREADS={cores} or torch.set_num_threads({cores})"
    if threads > cores:
        return f"An operator uses up to {threads} threads where there are {cores} usable cores: set {mean}. "
    return f"An operator uses up to {threads} of {cores} usable cores: try {mean}. "


def _python_cost(seen: Seen) -> float:
    return seen.rank.cpu.python_ms_per_step if seen.rank.cpu else 0.0


def _python(seen: Seen) -> Told:
    cpu = _cpu(seen)
    title = (
        f"{in_ms(cpu.python_ms_per_step)} of each {seen.step} step pass outside of operators, data loader and "
        "optimizer: in Python, the training loop and callbacks, to which recording adds"
    )
    evidence: Evidence = {
        "outside_of_operators_ms_per_step": cpu.python_ms_per_step,
        "operators_ms_per_step": cpu.operators_ms_per_step,
    }
    advice = (
        "Do more in each call: a larger batch, torch.compile, fewer and larger modules. "
        "ForgeProfilerCallback(with_stack=True) records the Python functions."
    )
    return title, evidence, advice


def _cpu(seen: Seen) -> CpuTime:
    """The figures of a rank for which a rule has found a cost."""
    if seen.rank.cpu is None:
        raise ValueError("a rank that trains on a GPU")
    return seen.rank.cpu


CPU_RULES: Final = (
    Rule("slow-optimizer", _optimizer_cost, _optimizer, _optimizer_cost),
    Rule("compute-bound", lambda seen: seen.rank.cpu.operators_ms_per_step if seen.rank.cpu else 0.0, _compute),
    Rule(PYTHON_BOUND, _python_cost, _python, _python_cost),
)
"""The data loader's part is the rule for any device's."""
