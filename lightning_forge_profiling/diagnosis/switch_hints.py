"""Hints on switches that slow a run down: what is on, what is known of its cost, and how to switch it off."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from lightning_forge_profiling.results.analysis import Hint
from lightning_forge_profiling.results.switches import Switches

_UNKNOWN: Final = "what it costs here was not measured"
_MOST_OF_PCT: Final = 99.5


@dataclass(frozen=True, slots=True)
class _Rule:
    """A switch.

    Attributes:
        code: the code of its hint.
        on: what is on, with what it does; "" if it is off.
        off: what to do about it.
        name: its short name if the times of the run are not those of the run without it; "" otherwise.
        cost: what is known of its cost.
    """

    code: str
    on: Callable[[Switches], str]
    off: str
    name: str = ""
    cost: str = _UNKNOWN


def _when(field: str, text: str) -> Callable[[Switches], str]:
    return lambda switches: text.format(value) if (value := getattr(switches, field)) else ""


def _deterministic(switches: Switches) -> str:
    names = {"algorithms": "torch.use_deterministic_algorithms is on", "cudnn": "cudnn.deterministic is on"}
    return f"{names[switches.deterministic]}: slower kernels may be chosen" if switches.deterministic else ""


def _distributed_debug(switches: Switches) -> str:
    does = {"INFO": "DDP logs what it does", "DETAIL": "each collective is first compared over all ranks"}
    level = switches.distributed_debug
    return f"TORCH_DISTRIBUTED_DEBUG={level} is set: {does.get(level, 'PyTorch checks more')}" if level else ""


def _float64(switches: Switches) -> str:
    pct = switches.float64_pct
    share = "all" if pct >= _MOST_OF_PCT else f"{pct:.1g} %" if pct < 1 else f"{pct:.0f} %"
    return f"{share} of the trainable parameters are float64: twice the memory of float32" if pct else ""


_RULES: Final = (
    _Rule(
        "anomaly-detection",
        _when("anomaly_detection", "anomaly detection is on: a stack for each operator, a check of each gradient"),
        "Remove Trainer(detect_anomaly=True) or torch.autograd.set_detect_anomaly(True)",
        name="anomaly detection",
    ),
    _Rule(
        "launch-blocking",
        _when("launch_blocking", "CUDA_LAUNCH_BLOCKING=1 is set: the host waits for each kernel"),
        "Unset the environment variable",
        name="CUDA_LAUNCH_BLOCKING",
    ),
    _Rule(
        "tracer",
        _when("tracer", "{} traces the training thread: it runs at each call or line of Python"),
        "Run without the debugger, coverage tool or profiler",
        name="a tracer of Python code",
    ),
    _Rule(
        "other-profiler",
        _when("profiler", "another torch profiler is running: it records each operator"),
        "Remove it, or limit it to a few steps with a schedule",
        name="another torch profiler",
    ),
    _Rule(
        "deterministic",
        _deterministic,
        "Remove Trainer(deterministic=True) or the call, if the run need not repeat bit for bit",
    ),
    _Rule(
        "distributed-debug",
        _distributed_debug,
        "Unset the environment variable",
    ),
    _Rule(
        "float64",
        _float64,
        'Leave out Trainer(precision="64-true") and torch.set_default_dtype(torch.float64), or call model.float()',
    ),
    _Rule(
        "tf32-off",
        _when(
            "tf32_off", "float32 matrix products do not use the GPU's TF32 tensor cores, which keep 10 bits of mantissa"
        ),
        'Use them with torch.set_float32_matmul_precision("high"), if the loss allows it',
    ),
    _Rule(
        "pin-memory",
        _when("pin_memory_unused", "the DataLoader has pin_memory=True, and there is no GPU"),
        "Remove it",
        cost="PyTorch ignores it, so it costs nothing",
    ),
)


def switch_hints(switches: Switches | None) -> tuple[Hint, ...]:
    """One hint for each switch that is on.

    Example:
        >>> print(*(hint.text for hint in switch_hints(Switches(pin_memory_unused=True))))
        the DataLoader has pin_memory=True, and there is no GPU; PyTorch ignores it, so it costs nothing. Remove it.
    """
    if switches is None:
        return ()
    return tuple(
        Hint(code=rule.code, rank=0, text=f"{on}; {rule.cost}. {rule.off}.")
        for rule in _RULES
        if (on := rule.on(switches))
    )


def switched_on(switches: Switches | None) -> str:
    """What stands beside the verdict if the times are not those of the run without a switch; "" otherwise.

    Example:
        >>> switched_on(Switches(anomaly_detection=True, profiler=True))
        'All times include anomaly detection and another torch profiler, which were on.'
    """
    names = [] if switches is None else [rule.name for rule in _RULES if rule.name and rule.on(switches)]
    if not names:
        return ""
    last = names.pop()
    listed = f"{', '.join(names)} and {last}" if names else last
    return f"All times include {listed}, which {'were' if names else 'was'} on."
