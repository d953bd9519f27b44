"""Several windows of one rank as one trace."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from lightning_forge_profiling.kineto.trace import Ints, Table, Trace

_APART_NS: Final = 10**9
_TABLES: Final = ("gpu", "calls", "operators", "annotations", "frames", "allocations")
_INDEX_OF: Final = {
    "name": "names", "thread": "threads", "lane": "lanes", "signature": "signatures", "collective": "collectives",
}  # fmt: skip
_IDS: Final = ("correlation", "external")
_LARGEST_ID: Final = 2**60  # larger than any profiler's; ids beyond it may collide, but must not overflow


def join_traces(traces: Sequence[Trace]) -> Trace:
    """Join windows of one rank, one after the other.

    The time between them is not kept: it belongs to no step, and the files may not share a clock.
    """
    first, *others = traces
    if not others:
        return first
    lists = {name: {value: row for row, value in enumerate(getattr(first, name))} for name in _INDEX_OF.values()}
    largest = {column: max(_largest(first, column), 0) for column in _IDS}
    pieces: dict[str, list[dict[str, Ints]]] = {name: [getattr(first, name).columns()] for name in _TABLES}
    begins, (_, end) = [*first.begins], first.extent
    cuts = [*first.cuts]
    for trace in others:
        began, ended = trace.extent
        shift = end - began + _APART_NS
        begins.append(began + shift)
        cuts += [cut and replace(cut, time=cut.time + shift) for cut in trace.cuts]
        end = ended + shift
        position = {column: _merged(lists[name], getattr(trace, name)) for column, name in _INDEX_OF.items()}
        for name in _TABLES:
            pieces[name].append(_moved(getattr(trace, name), shift, position, largest))
        for column in _IDS:
            largest[column] = (largest[column] + 1 + max(_largest(trace, column), 0)) % _LARGEST_ID
    joined: dict[str, Any] = {name: tuple(values) for name, values in lists.items()}
    for name, parts in pieces.items():
        columns = {column: np.concatenate([part[column] for part in parts]) for column in parts[0]}
        joined[name] = type(getattr(first, name))(**columns)
    return replace(
        first,
        file=f"{first.file} and more",
        base_ns=None,
        begins=tuple(begins),
        cuts=tuple(cuts),
        light_steps=tuple({step for trace in traces for step in trace.light_steps}),
        warnings=tuple(warning for trace in traces for warning in trace.warnings),
        **joined,
    )


def _moved(table: Table, shift: int, position: Mapping[str, Ints], largest: Mapping[str, int]) -> dict[str, Ints]:
    """The columns of a later trace, with times, positions and ids moved behind those of the earlier ones."""
    columns = table.columns()
    for name, values in columns.items():
        if name in {"start", "end"}:
            columns[name] = values + shift
        elif name in position:
            columns[name] = position[name][values]
        elif name in largest:
            columns[name] = np.where(values > 0, values + largest[name] + 1, values)
    return columns


def _merged(position: dict[Hashable, int], values: Sequence[Hashable]) -> Ints:
    """Add new values; returns the position of each value, followed by -1 so that -1 maps to itself."""
    return np.array([*(position.setdefault(value, len(position)) for value in values), -1], np.int64)


def _largest(trace: Trace, column: str) -> int:
    tables: tuple[Any, ...] = (trace.gpu, trace.calls, trace.operators)
    return max((int(getattr(table, column).max(initial=0)) for table in tables if hasattr(table, column)), default=0)
