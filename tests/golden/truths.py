"""What is right of small faulty traces and of records of mistakes, where what was kept may be wrong.

A figure is named by its path in an analysis. Where today's is wrong, the reason stands beside it, and
`tests/test_golden.py` expects the test to fail: once it passes, the reason is to be deleted.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import msgspec

from lightning_forge_profiling.schema import NO_VERDICT
from tests.golden import outputs
from tests.golden.verdicts import TRACES, VERDICTS, analysis_of

FAULTS: Final = Path(__file__).parent / "faults"
_TOLERANCE: Final = 0.01

Check = Callable[[Any], bool]


class Truth(NamedTuple):
    """What is right of a case, and why it is wrong today; "" where it is not."""

    case: str
    figure: str
    right: str
    check: Check
    wrong: str = ""


def near(value: float) -> tuple[str, Check]:
    """About this number."""
    return f"{value:g}", lambda found: found is not None and abs(found - value) <= _TOLERANCE * abs(value)


def at_most(value: float) -> tuple[str, Check]:
    """This number or less."""
    return f"at most {value:g}", lambda found: (found or 0.0) <= value


def one_of(*values: object) -> tuple[str, Check]:
    """Any of these."""
    return " or ".join(map(str, values)), lambda found: found in values


def none_of(*values: object) -> tuple[str, Check]:
    """Anything else."""
    return f"not {' or '.join(map(str, values))}", lambda found: found not in values


def names(*words: str) -> tuple[str, Check]:
    """A text whose first sentence has one of these."""
    right = f"first names {' or '.join(words)}"
    return right, lambda text: any(word in text.partition(". ")[0] for word in words)


_CPU_ADVICE: Final = none_of("python-bound", "compute-bound")

_FAULTS: Final[dict[str, tuple[tuple[str, tuple[str, Check], str], ...]]] = {
    "windows_without_steps": (
        ("ranks/0/steps", near(4), ""),
        ("ranks/0/step_ms/mean", near(20.0), ""),
        ("ranks/0/gpu/busy_pct", near(50.0), ""),
        ("ranks/0/gpu/kernels_per_step", near(200.0), ""),
    ),
    "queue_before_recording": (
        ("verdict", none_of("launch-bound"), ""),
        ("ranks/0/idle/python/ms_per_step", at_most(2.0), ""),  # the host was recorded for as long
        ("ranks/0/gpu/busy_ms_per_step", near(150.0), ""),
    ),
    "one_long_gap": (
        ("verdict", none_of("launch-bound"), ""),  # 199 ms pass in `decode`, before the first copy
        ("ranks/0/host/idle_launching_ms_per_step", at_most(2.0), ""),
        ("ranks/0/gpu/busy_ms_per_step", near(50.5), ""),
        ("ranks/0/step_ms/mean", near(260.0), ""),  # as its mark
    ),
    "two_runs_one_folder": (  # 390 s apart, by two processes
        ("all_ranks", near(1), ""),
        ("ranks/0/step_ms/mean", near(10.0), ""),
        ("ranks/0/gpu/busy_pct", near(50.0), ""),
    ),
    "cpu_tail": (
        ("ranks/0/step_ms/mean", near(100.0), ""),
        ("ranks/0/gpu/busy_pct", near(0.9), ""),
        ("ranks/0/gpu/busy_ms_per_step", near(0.9), ""),
    ),
    "mtia": (
        ("verdict", _CPU_ADVICE, ""),
        ("ranks/0/step_ms/mean", near(100.0), ""),
    ),
    "nothing_recorded": (
        ("verdict", one_of(NO_VERDICT), ""),
    ),
    "gloo_cpu": (  # 173 of 210 ms
        ("verdict", one_of("communication-bound"), ""),
        ("ranks/0/step_ms/mean", near(210.0), ""),
    ),
    "cuda_initialisation": (
        ("verdict", none_of("sync-bound"), ""),
        ("ranks/0/gpu/busy_ms_per_step", near(8.01), ""),
    ),
    "rocm_device_id": (
        ("ranks/0/device", one_of("AMD Instinct MI300X"), ""),
        ("ranks/0/gpu/busy_pct", near(80.0), ""),
    ),
    "overflowing_duration": (
        ("ranks/0/step_ms/mean", near(10.0), ""),
        ("ranks/0/host/launches_per_step", near(99.0), ""),
    ),
    "gpu_clock_1h_behind": (  # or no figure at all
        ("ranks/0/step_ms/mean", near(9.96), ""),
        ("ranks/0/gpu/busy_ms_per_step", near(4.95), ""),
    ),
    "gpu_clock_5ms_behind": (
        ("ranks/0/step_ms/mean", near(9.96), ""),
        ("ranks/0/gpu/busy_ms_per_step", near(4.95), ""),
    ),
    "launches_without_kernels": (
        ("verdict", one_of(NO_VERDICT), ""),
        ("ranks/0/step_ms/mean", near(10.0), ""),
    ),
    "half_zero": (
        ("ranks/0/step_ms/mean", near(10.0), ""),
    ),
    "two_gpus_one_process": (  # in turns
        ("verdict", one_of("gpu-idle"), ""),
        ("ranks/0/gpu/busy_pct", near(49.5), ""),
        ("ranks/0/step_ms/mean", near(20.0), ""),
    ),
    "xpu": (
        ("ranks/0/host/launches_per_step", near(100.0), ""),
        ("ranks/0/gpu/busy_pct", near(50.0), ""),
    ),
}  # fmt: skip

_MISTAKES: Final[dict[str, tuple[tuple[str, Check], str]]] = {  # what the verdict says first
    "metric_in_each_step": (names("AUROC", "auroc", "compute()"), ""),
    "anomaly_detection": (names("anomaly detection is on"), ""),
    "workers_of_short_epochs": (one_of("worker-restarts", "loader-startup"), ""),
    "large_hyperparameters": (names("save_hyperparameters"), ""),
    "kept_graphs": (names("self.losses", "a tensor with its graph"), ""),
}

TRUTHS: Final = (
    *(Truth(f"traces/{case}", "verdict", *one_of(verdict)) for case, verdict in VERDICTS.items()),
    *(
        Truth(f"faults/{case}", figure, *right, wrong)
        for case, known in _FAULTS.items()
        for figure, right, wrong in known
    ),
    *(
        Truth(f"runs/{case}", "verdict_text" if right[0].startswith("first") else "verdict", *right, wrong)
        for case, (right, wrong) in _MISTAKES.items()
    ),
)


@cache
def figures(case: str) -> Mapping[str, Any]:
    """The analysis of a case, as a tree."""
    kind, _, name = case.partition("/")
    if kind == "runs":
        return cast(Mapping[str, Any], msgspec.to_builtins(outputs.run_of(name).analysis))
    [path] = [TRACES / name] if kind == "traces" else FAULTS.glob(f"{name}*")
    return cast(Mapping[str, Any], msgspec.to_builtins(analysis_of(path)))


def found(tree: Any, figure: str) -> Any:
    """A figure of an analysis; None if it has none."""
    for key in figure.split("/"):
        if isinstance(tree, Mapping):
            tree = tree.get(key)
        else:
            tree = tree[int(key)] if isinstance(tree, Sequence) and int(key) < len(tree) else None
    return tree
