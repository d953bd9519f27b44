"""What `torch.compile` compiled again, and why, by its own metrics: private to PyTorch, read only if they are there."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import PurePath
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from msgspec.structs import replace

from lightning_forge_profiling.schema import Recompilation

# by the compile's id, which the guard that failed is of
_ID: Final = re.compile(r"^\d+/\d+: ")
_CODE: Final = re.compile(r"\s+# ")  # behind a guard, the code that it is of
# a graph break ends a function's graph, and the rest of it is a function of its own, named after the line
_RESUMED: Final = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)$")
_STACK: Final = re.compile(r"___stack\d+")
_TORCH: Final = f"{PurePath(torch.__file__).parent}/"
_LIMIT: Final = "recompile limit exceeded"
_POINTER: Final = re.compile(r"input name: (\w+)\. data pointer changed")
_FRAMES: Final = 12
_LONGEST: Final = 200
MOST_NAMED: Final = 5


def _metrics() -> Sequence[Any]:
    """PyTorch's metrics of the latest 64 compilations; none where it has not compiled, or has no such metrics."""
    utils = sys.modules.get("torch._dynamo.utils")
    return () if utils is None else tuple(utils.get_compilation_metrics())


class _Recording(NamedTuple):
    """A CUDA graph that is being recorded."""

    compile_id: str
    key: tuple[object, ...]  # what is recorded: the function as it was compiled, and for what
    reason: str
    began_ns: int


class Compilations:
    """Reads what was compiled since the last look.

    Args:
        metrics: PyTorch's metrics of the latest compilations, oldest first.
    """

    def __init__(self, metrics: Callable[[], Sequence[Any]] = _metrics) -> None:
        self._metrics: Callable[[], Sequence[Any]] | None = metrics
        self._latest: Any = self  # as none was read
        self._found: dict[tuple[str, str, str, int], Recompilation] = {}
        self._functions: dict[str, Any] = {}  # the metrics of each compiled function, by the number of the function
        self._recording: _Recording | None = None
        self._recorded: set[tuple[object, ...]] = set()
        self._again: list[tuple[_Recording, float]] = []
        self.pending = False  # whether something was compiled since
        self.look(0)
        self._found.clear()

    @property
    def recompilations(self) -> tuple[Recompilation, ...]:
        """What was compiled more than once, and graph breaks; what took most time first."""
        return tuple(sorted(self._found.values(), key=lambda one: -one.seconds)[:MOST_NAMED])

    def metrics(self) -> dict[str, float]:
        """How often something was compiled or recorded again in the fit so far, and how long that took; {} if never."""
        found = [one for one in self._found.values() if one.kind != "graph break"]
        if not found:
            return {}
        return {
            "compile/again": float(sum(one.times for one in found)),
            "compile/again_s": sum(one.seconds for one in found),
        }

    def look(self, step: int) -> list[Recompilation]:
        """What was compiled again since the last look, and graph breaks that were met, each with its own seconds."""
        self.pending = False
        if self._metrics is None:
            return []
        try:
            found = list(self._new(step))
        except Exception:  # another version of PyTorch
            self._metrics = None
            return []
        for one in found:
            self._add(one)
        return found

    def _new(self, step: int) -> Iterator[Recompilation]:
        known = list(self._metrics() if self._metrics is not None else ())
        new = known[_after(known, self._latest) :]
        self._latest = known[-1] if known else self._latest
        for metrics in new:
            number = _function(getattr(metrics, "compile_id", None))
            if metrics.co_name and number:
                self._functions[number] = metrics
            given_up = _LIMIT in (getattr(metrics, "fail_reason", None) or "")
            one = _recompilation(self._functions.get(number, metrics) if given_up else metrics, step, metrics)
            if one is not None:
                yield replace(one, given_up=given_up, times=int(not given_up))
        again, self._again = self._again, []
        for recording, seconds in again:
            of = self._functions.get(_function(recording.compile_id))
            yield Recompilation(
                kind="recorded again",
                function="a function" if of is None else of.co_name,
                file="" if of is None else of.co_filename or "",
                line=0 if of is None else of.co_firstlineno or 0,
                reason=recording.reason,
                times=1,
                seconds=seconds,
                last_step=step,
            )

    def _add(self, one: Recompilation) -> None:
        key = (one.function, one.file, one.kind, one.line)
        before = self._found.get(key, replace(one, times=0, seconds=0.0, given_up=False))
        self._found[key] = replace(
            one,
            times=before.times + one.times,
            seconds=before.seconds + one.seconds,
            given_up=one.given_up or before.given_up,
        )

    # -- CUDA graphs ---------------------------------------------------------------------------------------------

    def recording_begins(self, args: Any, frame: FrameType | None, now_ns: int) -> None:
        """A CUDA graph is being recorded, if that is what PyTorch's callback says, which `frame` has called."""
        with suppress(Exception):  # another version of PyTorch
            if args.callback_trigger.name == "CUDAGRAPH_RECORDING":
                key, reason = _what_is_recorded(frame)
                self._recording = _Recording(args.compile_id, (args.compile_id, *key), reason, now_ns)

    def recording_ends(self, now_ns: int) -> None:
        """It has been recorded."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        sizes = recording.key[:2]  # without the number that each size of the inputs has
        if recording.key in self._recorded:
            self._again.append((recording, (now_ns - recording.began_ns) / 1e9))
        elif sizes in self._recorded:
            reason = recording.reason or "its inputs have another size"
            self._again.append((recording._replace(reason=reason), (now_ns - recording.began_ns) / 1e9))
        self._recorded |= {recording.key, sizes}


def _what_is_recorded(frame: FrameType | None) -> tuple[tuple[object, ...], str]:
    """Whether it is forward or backward, its number, and why it is recorded again, by the frame that does it."""
    for _ in range(_FRAMES):
        if frame is None:
            break
        if frame.f_code.co_name == "_run" and "function_id" in (local := frame.f_locals):
            function, reason = local["function_id"], local.get("unexpected_rerecord_reason")
            text = str(reason() if callable(reason) else reason or "")
            found = _POINTER.search(text)
            text = f"{found[1]} has another address" if found else text.strip().splitlines()[0] if text.strip() else ""
            return (local["self"].id_to_mode[function].name, function.id), text
        frame = frame.f_back
    return (), ""


def _function(compile_id: str | None) -> str:
    """The number of a function in the number of its compilation: 3 in 3/1."""
    return (compile_id or "").partition("/")[0]


def _after(known: Sequence[Any], latest: Any) -> int:
    """The position behind the one that was the latest; 0 if it is no longer there."""
    return next((place + 1 for place in range(len(known) - 1, -1, -1) if known[place] is latest), 0)


def _recompilation(metrics: Any, step: int, of: Any) -> Recompilation | None:
    """What one compilation was, if it is worth a word: `of` has the reason and the time, `metrics` the function."""
    name, file = metrics.co_name or "", metrics.co_filename or ""
    if metrics.is_forward is False or getattr(metrics, "is_runtime", False) or not name:
        return None
    resumed, reason = _RESUMED.search(name), _text(of.recompile_reason)
    if not reason and resumed is None:
        return None
    if resumed:  # what the line returned is the input of what follows it
        reason = _STACK.sub(f"what line {resumed[2]} returned", reason)
    if file.startswith(_TORCH):  # PyTorch's wrapper of a module of its own
        name, file = "a module of torch.nn", ""
    return Recompilation(
        kind="recompiled" if reason else "graph break",
        function=resumed[1] if resumed else name,
        file=file,
        line=int(resumed[2]) if resumed else metrics.co_firstlineno or 0 if file else 0,
        reason=reason,
        times=1,
        seconds=_seconds(of),
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
