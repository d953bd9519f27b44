"""What `torch.compile` compiled again, and why, by its own metrics: private to PyTorch, read only if they are there."""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from lightning_forge_profiling.results.run import Recompilation

# by the compile's id, which the guard that failed is of
_ID: Final = re.compile(r"^\d+/\d+: ")
_CODE: Final = re.compile(r"\s+# ")  # behind a guard, the code that it is of
# a graph break ends a function's graph, and the rest of it is a function of its own, named after the line
_RESUMED: Final = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)$")
_LONGEST: Final = 200
MOST_NAMED: Final = 5


def _metrics() -> Sequence[Any]:
    """PyTorch's metrics of the latest 64 compilations; none where it has not compiled, or has no such metrics."""
    utils = sys.modules.get("torch._dynamo.utils")
    return () if utils is None else tuple(utils.get_compilation_metrics())


class Compilations:
    """Reads what was compiled since the last look.

    Args:
        metrics: PyTorch's metrics of the latest compilations, oldest first.
    """

    def __init__(self, metrics: Callable[[], Sequence[Any]] = _metrics) -> None:
        self._metrics: Callable[[], Sequence[Any]] | None = metrics
        self._latest: Any = self  # as none was read
        self._found: dict[tuple[str, str, str, int], Recompilation] = {}
        self.pending = False  # whether something was compiled since
        self.look(0)
        self._found.clear()

    @property
    def recompilations(self) -> tuple[Recompilation, ...]:
        """What was compiled more than once, and graph breaks; what took most time first."""
        return tuple(sorted(self._found.values(), key=lambda one: -one.seconds)[:MOST_NAMED])

    def look(self, step: int) -> list[Recompilation]:
        """What was compiled again since the last look, and graph breaks that were met, each with its own seconds."""
        self.pending = False
        if self._metrics is None:
            return []
        try:
            known = list(self._metrics())
            new = known[_after(known, self._latest) :]
            self._latest = known[-1] if known else self._latest
            found = [one for one in (_recompilation(metrics, step) for metrics in new) if one is not None]
        except Exception:  # another version of PyTorch
            self._metrics = None
            return []
        for one in found:
            self._add(one)
        return found

    def _add(self, one: Recompilation) -> None:
        key = (one.function, one.file, one.kind, one.line)
        before = self._found.get(key)
        times, seconds = (0, 0.0) if before is None else (before.times, before.seconds)
        self._found[key] = replace(one, times=times + 1, seconds=seconds + one.seconds)


def _after(known: Sequence[Any], latest: Any) -> int:
    """The position behind the one that was the latest; 0 if it is no longer there."""
    return next((place + 1 for place in range(len(known) - 1, -1, -1) if known[place] is latest), 0)


def _recompilation(metrics: Any, step: int) -> Recompilation | None:
    """What one compilation was, if it is worth a word."""
    name, file = metrics.co_name or "", metrics.co_filename or ""
    if metrics.is_forward is False or getattr(metrics, "is_runtime", False) or not name:
        return None
    resumed, reason = _RESUMED.search(name), _text(metrics.recompile_reason)
    if not reason and resumed is None:
        return None
    return Recompilation(
        kind="recompiled" if reason else "graph break",
        function=resumed[1] if resumed else name,
        file=file,
        line=int(resumed[2]) if resumed else metrics.co_firstlineno or 0,
        reason=reason,
        times=1,
        seconds=_seconds(metrics),
        last_step=step,
    )


def _text(reason: str | None) -> str:
    lines: Iterable[str] = (reason or "").strip().splitlines()
    first = _CODE.split(_ID.sub("", next(iter(lines), "")))[0].strip()
    return first if len(first) <= _LONGEST else f"{first[: _LONGEST - 1]}…"


def _seconds(metrics: Any) -> float:
    us = getattr(metrics, "duration_us", None)
    seconds = us / 1e6 if us is not None else metrics.entire_frame_compile_time_s
    return float(seconds or 0.0)
