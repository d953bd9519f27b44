"""Hints on a whole run: worth a look without being a cause."""

from collections.abc import Iterator
from typing import Final

from lightning_forge_profiling.diagnosis.rule import in_ms
from lightning_forge_profiling.diagnosis.run_regions import backward_is_heavy, region
from lightning_forge_profiling.diagnosis.run_rules import MIN_STEPS
from lightning_forge_profiling.diagnosis.telemetry_hints import telemetry_hints
from lightning_forge_profiling.results.analysis import Hint, RunEvidence

_UNEVEN: Final = 1.2
"""A mean so much above the median says that few steps take a good part of the time."""


def run_hints(evidence: RunEvidence) -> tuple[Hint, ...]:
    """The hints; none where there are fewer than `MIN_STEPS` steps."""
    if evidence.steps < MIN_STEPS or evidence.step_ms.mean <= 0:
        return ()
    sensors = () if evidence.telemetry is None else telemetry_hints(evidence.telemetry, steps=evidence.steps)
    return (*_hints(evidence), *sensors)


def _hints(evidence: RunEvidence) -> Iterator[Hint]:
    step = evidence.step_ms
    restarts_ms = 0.0 if evidence.worker_restarts is None else evidence.worker_restarts.device_ms
    like_ms = step.p50 if evidence.like_ms is None else evidence.like_ms
    if step.mean - restarts_ms > _UNEVEN * like_ms:
        yield Hint(
            code="uneven-steps",
            rank=0,
            text=f"Steps are uneven: mean {in_ms(step.mean)}, median {in_ms(step.p50)}, longest {in_ms(step.max)}, "
            "more than gradient accumulation and restarts of workers explain.",
        )
    if backward_is_heavy(evidence):
        times = region(evidence, "backward").device_ms / max(region(evidence, "forward").device_ms, 1e-3)
        yield Hint(
            code="backward-heavy",
            rank=0,
            text=f"Backward takes {times:.1f} times as long as forward, where twice is usual. With "
            f"{evidence.world_size} processes the rest is likely the exchange of gradients or waiting for a slower "
            "rank; a recorded window of all ranks shows which.",
        )
