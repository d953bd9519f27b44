"""The slowest steps of a run in words: how long they took, and what in them took so long."""

from collections.abc import Iterator
from typing import Final

from lightning_forge_profiling.report.wording import digits
from lightning_forge_profiling.results.analysis import RunEvidence
from lightning_forge_profiling.results.run import SlowStep

_SLOW: Final = 2.0
"""From so many medians on, a step is worth a line in the table."""
_NAMED: Final = 3
_CAUSES: Final = 2
_LEAST_SHARE: Final = 0.1


def slowest_line(run: RunEvidence) -> str:
    """The slowest steps in one line; "" where none takes twice the median.

    Example:
        >>> from lightning_forge_profiling.results.rank import Distribution
        >>> steps = Distribution(mean=91.0, p50=90.0, min=88.0, max=812.0)
        >>> slow = SlowStep(step=1200, ms=812.0, parts_ms={"callback/EMA.on_train_batch_end": 640.0})
        >>> slowest_line(RunEvidence(steps=2000, on_device=True, step_ms=steps, regions={}, slowest=(slow,)))
        'step 1200: 812 ms, 640 of it callback/EMA.on_train_batch_end (median 90.0 ms)'
    """
    median = run.step_ms.p50
    slow = [one for one in run.slowest if one.ms >= _SLOW * median > 0][:_NAMED]
    if not slow:
        return ""
    causes = [cause(one, run) for one in slow]
    named = (f"step {one.step}: {digits(one.ms)} ms{why and f', {why}'}" for one, why in zip(slow, causes, strict=True))
    return f"{'; '.join(named)} (median {digits(median)} ms)"


def slowest_rows(run: RunEvidence) -> Iterator[tuple[int, float, float, str]]:
    """Number, milliseconds, multiple of the median and cause of each of the slowest steps."""
    for slow in run.slowest:
        yield slow.step, slow.ms, slow.ms / run.step_ms.p50 if run.step_ms.p50 else 0.0, cause(slow, run)


def cause(slow: SlowStep, run: RunEvidence) -> str:
    """What took long in a slow step: parts of the ledger, or the region that took longer than it does on average."""
    parts = [(name, ms) for name, ms in slow.parts_ms.items() if ms >= _LEAST_SHARE * slow.ms][:_CAUSES]
    beyond = slow.ms - run.step_ms.p50
    if 2 * sum(ms for _, ms in parts) < beyond:
        # `other` contains the hooks, which are parts of the ledger
        longer = {name: ms - _mean(run, name) for name, ms in slow.regions_ms.items() if name != "other" or not parts}
        name = max(longer, key=longer.__getitem__, default="")
        if name and 2 * longer[name] >= beyond > 0:
            parts = [(name, slow.regions_ms[name]), *parts][:_CAUSES]
    # where the GPU had work queued, a hook may have taken longer than the step
    named = [
        f"{digits(ms)} of it {name}" if ms <= slow.ms else f"{digits(ms)} ms of host time {name}" for name, ms in parts
    ]
    return ", ".join(named)


def _mean(run: RunEvidence, region: str) -> float:
    return run.regions[region].device_ms if region in run.regions else 0.0
