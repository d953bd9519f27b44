"""Evidence of a run from flat figures, so that a test names only those it is about."""

from typing import Any, Final

from msgspec import Struct
from msgspec.structs import fields, replace

from lightning_forge_profiling.schema import RunEvidence, RunMachine, RunRanks, RunSettings, RunTiming

_GROUPS: Final[dict[str, type[Struct]]] = {
    "timing": RunTiming,
    "machine": RunMachine,
    "ranks": RunRanks,
    "settings": RunSettings,
}


def made_evidence(**figures: Any) -> RunEvidence:
    """The evidence with these figures, each in its group."""
    timing = {name: figures.pop(name) for name in ("steps", "on_device", "step_ms", "regions")}
    return with_figures(RunEvidence(timing=RunTiming(**timing)), **figures)


def with_figures(evidence: RunEvidence, **figures: Any) -> RunEvidence:
    """The evidence with these figures instead, each in its group."""
    groups = {}
    for group, kind in _GROUPS.items():
        inside = {field.name: figures.pop(field.name) for field in fields(kind) if field.name in figures}
        groups[group] = replace(getattr(evidence, group), **inside)
    return replace(evidence, **groups, **figures)
