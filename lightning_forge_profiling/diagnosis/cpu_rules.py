"""What takes the time of a step on the CPU, as rules. Each part of the step belongs to one of them.

The data loader's part is `trace_rules.INPUT_BOUND`, on any device.
"""

from math import ceil
from typing import Final

from lightning_forge_profiling.diagnosis.rule import (
    MEASURE,
    RECORD_STACKS,
    Evidence,
    Explanation,
    Rule,
    RuleContext,
    in_function,
    in_ms,
    unpredicted,
)
from lightning_forge_profiling.results.analysis import RunEvidence
from lightning_forge_profiling.results.run import OTHERS, CpuTime, CpuUse

PYTHON_BOUND: Final = "python-bound"

_FUSED_ON_CPU: Final = frozenset({"Adam", "AdamW", "Adagrad"})
"""With fused=True, from PyTorch 2.4 on, and one thread their update took 0.1 to 0.5 of the time of the CPU's default, a
loop over the parameters, for 6 to 300 tensors of 256 to 1,048,576 elements; SGD's 0.3 to 1.0, and so it is left out.
Steps with Adam took 0.5 to 0.6, also beside a busy process (`python -m docs.measure_fixes --cpu fused`)."""

_LARGE: Final = 65_536
"""With several threads each tensor is an OpenMP region, for which all threads need a core at the same time: only where
cores are free, and half of the tensors have at least so many elements, which the loop divides among the threads too."""

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
    often = "a larger batch, accumulate_grad_batches"
    if cpu.update == "fused":
        advice = f"Update less often ({often})."
    else:
        advice = cpu_update_advice(cpu.optimizer, cpu.intra_op_threads, context.run, often)
    evidence: Evidence = {
        "optimizer_ms_per_step": cpu.optimizer_ms_per_step,
        "operator_calls_per_step": cpu.update_calls_per_step,
        "optimizer_class": cpu.optimizer,
        "update": cpu.update,
    }
    return Explanation(title, evidence, advice)


def cpu_update_advice(kind: str, threads: int | None, run: RunEvidence | None, often: str) -> str:
    """What to do about an update on the CPU that is not fused; `often` says how to update less often."""
    optimizer, use = (None, None) if run is None else (run.optimizer, run.cpu)
    large = optimizer is not None and optimizer.median_elements >= _LARGE and use is not None and use.contended is False
    if kind in _FUSED_ON_CPU and (threads == 1 or large):
        return f"Use {kind}(fused=True), or update less often ({often})."
    faster = f"{kind or 'the optimizer'} with fused=True or foreach=True, if it has them"
    return (
        f"Update less often ({often}). Measure {faster}: {MEASURE}. With several threads both can be slower, on a busy "
        "machine many times."
    )


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
    threads = _threads(cpu, None if context.run is None else context.run.cpu)
    advice = f"{threads}Cheaper: torch.compile, a smaller model, or a GPU if its operations are large."
    return Explanation(title, evidence, advice)


def _threads(cpu: CpuTime, use: CpuUse | None) -> str:
    """What to do about the number of threads: more of them only where cores were idle."""
    threads, cores = cpu.intra_op_threads, cpu.usable_cores if use is None else max(int(use.cores), 1)
    if threads is None:
        return f"The number of threads is unknown: {_measured('1 2 4')}. "
    if cores is None:
        return ""
    up_to = f"An operator uses up to {threads} "
    if threads > cores:
        fewer = f"OMP_NUM_THREADS={cores} or torch.set_num_threads({cores})"
        return f"{up_to}threads where there are {cores} usable cores: set {fewer}. "
    if use is not None and use.idle is not None:
        return _by_use(threads, cores, use.idle, use.used)
    unknown = f"{up_to}of {cores} usable cores, and whether the others are free is unknown: "
    return f"{unknown}{_measured(f'{threads} {cores}')}. " if threads < cores else ""


def _by_use(threads: int, cores: int, idle: float, used: float) -> str:
    more, others = min(threads + int(idle + OTHERS), cores), cores - used - idle
    if others <= OTHERS and more > threads:
        free = f"{idle:.1f} of the {cores} usable cores were free"
        more_of = f"try OMP_NUM_THREADS={more}, which gains for large operators alone: {_measured(f'{threads} {more}')}"
        return f"An operator uses up to {threads} threads, and {free}: {more_of}. "
    if others > OTHERS and threads > 1:
        return (
            f"Other processes, loader workers included, used {others:.1f} of the {cores} usable cores, and a thread "
            f"without a core holds up the others: {_measured(f'{max(threads - ceil(others), 1)} {threads}')}. "
        )
    return ""


def _measured(numbers: str) -> str:
    return (
        f"measure for n in {numbers}; do OMP_NUM_THREADS=$n forge-profiling run --no-window train.py; done, then "
        "forge-profiling compare A B"
    )


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
    held = in_function(context.rank, PYTHON_BOUND)
    advice = "Do more in each call: a larger batch, torch.compile, fewer and larger modules."
    if held is not None:
        advice = f"Look at {held.where} first: what it waits for, or computes in Python."
    elif not context.has_stacks:
        advice += f" {RECORD_STACKS} names the Python functions."
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
