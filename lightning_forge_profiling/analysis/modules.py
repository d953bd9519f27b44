"""Which module of the model the work of forward and backward is of."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from lightning_forge_profiling.analysis.intervals import NOTHING, Nesting, take
from lightning_forge_profiling.analysis.operators import ENGINE
from lightning_forge_profiling.analysis.recording import Recording
from lightning_forge_profiling.analysis.steps import named, spans_of
from lightning_forge_profiling.kineto.trace import GpuWork, Ints, Spans
from lightning_forge_profiling.names import MODULE_MARK
from lightning_forge_profiling.schema import ModuleTime

_LEAST_PCT: Final = 1.0
_MARK: Final = re.compile(rf"{MODULE_MARK}(?P<path>.*) \((?P<kind>[^()]*)\)")


class _Called(NamedTuple):
    """A module that was called: its path, in which `*` stands for equal layers of a list, and its class."""

    path: tuple[str, ...]
    kind: str


def module_table(recording: Recording) -> tuple[ModuleTime, ...]:
    """The modules that take at least 1 % of the step, each before those in it, the longest first.

    The work of a backward pass is that of the module which was called when its node was made: autograd gives a node and
    the operator that made it one sequence number.
    """
    trace, steps = recording.trace, recording.steps
    marks = trace.modules.at(steps.host.at(trace.modules.start) >= 0)
    step_ms = steps.mean_ms((steps.gpu if len(trace.gpu) else steps.host).length())
    if not len(marks) or not step_ms:
        return ()
    of_name = _called({name: trace.names[name] for name in np.unique(marks.name).tolist()})
    backward_in = _modules_of_backward(recording, marks)
    if len(trace.gpu):
        counts, windows = recording.step >= 0, steps.gpu
        in_backward = np.where(counts, take(backward_in, recording.links.operator), -1)
        called_at = Nesting(marks).enclosing(recording.links.time, recording.links.thread)
        parts = _Part(trace.gpu, np.where(counts & (in_backward < 0), called_at, -1)), _Part(trace.gpu, in_backward)
    else:
        windows = steps.host
        parts = _Part(marks, np.arange(len(marks))), _Part(trace.operators, backward_in)
    engine = NOTHING if len(trace.gpu) else spans_of(trace.operators, backward_in >= 0)  # calls forward again
    names = [np.append(marks.name, -1)[part.mark] for part in parts]  # -1 of what is in no module
    table = {}
    for path, of_group in _groups(of_name).items():
        forward, backward = (
            spans_of(part.work, np.isin(name, of_group)) for part, name in zip(parts, names, strict=True)
        )
        forward_ms, backward_ms = (steps.mean_ms(windows.measure(each)) for each in (forward - engine, backward))
        if 100 * (forward_ms + backward_ms) < _LEAST_PCT * step_ms:
            continue
        itself = [name for name in of_group if of_name[name].path == path]
        table[path] = ModuleTime(
            name=".".join(path),
            kind=", ".join(sorted({of_name[name].kind for name in itself})),
            calls_per_step=int(np.isin(marks.name, itself).sum()) / len(steps),
            forward_ms_per_step=forward_ms,
            backward_ms_per_step=backward_ms,
            pct=100 * (forward_ms + backward_ms) / step_ms,
        )
    shown = list(_in_order(table))
    # a list of layers is not called itself, and takes what they take
    lists = {one.name for one, layers in pairwise(shown) if not one.kind and one.pct == layers.pct}
    return tuple(one for one in shown if one.name not in lists)


class _Part(NamedTuple):
    """Work, and in which call of a module each of it is; -1 for none."""

    work: GpuWork | Spans
    mark: Ints


def _modules_of_backward(recording: Recording, marks: Spans) -> Ints:
    """For each operator in a backward pass the call whose gradients it computes or which it makes again; else -1."""
    operators, nesting = recording.trace.operators, recording.nesting
    called_in = Nesting(marks).enclosing(operators.start, operators.thread)
    engine = named(recording.trace, operators, lambda name: name.startswith(ENGINE))
    node = nesting.outermost(engine)  # of checkpoints that run a backward pass themselves the one of the forward pass
    makers = np.flatnonzero((operators.sequence >= 0) & (node < 0))[::-1]
    # the operators within the one that makes a node have its number, too: the last one to begin makes it
    numbers, last = np.unique(operators.sequence[makers], return_index=True)
    of_node = np.full(len(operators), -1)
    nodes = np.flatnonzero(engine & np.isin(operators.sequence, numbers))
    made_by = makers[last[np.searchsorted(numbers, operators.sequence[nodes])]]
    of_node[nodes] = called_in[made_by]
    return np.where(node < 0, -1, np.where(called_in >= 0, called_in, take(of_node, node)))


def _called(names: Mapping[int, str]) -> dict[int, _Called]:
    """The modules of the ranges' names, in which `*` stands for the numbers of layers of one class in one list."""
    found = {name: match for name, text in names.items() if (match := _MARK.fullmatch(text))}
    kinds = {tuple(match["path"].split(".")): match["kind"] for match in found.values()}
    numbers: defaultdict[tuple[str, ...], set[str]] = defaultdict(set)
    for path in kinds:
        for depth in (depth for depth, each in enumerate(path) if each.isdecimal()):
            numbers[path[:depth]].add(path[depth])
    equal = {
        parent
        for parent, those in numbers.items()
        if len(those) > 1 and len({kinds.get((*parent, each), "") for each in those}) == 1
    }

    def starred(path: tuple[str, ...]) -> tuple[str, ...]:
        return tuple("*" if each.isdecimal() and path[:depth] in equal else each for depth, each in enumerate(path))

    return {name: _Called(starred(tuple(match["path"].split("."))), match["kind"]) for name, match in found.items()}


def _groups(of_name: Mapping[int, _Called]) -> dict[tuple[str, ...], list[int]]:
    """By path the names of the ranges of that module and of those in it."""
    groups: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for name, module in of_name.items():
        for depth in range(len(module.path)):
            groups[module.path[: depth + 1]].append(name)
    return groups


def _in_order(table: Mapping[tuple[str, ...], ModuleTime], within: tuple[str, ...] = ()) -> Iterator[ModuleTime]:
    """Each module before those in it, the longest first."""
    for path in sorted((path for path in table if path[:-1] == within), key=lambda path: -table[path].pct):
        yield table[path]
        yield from _in_order(table, path)
