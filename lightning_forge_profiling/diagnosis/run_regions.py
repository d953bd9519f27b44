"""The regions of a run: their times per step and shares."""

from typing import Final

from lightning_forge_profiling.results.analysis import RunEvidence, RunRegion

COMPUTE: Final = ("forward", "backward", "optimizer")

_NO_REGION: Final = RunRegion(device_ms=0.0, host_ms=0.0)

_BACKWARD_TO_FORWARD: Final = 3.0
"""Backward computes twice what forward does, three times with activation checkpointing. What it takes more in
several processes is likely communication, or waiting for the others."""


def region(evidence: RunEvidence, name: str) -> RunRegion:
    """A region's times per step. Worker restarts are no part of `data` here."""
    found, restarts = evidence.regions.get(name, _NO_REGION), evidence.worker_restarts
    if name != "data" or name not in evidence.regions or restarts is None:
        return found
    return RunRegion(
        device_ms=max(found.device_ms - restarts.device_ms, 0.0), host_ms=max(found.host_ms - restarts.host_ms, 0.0)
    )


def share_pct(evidence: RunEvidence, *regions: str) -> float:
    """What the device times of some regions are of the step, in percent."""
    total = sum(region(evidence, name).device_ms for name in regions)
    return 100 * total / evidence.step_ms.mean if evidence.step_ms.mean > 0 else 0.0


def all_told_apart(evidence: RunEvidence) -> bool:
    """Whether each region was timed; where forward, say, was not, it is in `other`."""
    return evidence.regions.keys() >= {"data", "transfer", *COMPUTE}


def backward_is_heavy(evidence: RunEvidence) -> bool:
    """Whether backward in several processes takes more than its computation explains."""
    forward, backward = (region(evidence, name).device_ms for name in ("forward", "backward"))
    return evidence.on_device and evidence.world_size > 1 and backward > _BACKWARD_TO_FORWARD * forward
