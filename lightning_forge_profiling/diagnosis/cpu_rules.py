"""What takes the time of a step on the CPU, as rules. Each part of the step belongs to one of them.

The data loader's part is `trace_rules.INPUT_BOUND`, on any device.
"""

from typing import Final

from lightning_forge_profiling.diagnosis.rule import Evidence, Explanation, Rule, in_ms, unpredicted
from lightning_forge_profiling.diagnosis.rule_context import RuleContext
from lightning_forge_profiling.results.cpu import CpuTime

PYTHON_BOUND: Final = "python-bound"

_FUSED_ON_CPU: Final = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})
"""With fused=True, from PyTorch 2.4 on. On one core with torch 2.13 the update of AdamW then takes 0.2 to 0.3 of the
time of the CPU's default, a loop over the parameters, with foreach=True 0.5 to 0.6; that of SGD, fused, 0.6 to 1.1."""

_FUSED_IS_SLOW_PCT: Final = 20.0
"""An update that is fused already is named from here on, as in a run without a trace."""


def _optimizer_cost(context: RuleContext) -> float:
    cpu = context.rank.cpu
    if cpu is None or (cpu.update == "fused" and context.pct(cpu.optimizer_ms_per_step) < _FUSED_IS_SLOW_PCT):
        return 0.0
    return cpu.optimizer_ms_per_step


def _optimizer(context: RuleContext) -> Explanation:
    cpu = _cpu(context)
    called = f"{cpu.optimizer}'s update" if cpu.optimizer else "the optimizer's update"
    how = {"loop": " in a loop over the parameters", "foreach": " with foreach", "fused": ", already fused", "": ""}
    title = (
        f"{called} takes {context.of_step(cpu.optimizer_ms_per_step)} on the CPU: "
        f"{cpu.update_calls_per_step:.0f} operator calls{how[cpu.update]}"
    )
    less_often = "update less often (a larger batch, accumulate_grad_batches)"
    if cpu.update == "fused":
        advice = f"{less_often[0].upper()}{less_often[1:]}."
    elif cpu.optimizer in _FUSED_ON_CPU:
        advice = f"Use {cpu.optimizer}(fused=True), or {less_often}."
    elif cpu.update == "foreach":
        advice = f"Use fused=True if the optimizer has it, or {less_often}."
    else:
        advice = f"Use fused=True (foreach=True if the optimizer has no fused kernel), or {less_often}."
    evidence: Evidence = {
        "optimizer_ms_per_step": cpu.optimizer_ms_per_step,
        "operator_calls_per_step": cpu.update_calls_per_step,
        "optimizer_class": cpu.optimizer,
        "update": cpu.update,
    }
    return Explanation(title, evidence, advice)


def _compute_cost(context: RuleContext) -> float:
    return context.rank.cpu.operators_ms_per_step if context.rank.cpu else 0.0


def _compute(context: RuleContext) -> Explanation:
    cpu = _cpu(context)
    costliest = ", ".join(f"{name} {context.pct(ms):.0f} %" for name, ms in cpu.costliest_ms_per_step.items())
    title = (
        "operators outside data loader and optimizer take "
        f"{context.of_step(cpu.operators_ms_per_step, bound=True)} on the CPU; largest self times: {costliest} of "
        "the step"
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
    advice = f"{_threads(cpu)}Cheaper: torch.compile, a smaller model, or a GPU if its operations are large."
    return Explanation(title, evidence, advice)


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


def _python_cost(context: RuleContext) -> float:
    return context.rank.cpu.python_ms_per_step if context.rank.cpu else 0.0


def _python(context: RuleContext) -> Explanation:
    cpu = _cpu(context)
    title = (
        f"{context.of_step(cpu.python_ms_per_step, bound=True)} are spent outside operators, data loader and "
        f"optimizer: in Python, the training loop and callbacks{'' if context.live else ' (recording adds to it)'}"
    )
    evidence: Evidence = {
        "outside_of_operators_ms_per_step": cpu.python_ms_per_step,
        "operators_ms_per_step": cpu.operators_ms_per_step,
    }
    advice = (
        "Do more in each call: a larger batch, torch.compile, fewer and larger modules. "
        "ForgeProfilerCallback(with_stack=True) records the Python functions."
    )
    return Explanation(title, evidence, advice)


def _cpu(context: RuleContext) -> CpuTime:
    """The figures of a rank for which a rule has found a cost."""
    if context.rank.cpu is None:
        raise ValueError("a rank that trains on a GPU")
    return context.rank.cpu


CPU_RULES: Final = (
    Rule("slow-optimizer", _optimizer_cost, _optimizer),
    Rule("compute-bound", _compute_cost, _compute, unpredicted),
    Rule(PYTHON_BOUND, _python_cost, _python),
)
"""The rules for a rank without GPU work, beside `trace_rules.INPUT_BOUND`."""
