"""From a file to columns."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from lightning_forge_profiling.errors import TraceError
from lightning_forge_profiling.kineto.chunks import TraceText
from lightning_forge_profiling.kineto.event import EventDecoder
from lightning_forge_profiling.kineto.tables import TraceTables
from lightning_forge_profiling.kineto.trace import Trace
from lightning_forge_profiling.names import METADATA_KEY
from lightning_forge_profiling.plain_text import encodable
from lightning_forge_profiling.results.loader_settings import LoaderSettings

__all__ = ["read_trace"]

_MOST_LEFT_OUT: Final = 200_000
_MOST_RANKS: Final = 2**31  # of MPI and NCCL, which count them in a C int


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
    tables = TraceTables()
    count = 0
    with contextlib.closing(text.events()) as pieces:
        for events in pieces:
            tables.add(events)
            count += len(events)
            if decoder.left_out > _MOST_LEFT_OUT:
                text.problems.append("the rest was not read: too many entries of its list are not like an event")
                break
    tables.drop_absurd()
    tables.begin_at_zero()
    problems = list(text.problems)
    first = f", the first at byte {text.skipped[0]}" if text.skipped else ""
    for number, what in (
        (len(text.skipped), f"not JSON and left out{first}"),
        (decoder.left_out, "not like an event and left out"),
        (decoder.without_arguments, "read without their arguments, which are of an unknown form"),
        (tables.left_out, "left out because they have no time or one that cannot be"),
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
    host = _host(text.header)
    return replace(
        trace,
        rank=_rank(text.header),
        intra_op_threads=host.intra_op_threads,
        usable_cores=host.usable_cores if host.world_size == 1 else None,
        device=device.name,
        memory_bytes=device.memory,
        multiprocessors=device.multiprocessors,
        loader=_loader(text.header),
        cuts=(None if text.complete else cut,),
        warnings=(f"{name}: {'; '.join(problems)}",) if problems else (),
    )


class _Device(msgspec.Struct):
    id: int = -1
    name: str = ""
    memory: int | None = msgspec.field(default=None, name="totalGlobalMem")
    multiprocessors: int | None = msgspec.field(default=None, name="numSms")


class _Distributed(msgspec.Struct):
    rank: int | None = None


class _About(msgspec.Struct):
    loader: LoaderSettings | None = None


class _Host(msgspec.Struct):
    world_size: int | None = None
    intra_op_threads: int | None = None
    usable_cores: int | None = None


def _device(header: Mapping[str, msgspec.Raw], trace: Trace) -> _Device:
    """The GPU that did most of the work."""
    try:
        devices = msgspec.json.decode(header.get("deviceProperties", b"[]"), type=list[_Device])
    except msgspec.DecodeError:
        devices = []
    number = trace.lanes[int(np.bincount(trace.gpu.lane).argmax())][0] if len(trace.gpu) else ""
    return next((device for device in devices if str(device.id) == number), _Device())


def _host(header: Mapping[str, msgspec.Raw]) -> _Host:
    try:
        return msgspec.json.decode(header.get(METADATA_KEY, b"{}"), type=_Host)
    except msgspec.DecodeError:
        return _Host()


def _rank(header: Mapping[str, msgspec.Raw]) -> int | None:
    for field in ("distributedInfo", METADATA_KEY):
        try:
            rank = msgspec.json.decode(header.get(field, b"{}"), type=_Distributed).rank
        except msgspec.DecodeError:
            continue
        if rank is not None and 0 <= rank < _MOST_RANKS:
            return rank
    return None


def _loader(header: Mapping[str, msgspec.Raw]) -> LoaderSettings | None:
    try:
        return msgspec.json.decode(header.get(METADATA_KEY, b"{}"), type=_About).loader
    except msgspec.DecodeError:
        return None
