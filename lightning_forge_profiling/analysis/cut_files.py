"""Text about a trace file that is cut off: where it ends, and which of its steps are whole."""

from types import MappingProxyType
from typing import Final

import numpy as np

from lightning_forge_profiling.analysis.steps import Steps
from lightning_forge_profiling.kineto.trace import Cut, Trace

_TABLE_WORDS: Final = MappingProxyType(
    {
        "gpu": "GPU work",
        "calls": "runtime calls",
        "operators": "operators",
        "annotations": "annotations",
        "frames": "Python functions",
        "allocations": "allocations",
    }
)


def where_cut(trace: Trace, steps: Steps) -> str:
    """Describes where the first file that is cut off ends, and which steps are whole; "" if all files are complete."""
    cut = next((cut for cut in trace.cuts if cut), None)
    if cut is None:
        return ""
    if len(trace.cuts) > 1:
        return f"{trace.file}: one of these files is cut off, and its steps that may lack events are left out."
    whole = steps.number[steps.whole].tolist()
    if whole:
        completeness = f"Its events are in order of time, so the steps before are whole: {', '.join(map(str, whole))}."
    else:
        completeness = "Events of other threads may be missing, so no step is known to be whole."
    return f"{trace.file} is cut off{_at_step(trace, cut, steps)}. {completeness}"


def no_verdict(cut_off: str) -> str:
    """The text in place of a verdict."""
    return (
        f"No verdict: {cut_off} The figures cover the part before the cut. Record the trace again, or copy it again if "
        "the original is complete."
    )


def _at_step(trace: Trace, cut: Cut, steps: Steps) -> str:
    of = "stream" if cut.table == "gpu" else "thread"
    inside = f"it ends in the {_TABLE_WORDS[cut.table]} of {of} {cut.thread[1].removeprefix('stream ')}"
    if not len(steps.marks):
        return f", without any step mark: {inside}"
    if cut.table == "gpu":
        return f": {inside}"  # the GPU may be some steps behind the host
    place = int(np.searchsorted(steps.host_start, cut.time, side="right")) - 1
    if place < 0:
        return f" before step {steps.number[0]}: {inside}"
    if place and _ascending(trace, cut):
        inside += f", which are whole up to step {steps.number[place - 1]}"
    return f" in step {steps.number[place]}: {inside}"


def _ascending(trace: Trace, cut: Cut) -> bool:
    """Whether no event of the thread is later than the last one read."""
    table = getattr(trace, cut.table)
    of_thread = np.array([thread == cut.thread for thread in trace.threads])[table.thread]
    times = table.time if cut.table == "allocations" else table.start
    return bool((times[of_thread] <= cut.time).all())
