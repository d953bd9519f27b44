"""Reads a trace file into columns: `read_trace` gives a `Trace`."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import numpy as np

from lightning_forge_profiling.errors import TraceError
from lightning_forge_profiling.kineto.chunks import TraceText
from lightning_forge_profiling.kineto.tables import EventDecoder, TraceTables
from lightning_forge_profiling.kineto.trace import Trace
from lightning_forge_profiling.names import METADATA_KEY
from lightning_forge_profiling.plain_text import encodable
from lightning_forge_profiling.schema import LoaderSettings

_MOST_LEFT_OUT: Final = 200_000
_ABOUT: Final = ("distributedInfo", METADATA_KEY)
_MOST_RANKS: Final = 2**31  # MPI and NCCL count ranks in a C int

_Fields = Mapping[str, msgspec.Raw]
T = TypeVar("T")


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
    tables.close()
    problems = list(text.problems)
    for number, what in (
        (decoder.left_out, "malformed and left out"),
        (decoder.without_arguments, "read without their arguments, whose format is unknown"),
        (tables.left_out, "left out for a missing or impossible time"),
    ):
        if number:
            problems.append(f"{number} {'event is' if number == 1 else 'events are'} {what}")
    if tables.empty:
        what = f"of its {count} events, none is an operator, a runtime call, GPU work or an annotation"
        raise TraceError(f"{path}: {'; '.join([what, *problems])}")
    name = encodable(path.name)
    cut = tables.cut()
    trace = tables.trace(name)
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
    return next((device for device in devices if str(device.id) == number), _Device())


def _count(name: str, *fields: _Fields) -> int | None:
    counts = (_value(each, name, int) for each in fields)
    return next((count for count in counts if count is not None and 0 <= count < _MOST_RANKS), None)


def _value(fields: _Fields, name: str, form: type[T]) -> T | None:
    """The value of a field; None where it is missing or of another form."""
    try:
        return msgspec.json.decode(fields[name], type=form)
    except (KeyError, msgspec.DecodeError):
        return None
