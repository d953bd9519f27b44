"""Reads a trace file into columns, chunk by chunk: `read_trace` gives a `Trace`."""

import contextlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, Union

import msgspec
import numpy as np

from lightning_forge_profiling.errors import TraceError
from lightning_forge_profiling.kineto.chunks import EXPORT_IT, TraceText
from lightning_forge_profiling.kineto.trace import (
    ACTIVITIES,
    Allocations,
    Calls,
    Cut,
    Events,
    GpuWork,
    Ints,
    Operators,
    Signature,
    Spans,
    Trace,
)
from lightning_forge_profiling.names import MARK_PREFIX, METADATA_KEY, MODULE_MARK
from lightning_forge_profiling.plain_text import encodable
from lightning_forge_profiling.schema import CollectiveCall, LoaderSettings

_NONE: Final = msgspec.Raw(b"")
_BETWEEN_INPUTS: Final = b"\0"  # in no JSON
_EXACT_US: Final = 2**53 / 1e3  # up to here a float of microseconds is exact to the nanosecond

Number = int | float | str | None


class Arguments(msgspec.Struct, gc=False, frozen=True):
    """The `args` of an event."""

    external: Number = msgspec.field(default=-1, name="External id")
    external_2021: Number = msgspec.field(default=-1, name="external id")
    correlation: Number = -1
    device: Number = -1
    stream: Number = -1
    bytes: Number = 0
    sequence: Number = msgspec.field(default=-1, name="Sequence number")
    input_dims: msgspec.Raw = msgspec.field(default=_NONE, name="Input Dims")
    input_types: msgspec.Raw = msgspec.field(default=_NONE, name="Input type")
    concrete_inputs: msgspec.Raw = msgspec.field(default=_NONE, name="Concrete Inputs")
    input_strides: msgspec.Raw = msgspec.field(default=_NONE, name="Input Strides")
    collective: str | None = msgspec.field(default=None, name="Collective name")
    group: Number = msgspec.field(default=None, name="Process Group Name")
    elements: Number = msgspec.field(default=0, name="In msg nelems")
    element_type: str | None = msgspec.field(default=None, name="dtype")
    allocation: Number = msgspec.field(default=0, name="Bytes")
    allocated: Number = msgspec.field(default=-1, name="Total Allocated")
    reserved: Number = msgspec.field(default=-1, name="Total Reserved")
    device_type: Number = msgspec.field(default=-1, name="Device Type")
    task_type: str | None = msgspec.field(default=None, name="Task Type")


_NO_ARGUMENTS: Final = Arguments()


class TraceEvent(msgspec.Struct, gc=False):
    """One event; times are microseconds."""

    cat: str | None = None
    name: str | None = None
    ts: float | None = None
    dur: float | None = 0.0
    pid: Number = -1
    tid: Number = -1
    args: Arguments | None = _NO_ARGUMENTS


class ExactEvent(TraceEvent, gc=False):
    """An event with its time as written: a float cannot hold nanoseconds since 1970."""

    ts: Decimal | None = None  # type: ignore[assignment]


_ARGS_IGNORED: Final = ("args", Arguments, msgspec.field(default=_NO_ARGUMENTS, name="no such field"))


class Flow(msgspec.Struct, gc=False):
    """An arrow between events, metadata or a counter. Nothing of it is read, which saves a fifth of the decoding."""

    cat = name = ts = None


_FLOWS: Final = [msgspec.defstruct(f"Flow_{ph}", (), bases=(Flow,), tag_field="ph", tag=ph) for ph in "stfMC"]

_decode_texts = msgspec.json.Decoder(list[msgspec.Raw]).decode


class EventDecoder:
    """Decodes lists of events."""

    def __init__(self) -> None:
        self.left_out = 0  # malformed events
        self.without_arguments = 0  # events decoded without their `args`, which are of an unknown form
        self._set_type(TraceEvent)

    def __call__(self, text: bytes) -> list[TraceEvent]:
        """Decode a JSON list of events."""
        left_out = without_arguments = 0
        try:
            events = self._decode_list(text)
        except msgspec.ValidationError:
            events, left_out, without_arguments = self._decode_each(_decode_texts(text))
        if not self._exact and any(event.ts is not None and event.ts > _EXACT_US for event in events):
            self._set_type(ExactEvent)
            return self(text)
        self.left_out += left_out
        self.without_arguments += without_arguments
        return events

    def _set_type(self, type_: type[TraceEvent]) -> None:
        self._exact = type_ is ExactEvent
        events = [msgspec.defstruct(f"Event_{ph}", (), bases=(type_,), tag_field="ph", tag=ph, gc=False) for ph in "Xi"]
        list_type: Any = list[Union[(*events, *_FLOWS)]]  # type: ignore[valid-type]
        self._decode_list: Callable[[bytes], list[TraceEvent]] = msgspec.json.Decoder(list_type).decode
        self._decode_one = msgspec.json.Decoder(type_, strict=False).decode  # accepts numbers in quotes
        bare: Any = msgspec.defstruct("Event", [_ARGS_IGNORED], bases=(type_,), gc=False)
        self._decode_bare = msgspec.json.Decoder(bare, strict=False).decode

    def _decode_each(self, texts: list[msgspec.Raw]) -> tuple[list[TraceEvent], int, int]:
        events, left_out, without_arguments = [], 0, 0
        for text in texts:
            if not bytes(text).startswith(b"{"):  # faster than an exception for each
                left_out += 1
                continue
            try:
                events.append(self._decode_one(text))
            except msgspec.ValidationError:
                try:
                    events.append(self._decode_bare(text))
                    without_arguments += 1
                except msgspec.ValidationError:
                    left_out += 1
        return events, left_out, without_arguments


# The table of each event category, in every spelling since 2021.
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
    **dict.fromkeys(("cpu_instant_event", "[memory]"), "allocations"),  # the latter is a name, without a category
}  # fmt: skip
# Categories of devices whose events are not analysed; Ascend's have none, but a kind of task.
_FOREIGN: Final = {
    **dict.fromkeys(("mtia_ccp_events", "mtia_workloadd", "mtia_insight"), "MTIA"),
    "hpu_op": "Gaudi (HPU)",
    "glow_runtime": "Glow",
}
# Annotations that were operators in 2021, and are in a copy for TensorBoard's plugin.
_ANNOTATIONS_2021: Final = ("ProfilerStep#", "Optimizer.", "enumerate(DataLoader)#", MARK_PREFIX)
_ON_CPU: Final = 0  # c10::DeviceType::CPU

_DAY_NS: Final = 86_400 * 10**9
_ABSURD_RATIO: Final = 10
_ABSURD_ABOVE_NS: Final = 10**10

_UNKNOWN: Final = -(2**63)
_LATEST_NS: Final = 2**62  # differences of times up to here do not overflow
_LATEST_DIGITS: Final = 15
_LARGEST: Final = 2**60  # nor do sums of numbers up to here

K = TypeVar("K")
_Events = TypeVar("_Events", bound=Events)

_ExtraColumns: TypeAlias = Callable[[list[TraceEvent], list[Arguments]], dict[str, Ints]]


class _Index(dict[K, int]):
    """A number for each distinct value, counted from 0."""

    def __missing__(self, key: K) -> int:
        self[key] = number = len(self)
        return number


class TraceTables:
    """Tables that grow with each chunk of events; `trace` makes columns of them."""

    def __init__(self) -> None:
        self.left_out = 0  # events with a missing or impossible time
        self.shortened = 0  # GPU work with an impossible duration
        self.foreign: Counter[str] = Counter()  # events by device that is not analysed
        self._last: TraceEvent | None = None
        self._last_call: TraceEvent | None = None
        self._in_order = True
        self._latest: Ints = np.zeros(0, np.int64)
        self._shift = 0
        self._names: _Index[str] = _Index()
        self._threads: _Index[tuple[object, object]] = _Index()
        self._lanes: _Index[tuple[object, object]] = _Index()
        self._signatures: _Index[bytes] = _Index()
        self._collectives: _Index[CollectiveCall] = _Index()
        self._growing: dict[str, dict[str, array[int]]] = {}

    def add(self, events: Sequence[TraceEvent]) -> None:
        """Add a chunk of events."""
        by_table: dict[str, list[TraceEvent]] = {table: [] for table in _TABLE_OF.values()}
        append = {category: by_table[table].append for category, table in _TABLE_OF.items()}
        for event in events:
            if add := append.get(event.cat or event.name or ""):
                add(event)
            elif event.cat in _FOREIGN:
                self.foreign[_FOREIGN[event.cat]] += 1
            elif not event.cat and event.ts is not None and event.args is not None and event.args.task_type:
                self.foreign["Ascend"] += 1
        self._remember_end(events, by_table["calls"])
        for activity, category in enumerate(ACTIVITIES):
            self._add("gpu", by_table[category], partial(self._gpu, activity=activity))
        self._add("calls", by_table["calls"], _calls)
        self._add("operators", by_table["operators"], self._operators)
        self._add("annotations", by_table["annotations"])
        self._add("frames", by_table["frames"])
        self._add("allocations", by_table["allocations"], _allocations)

    def _remember_end(self, events: Sequence[TraceEvent], calls: Sequence[TraceEvent]) -> None:
        self._last = next((event for event in reversed(events) if _table_of(event)), self._last)
        self._last_call = calls[-1] if calls else self._last_call
        if self._in_order:
            times = np.append(self._latest, _nanoseconds([event.ts for event in events if _table_of(event)]))
            self._in_order = bool((np.diff(times) >= 0).all())
            self._latest = times[-1:]

    def cut(self) -> Cut | None:
        """The position of the last event; None without events."""
        if self._last is None:
            return None
        # the last runtime call says more than the GPU work it launched
        on_gpu = _table_of(self._last) in ACTIVITIES
        last = self._last_call if on_gpu and self._last_call else self._last
        table = _table_of(last)
        (time,) = _nanoseconds([last.ts]).tolist()
        return Cut(
            table="gpu" if table in ACTIVITIES else table,
            thread=(str(last.pid), str(last.tid)),
            time=self._shift + (0 if time == _UNKNOWN else time),
            in_order=self._in_order and "gpu" in self._growing,
        )

    def _add(self, table: str, events: list[TraceEvent], extra: _ExtraColumns | None = None) -> None:
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
            **(extra(events, [event.args or _NO_ARGUMENTS for event in events]) if extra else {}),
        }
        growing = self._growing.setdefault(table, {})
        for name, column in columns.items():
            growing.setdefault(name, array("q")).frombytes(column.tobytes())

    def _gpu(self, events: list[TraceEvent], arguments: list[Arguments], activity: int) -> dict[str, Ints]:
        # older traces give device and stream as process and thread only
        lanes = self._lanes
        lane = [
            lanes[event.pid if args.device == -1 else args.device, event.tid if args.stream == -1 else args.stream]
            for event, args in zip(events, arguments, strict=True)
        ]
        return {
            **_calls(events, arguments),
            "activity": np.full(len(events), activity),
            "lane": _ints(lane),
            "size": _ints([args.bytes for args in arguments]),
            "collective": _ints([-1 if args.collective is None else self._collective(args) for args in arguments]),
        }

    def _collective(self, args: Arguments) -> int:
        (elements,) = _ints([args.elements]).tolist()
        return self._collectives[
            CollectiveCall(args.collective or "", str(args.group or ""), elements, args.element_type or "")
        ]

    def _operators(self, _: list[TraceEvent], arguments: list[Arguments]) -> dict[str, Ints]:
        signatures, join = self._signatures, _BETWEEN_INPUTS.join
        signature = [
            signatures[join((args.input_dims, args.input_types, args.concrete_inputs, args.input_strides))]
            for args in arguments
        ]
        return {
            "external": _external(arguments),
            "sequence": _ints([args.sequence for args in arguments]),
            "signature": _ints(signature),
        }

    def trace(self, file: str) -> Trace | None:
        """The columns of all events in order of time, without those with impossible times; None without events."""
        tables: dict[str, dict[str, Ints]] = {
            name: {column: np.frombuffer(values, np.int64) for column, values in growing.items()}
            for name, growing in self._growing.items()
        }
        self._drop_absurd(tables)
        if not any(len(table["start"]) for table in tables.values()):
            return None
        names = tuple(self._names)
        threads, thread = _texts(self._threads)
        lanes, lane = _texts(self._lanes)
        # a trace with times before its base time is shifted: elsewhere a negative time means unknown
        self._shift = -min(int(table["start"].min(initial=0)) for table in tables.values())
        if allocations := tables.get("allocations"):  # until late in 2021 they had no total
            known = (allocations.pop("device_type") != _ON_CPU) & (allocations["allocated"] >= 0)
            tables["allocations"] = {column: values[known] for column, values in allocations.items()}
        latest = self._shift + _latest_end(tables)
        for table in tables.values():
            if self._shift:
                table["start"], table["end"] = table["start"] + self._shift, table["end"] + self._shift
            table["thread"] = thread[table["thread"]]
            if "lane" in table:
                table["lane"] = lane[table["lane"]]
                self.shortened += _end_at_the_next(table, latest)
            # an outer range before the inner ones that begin with it
            order = np.lexsort((-table["end"], table["start"]))
            for column in table.values():
                column[:] = column[order]  # in place, to need less memory
        if "annotations" not in tables:
            _move_operators(tables, "annotations", names, _ANNOTATIONS_2021)
        _move_operators(tables, "modules", names, MODULE_MARK)
        return Trace(
            file=file,
            names=names,
            threads=threads,
            lanes=lanes,
            signatures=tuple(Signature(*inputs.split(_BETWEEN_INPUTS)) for inputs in self._signatures),
            collectives=tuple(self._collectives),
            gpu=_filled(GpuWork, tables.get("gpu")),
            calls=_filled(Calls, tables.get("calls")),
            operators=_filled(Operators, tables.get("operators")),
            annotations=_filled(Spans, tables.get("annotations")),
            modules=_filled(Spans, tables.get("modules")),
            frames=_filled(Spans, tables.get("frames")),
            allocations=_filled(Allocations, tables.get("allocations")),
        )

    def _drop_absurd(self, tables: Mapping[str, dict[str, Ints]]) -> None:
        """Leave out events a day or more away from the rest, or far longer than the recording: CUPTI has such."""
        starts = np.concatenate([np.zeros(0, np.int64), *(table["start"] for table in tables.values())])
        if not len(starts):
            return
        starts = starts[starts != 0] if starts.any() else starts  # a time that was not taken is 0
        middle = int(np.partition(starts, len(starts) // 2)[len(starts) // 2])
        extent = int(np.ptp(starts[np.abs(starts - middle) < _DAY_NS]))
        longest = _ABSURD_RATIO * extent + _ABSURD_ABOVE_NS
        for table in tables.values():
            start, end = table["start"], table["end"]
            sound = (np.abs(start - middle) < _DAY_NS) & (end - start <= longest)
            if not sound.all():
                self.left_out += int((~sound).sum())
                for name in table:
                    table[name] = table[name][sound]


def _latest_end(tables: Mapping[str, Mapping[str, Ints]]) -> int:
    """When GPU work has ended at the latest: as long after the last of the host as the recording takes."""
    first = min((int(table["start"].min()) for table in tables.values() if len(table["start"])), default=0)
    sides = ((table["start"], table["end"][: 0 if name == "gpu" else None]) for name, table in tables.items())
    last = max((int(times.max()) for each in sides for times in each if len(times)), default=0)
    return 2 * last - first


def _end_at_the_next(gpu: dict[str, Ints], latest: int) -> int:
    """End GPU work that lasts longer than can be where the next of its stream begins; returns how much that was."""
    order = np.lexsort((gpu["start"], gpu["lane"]))
    start, end, lane = (gpu[name][order] for name in ("start", "end", "lane"))
    over = np.flatnonzero((end[:-1] > latest) & (lane[1:] == lane[:-1]))
    end[over] = start[over + 1]
    gpu["end"] = np.empty_like(end)
    gpu["end"][order] = end
    return len(over)


def _table_of(event: TraceEvent) -> str:
    return _TABLE_OF.get(event.cat or event.name or "", "")


def _texts(pairs: Iterable[tuple[object, object]]) -> tuple[tuple[tuple[str, str], ...], Ints]:
    """The distinct pairs as text, and the position of each: 7, "7" and "stream 7" are the same."""
    distinct: _Index[tuple[str, str]] = _Index()
    rows = [distinct[str(first), str(second).removeprefix("stream ")] for first, second in pairs]
    return tuple(distinct), np.array(rows, np.int64)


def _move_operators(
    tables: dict[str, dict[str, Ints]], to: str, names: Sequence[str], begins: str | tuple[str, ...]
) -> None:
    """Let operators whose names begin so be a table of their own."""
    operators = tables.get("operators")
    if operators is None:
        return
    rows = np.array([name.startswith(begins) for name in names], bool)[operators["name"]]
    if rows.any():
        tables[to] = {column: values[rows] for column, values in operators.items()}
        tables["operators"] = {column: values[~rows] for column, values in operators.items()}


def _filled(table: type[_Events], columns: Mapping[str, Ints] | None) -> _Events:
    return table(**{column.name: columns[column.name] for column in fields(table)}) if columns else table()


def _external(arguments: list[Arguments]) -> Ints:
    return _ints([args.external if args.external != -1 else args.external_2021 for args in arguments])


def _calls(_: list[TraceEvent], arguments: list[Arguments]) -> dict[str, Ints]:
    return {"correlation": _ints([args.correlation for args in arguments]), "external": _external(arguments)}


def _allocations(_: list[TraceEvent], arguments: list[Arguments]) -> dict[str, Ints]:
    return {
        "size": _ints([args.allocation for args in arguments]),
        "allocated": _ints([args.allocated for args in arguments]),
        "reserved": _ints([args.reserved for args in arguments]),
        "device_type": _ints([args.device_type for args in arguments]),
    }


def _ints(values: Sequence[Any]) -> Ints:
    """Numbers as a column; -1 for anything else and for numbers that are too large."""
    try:
        column = np.array(values, np.int64)
    except (TypeError, ValueError, OverflowError):
        return np.array([_int(value) for value in values], np.int64)
    return np.where((column < _LARGEST) & (column > -_LARGEST), column, -1)


def _int(value: object) -> int:
    try:
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if abs(number) < _LARGEST else -1


def _nanoseconds(microseconds: Sequence[Any]) -> Ints:
    """Nanoseconds, exact for decimals and as far as a float can be; `_UNKNOWN` for anything that is not a time."""
    if Decimal in set(map(type, microseconds)):
        return np.array([_exact(us) for us in microseconds], np.int64)
    values = np.array(microseconds, float)
    sound = np.abs(values) < _LATEST_NS / 1e3  # False for NaN
    return np.where(sound, np.rint(np.where(sound, values, 0) * 1e3), _UNKNOWN).astype(np.int64)


def _exact(microseconds: Decimal | float | None) -> int:
    if microseconds is None:
        return _UNKNOWN
    time = Decimal(microseconds)
    if not time.is_finite() or time.adjusted() > _LATEST_DIGITS:
        return _UNKNOWN
    nanoseconds = round(time * 1000)
    return nanoseconds if abs(nanoseconds) < _LATEST_NS else _UNKNOWN


_FEWEST_LINKED: Final = 10
_NEARLY_ALL_PCT: Final = 95


def _on_the_hosts_clock(trace: Trace) -> tuple[Trace, int]:
    """The trace with GPU work moved behind its launches if nearly all of it begins before, and by how many ns."""
    gpu, calls = trace.gpu, trace.calls
    known, work, call = np.intersect1d(gpu.correlation, calls.correlation, return_indices=True)
    delay = (gpu.start[work] - calls.start[call])[known > 0]
    if len(delay) < _FEWEST_LINKED or np.percentile(delay, _NEARLY_ALL_PCT) >= 0:
        return trace, 0
    behind_ns = -int(delay.min())
    return replace(trace, gpu=replace(gpu, start=gpu.start + behind_ns, end=gpu.end + behind_ns)), behind_ns


_MOST_LEFT_OUT: Final = 200_000
_ABOUT: Final = ("distributedInfo", METADATA_KEY)
_MOST_RANKS: Final = 2**31  # MPI and NCCL count ranks in a C int

_Fields = Mapping[str, msgspec.Raw]
T = TypeVar("T")


_AUTOGRAD: Final = ("CPU functions", "CUDA functions")  # the processes in exports of torch.autograd.profiler


def read_trace(path: Path) -> Trace:
    """Read a trace that `torch.profiler` exported.

    Events that have no time or an impossible one are left out, and `Trace.warnings` counts them.
    """
    decoder = EventDecoder()
    text = TraceText(path, decoder)
    tables = TraceTables()
    count = 0
    with contextlib.closing(text.events()) as pieces:
        for events in pieces:
            tables.add(events)
            count += len(events)
            if decoder.left_out > _MOST_LEFT_OUT:
                text.problems.append("the rest was not read: too many events are malformed")
                break
    name = encodable(path.name)
    trace = tables.trace(name)
    problems = list(text.problems)
    for number, what in (
        (decoder.left_out, "malformed and left out"),
        (decoder.without_arguments, "read without their arguments, whose format is unknown"),
        (tables.left_out, "left out for a missing or impossible time"),
        (tables.shortened, "far longer than the recording, and ended where the next of the stream begins"),
    ):
        if number:
            problems.append(f"{number} {'event is' if number == 1 else 'events are'} {what}")
    if trace is None:
        what = f"of its {count} events, none is an operator, a runtime call, GPU work or an annotation"
        if any(getattr(event, "pid", None) in _AUTOGRAD for event in events):
            what = "a list of events of torch.autograd.profiler, which has no kinds of events"
        raise TraceError(f"{path}: {'; '.join([what, *problems, EXPORT_IT])}")
    trace, behind_ns = _on_the_hosts_clock(trace)
    if behind_ns:
        problems.append(f"GPU work begins before its launch: its times were moved by {behind_ns / 1e6:,.3f} ms")
    cut = tables.cut()
    device = _device(text.header, trace)
    distributed, about = (_value(text.header, name, dict[str, msgspec.Raw]) or {} for name in _ABOUT)
    return replace(
        trace,
        rank=_count("rank", distributed, about),
        world_size=_count("world_size", distributed, about),
        base_ns=_value(text.header, "baseTimeNanoseconds", int),
        intra_op_threads=_value(about, "intra_op_threads", int),
        usable_cores=_value(about, "usable_cores", int) if _value(about, "world_size", int) == 1 else None,
        device=device.name,
        memory_bytes=device.memory,
        multiprocessors=device.multiprocessors,
        loader=_value(about, "loader", LoaderSettings),
        light_steps=_value(about, "light_steps", tuple[int, ...]) or (),
        libraries=_value(about, "libraries", frozenset[str]) or frozenset(),
        cuts=(None if text.complete else cut,),
        foreign=tables.foreign,
        warnings=(f"{name}: {'; '.join(problems)}",) if problems else (),
    )


class _Device(msgspec.Struct):
    id: int = -1
    name: str = ""
    memory: int | None = msgspec.field(default=None, name="totalGlobalMem")
    multiprocessors: int | None = msgspec.field(default=None, name="numSms")


def _device(header: _Fields, trace: Trace) -> _Device:
    """The GPU that did most of the work."""
    devices = _value(header, "deviceProperties", list[_Device]) or []
    number = trace.lanes[int(np.bincount(trace.gpu.lane).argmax())][0] if len(trace.gpu) else ""
    # ROCm numbers the kernels' devices in another way than the properties
    alike = devices[0] if len(trace.gpu) and len({device.name for device in devices}) == 1 else _Device()
    return next((device for device in devices if str(device.id) == number), alike)


def _count(name: str, *fields: _Fields) -> int | None:
    counts = (_value(each, name, int) for each in fields)
    return next((count for count in counts if count is not None and 0 <= count < _MOST_RANKS), None)


def _value(fields: _Fields, name: str, form: type[T]) -> T | None:
    """The value of a field; None where it is missing or of another form."""
    try:
        return msgspec.json.decode(fields[name], type=form)
    except (KeyError, msgspec.DecodeError):
        return None
