"""From a file to columns."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from lightning_forge_profiling.analysis.trace import (
    ACTIVITIES,
    Allocations,
    Calls,
    CollectiveCall,
    GpuWork,
    Ints,
    Operators,
    Signature,
    Spans,
    Trace,
)
from lightning_forge_profiling.analysis.trace_event import Arguments, Event, EventDecoder
from lightning_forge_profiling.analysis.trace_text import TraceText

__all__ = ["read_trace"]

# What the profiler has called its events since 2021. A renamed one does not change what it is.
_TABLE_OF: Final = {
    **dict.fromkeys(("kernel", "Kernel", "concurrent_kernel"), "kernel"),
    **dict.fromkeys(("gpu_memcpy", "Memcpy"), "gpu_memcpy"),
    **dict.fromkeys(("gpu_memset", "Memset"), "gpu_memset"),
    **dict.fromkeys(
        ("cuda_runtime", "cuda_driver", "Runtime", "hip_runtime", "hip_driver", "xpu_runtime", "xpu_driver",
         "privateuse1_runtime", "privateuse1_driver"), "calls",
    ),
    **dict.fromkeys(("cpu_op", "Operator"), "operators"),
    "user_annotation": "annotations",
    "python_function": "frames",
    "cpu_instant_event": "allocations",
}  # fmt: skip
_ANNOTATIONS_2021: Final = ("ProfilerStep#", "Optimizer.", "enumerate(DataLoader)#")  # were operators then
_ON_CPU: Final = 0  # c10::DeviceType::CPU

_DAY_NS: Final = 86_400 * 10**9
_ABSURD_RATIO: Final = 10
_ABSURD_ABOVE_NS: Final = 10**10

_UNKNOWN: Final = -(2**63)
_NOTHING: Final = Arguments()

K = TypeVar("K")


def read_trace(path: Path) -> Trace:
    """Read a trace that `torch.profiler` exported.

    What is sound is read: events that are damaged, that lack a time, or whose times cannot be are left out, and
    `Trace.warnings` says so.

    Args:
        path: JSON or gzipped JSON, of any version of PyTorch since 2021.

    Raises:
        TraceError: the file holds no trace.
        OSError: the file could not be read.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "trace.json"
        >>> _ = path.write_text('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "gemm", "ts": 5, "dur": 2.5}]}')
        >>> trace = read_trace(path)
        >>> trace.gpu.start, trace.gpu.end - trace.gpu.start, trace.names
        (array([5000]), array([2500]), ('gemm',))
    """
    decoder = EventDecoder()
    text = TraceText(path, decoder)
    tables = _Tables()
    for events in text.events():
        tables.add(events)
    tables.drop_absurd()
    warnings = list(text.problems)
    for count, what in (
        (text.skipped, "are not JSON"),
        (decoder.left_out, "are not like an event"),
        (tables.left_out, "have no time or one that cannot be"),
    ):
        if count:
            warnings.append(f"{count} events {what} and were left out")
    name = os.fsencode(path.name).decode(errors="replace")
    return tables.trace(name, text.header, tuple(f"{name}: {warning}" for warning in warnings))


class _Index(dict[K, int]):
    """A number for each distinct value, counted from 0."""

    def __missing__(self, key: K) -> int:
        self[key] = number = len(self)
        return number


class _Tables:
    """Columns under way: for each table the pieces of each column."""

    def __init__(self) -> None:
        self.left_out = 0
        self._names: _Index[str] = _Index()
        self._threads: _Index[tuple[object, object]] = _Index()
        self._lanes: _Index[tuple[object, object]] = _Index()
        self._signatures: _Index[tuple[bytes, bytes, bytes]] = _Index()
        self._collectives: _Index[CollectiveCall] = _Index()
        self._pieces: dict[str, dict[str, list[Ints]]] = {}

    def add(self, events: Iterable[Event]) -> None:
        """Take some events."""
        found: dict[str, list[Event]] = {table: [] for table in _TABLE_OF.values()}
        by_category = {category: found[table] for category, table in _TABLE_OF.items()}
        for event in events:
            table = by_category.get(event.cat)  # type: ignore[arg-type]
            if table is not None:
                table.append(event)
        for activity, category in enumerate(ACTIVITIES):
            self._add("gpu", found[category], partial(self._gpu, activity=activity))
        self._add("calls", found["calls"], _calls)
        self._add("operators", found["operators"], self._operators)
        self._add("annotations", found["annotations"])
        self._add("frames", found["frames"])
        self._add("allocations", found["allocations"], _allocations)

    def _add(
        self, table: str, events: list[Event], more: Callable[[list[Event]], dict[str, Ints]] | None = None
    ) -> None:
        if not events:
            return
        start, duration = _nanoseconds([event.ts for event in events]), _nanoseconds([event.dur for event in events])
        sound = (start != _UNKNOWN) & (duration >= 0) & (duration < _DAY_NS)
        if not sound.all():
            self.left_out += int((~sound).sum())
            start, duration = start[sound], duration[sound]
            events = [event for event, keep in zip(events, sound, strict=True) if keep]
        names, threads = self._names, self._threads
        columns = {
            "start": start,
            "end": start + duration,
            "name": _ints([names[event.name or ""] for event in events]),
            "thread": _ints([threads[event.pid, event.tid] for event in events]),
            **(more(events) if more else {}),
        }
        pieces = self._pieces.setdefault(table, {})
        for name, column in columns.items():
            pieces.setdefault(name, []).append(column)

    def _gpu(self, events: list[Event], activity: int) -> dict[str, Ints]:
        return {
            "activity": np.full(len(events), activity),
            "lane": _ints([self._lanes[_lane(event)] for event in events]),
            "correlation": _ints([_args(event).correlation for event in events]),
            "external": _ints([_external(_args(event)) for event in events]),
            "size": _ints([_args(event).bytes for event in events]),
            "collective": _ints([self._collective(_args(event)) for event in events]),
        }

    def _collective(self, args: Arguments) -> int:
        if args.collective is None:
            return -1
        elements = int(_ints([args.elements])[0])
        return self._collectives[
            CollectiveCall(args.collective, str(args.group or ""), elements, args.element_type or "")
        ]

    def _operators(self, events: list[Event]) -> dict[str, Ints]:
        return {
            "external": _ints([_external(_args(event)) for event in events]),
            "sequence": _ints([_args(event).sequence for event in events]),
            "signature": _ints([self._signature(_args(event)) for event in events]),
        }

    def _signature(self, args: Arguments) -> int:
        return self._signatures[bytes(args.input_dims), bytes(args.input_types), bytes(args.concrete_inputs)]

    def drop_absurd(self) -> None:
        """Leave out what lies a day or more from the rest, or lasts far longer than the recording."""
        starts = [piece for pieces in self._pieces.values() for piece in pieces["start"]]
        if not starts:
            return
        middle = int(np.median(np.concatenate(starts)))
        near = [piece[np.abs(piece - middle) < _DAY_NS] for piece in starts]
        extent = max(int(piece.max()) for piece in near if len(piece)) - min(
            int(piece.min()) for piece in near if len(piece)
        )
        longest = _ABSURD_RATIO * extent + _ABSURD_ABOVE_NS
        for pieces in self._pieces.values():
            for number, (start, end) in enumerate(zip(pieces["start"], pieces["end"], strict=True)):
                sound = (np.abs(start - middle) < _DAY_NS) & (end - start <= longest)
                if not sound.all():
                    self.left_out += int((~sound).sum())
                    for column in pieces.values():
                        column[number] = column[number][sound]

    def trace(self, file: str, header: Mapping[str, msgspec.Raw], warnings: tuple[str, ...]) -> Trace:
        """Close the tables."""
        names = tuple(self._names)
        lanes = tuple((str(device), str(stream)) for device, stream in self._lanes)
        gpu = self._table("gpu")
        device = _device(header, lanes, gpu.get("lane", _ints([])))
        operators, annotations = self._table("operators"), self._table("annotations")
        if not annotations and operators:
            marks = np.array([name.startswith(_ANNOTATIONS_2021) for name in names])[operators["name"]]
            annotations = {column: operators[column][marks] for column in ("start", "end", "name", "thread")}
            operators = {column: values[~marks] for column, values in operators.items()}
        allocations = self._table("allocations")
        return Trace(
            file=file,
            rank=_rank(header),
            device=device.name,
            memory_bytes=device.memory,
            multiprocessors=device.multiprocessors,
            names=names,
            threads=tuple((str(process), str(thread)) for process, thread in self._threads),
            lanes=lanes,
            signatures=tuple(Signature(*signature) for signature in self._signatures),
            collectives=tuple(self._collectives),
            gpu=GpuWork(**_without(gpu, "thread")),
            calls=Calls(**self._table("calls")),
            operators=Operators(**operators),
            annotations=Spans(**annotations),
            frames=Spans(**self._table("frames")),
            allocations=Allocations(time=allocations["start"], **_without(allocations, "start", "end", "name"))
            if allocations
            else Allocations(),
            warnings=warnings,
        )

    def _table(self, table: str) -> dict[str, Ints]:
        pieces = self._pieces.pop(table, {})
        columns = {name: np.concatenate(pieces.pop(name)) for name in list(pieces)}
        if table == "allocations" and columns:
            on_device = columns.pop("device_type") != _ON_CPU
            columns = {name: column[on_device] for name, column in columns.items()}
        if columns:
            # an outer range before the inner ones that begin with it
            order = np.lexsort((-columns["end"], columns["start"]))
            for name in columns:
                columns[name] = columns[name][order]
        return columns


class _Device(msgspec.Struct):
    id: int = -1
    name: str = ""
    memory: int | None = msgspec.field(default=None, name="totalGlobalMem")
    multiprocessors: int | None = msgspec.field(default=None, name="numSms")


class _Distributed(msgspec.Struct):
    rank: int | None = None


def _device(header: Mapping[str, msgspec.Raw], lanes: Sequence[tuple[str, str]], used: Ints) -> _Device:
    """The GPU that did most of the work."""
    try:
        devices = msgspec.json.decode(header.get("deviceProperties", b"[]"), type=list[_Device])
    except msgspec.DecodeError:
        devices = []
    number = lanes[int(np.bincount(used).argmax())][0] if len(used) else ""
    return next((device for device in devices if str(device.id) == number), _Device())


def _rank(header: Mapping[str, msgspec.Raw]) -> int | None:
    for field in ("distributedInfo", "forge_profiling"):
        try:
            rank = msgspec.json.decode(header.get(field, b"{}"), type=_Distributed).rank
        except msgspec.DecodeError:
            continue
        if rank is not None:
            return rank
    return None


def _without(columns: Mapping[str, Ints], *names: str) -> dict[str, Ints]:
    return {name: column for name, column in columns.items() if name not in names}


def _args(event: Event) -> Arguments:
    return event.args or _NOTHING


def _lane(event: Event) -> tuple[object, object]:
    """Device and stream, which older traces give as process and thread only."""
    args = _args(event)
    return (event.pid if args.device == -1 else args.device, event.tid if args.stream == -1 else args.stream)


def _external(args: Arguments) -> object:
    return args.external if args.external != -1 else args.external_2021


def _calls(events: list[Event]) -> dict[str, Ints]:
    return {
        "correlation": _ints([_args(event).correlation for event in events]),
        "external": _ints([_external(_args(event)) for event in events]),
    }


def _allocations(events: list[Event]) -> dict[str, Ints]:
    return {
        "size": _ints([_args(event).allocation for event in events]),
        "allocated": _ints([_args(event).allocated for event in events]),
        "reserved": _ints([_args(event).reserved for event in events]),
        "device_type": _ints([_args(event).device_type for event in events]),
    }


def _ints(values: Sequence[Any]) -> Ints:
    """Numbers as a column; what is none, or too large for one, is -1."""
    try:
        return np.array(values, np.int64)
    except (TypeError, ValueError, OverflowError):
        return np.array([_int(value) for value in values], np.int64)


def _int(value: object) -> int:
    try:
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if -_UNKNOWN > number > _UNKNOWN else -1


def _nanoseconds(microseconds: Sequence[Any]) -> Ints:
    """Exact for decimals and for what a float holds to the nanosecond; `_UNKNOWN` for what is no time."""
    if microseconds and isinstance(microseconds[0], Decimal):
        return np.array([_UNKNOWN if us is None else round(us * 1000) for us in microseconds], np.int64)
    values = np.array(microseconds, float) * 1e3
    sound = np.isfinite(values) & (np.abs(values) < -_UNKNOWN)
    return np.where(sound, np.rint(np.where(sound, values, 0)), _UNKNOWN).astype(np.int64)
