"""Several windows of one rank as one trace."""

from collections.abc import Hashable, Sequence
from dataclasses import fields, replace
from typing import Any, Final, TypeVar

import numpy as np

from lightning_forge_profiling.analysis.trace import Ints, Trace

__all__ = ["join_traces"]

_APART_NS: Final = 10**9
_TABLES: Final = ("gpu", "calls", "operators", "annotations", "frames", "allocations")
_INDEX_OF: Final = {
    "name": "names", "thread": "threads", "lane": "lanes", "signature": "signatures", "collective": "collectives",
}  # fmt: skip
_TIMES: Final = ("start", "end", "time")
_IDS: Final = ("correlation", "external")

Table = TypeVar("Table")


def join_traces(traces: Sequence[Trace]) -> Trace:
    """Put windows of one rank one after the other.

    The time between them is not kept: it is in none of the steps, and files of different origin may share no clock.

    Args:
        traces: in order of time.
    """
    joined = traces[0]
    for trace in traces[1:]:
        joined = _join(joined, trace)
    return joined


def _join(first: Trace, second: Trace) -> Trace:
    begin, end = _extent(second)[0], _extent(first)[1]
    shift = end - begin + _APART_NS
    lists: dict[str, Any] = {}
    new_index: dict[str, Ints] = {}
    for column, name in _INDEX_OF.items():
        lists[name], new_index[column] = _merged(getattr(first, name), getattr(second, name))
    offsets = {column: 1 + max(_largest(first, column), 0) for column in _IDS}
    tables: dict[str, Any] = {
        name: _append(getattr(first, name), getattr(second, name), shift, new_index, offsets) for name in _TABLES
    }
    return replace(
        first,
        file=f"{first.file} and more" if len(first.begins) == 1 else first.file,
        begins=(*first.begins, begin + shift),
        warnings=(*first.warnings, *second.warnings),
        **lists,
        **tables,
    )


def _append(first: Table, second: Table, shift: int, new_index: dict[str, Ints], offsets: dict[str, int]) -> Table:
    columns = {}
    for field in fields(first):  # type: ignore[arg-type]
        name, values = field.name, getattr(second, field.name)
        if name in _TIMES:
            values = values + shift
        elif name in new_index:
            values = new_index[name][values]
        elif name in offsets:
            values = np.where(values > 0, values + offsets[name], values)
        columns[name] = np.concatenate((getattr(first, name), values))
    return type(first)(**columns)


def _merged(first: Sequence[Any], second: Sequence[Any]) -> tuple[tuple[Any, ...], Ints]:
    """Both lists as one, and for each entry of the second its place there; the place of -1 stays -1."""
    place: dict[Hashable, int] = {value: row for row, value in enumerate(first)}
    rows = [place.setdefault(value, len(place)) for value in second]
    return tuple(place), np.array([*rows, -1], np.int64)


def _extent(trace: Trace) -> tuple[int, int]:
    tables: list[Any] = [table for table in (trace.gpu, trace.calls, trace.operators, trace.annotations) if len(table)]
    if not tables:
        return 0, 0
    return min(int(table.start.min()) for table in tables), max(int(table.end.max()) for table in tables)


def _largest(trace: Trace, column: str) -> int:
    tables: tuple[Any, ...] = (trace.gpu, trace.calls, trace.operators)
    return max((int(getattr(table, column).max(initial=0)) for table in tables if hasattr(table, column)), default=0)
