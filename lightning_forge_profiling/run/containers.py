"""Lists, dictionaries, sets and deques of the user's objects that get longer from step to step, and what they hold."""

import dis
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, pairwise
from types import CodeType, FunctionType
from typing import Any, Final, NamedTuple

import torch

from lightning_forge_profiling.ranks.stacks import is_users, shown_file
from lightning_forge_profiling.schema import Holder

# exactly these: a class derived from one may run the user's code
_KINDS: Final = frozenset({list, dict, set, deque, defaultdict, OrderedDict})
_ADDS: Final = frozenset(
    {"append", "appendleft", "extend", "insert", "add", "update", "setdefault", "STORE_SUBSCR", "LIST_EXTEND"}
)
_FEWEST: Final = 3  # counts over which one has grown
_MOST_EVEN: Final = 2.0  # entries a step in one half of the counts over those in the other
_EXPLAINS: Final = 0.2  # the least share of the growth that its entries take, where no graphs hang on them
_FIRST: Final = 8  # so many of what a nested entry holds are looked into
_DEEP: Final = 3
_FEW: Final = 64

Owners = Callable[[], Iterable[tuple[str, Any]]]  # what may have such attributes, by its name in the code


class _Held(NamedTuple):
    """What an entry holds."""

    tensors: int = 0
    graphs: int = 0  # tensors with the graph that computed them
    bytes: int = 0


class _Container(NamedTuple):
    owner: str
    attribute: str


class Containers:
    """Counts the entries of containers now and then. Only `len` of them is taken, and no property is read."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        self._counts: dict[_Container, list[tuple[int, int]]] = {}  # steps and numbers of entries

    def count(self, step: int) -> None:
        """Count the entries after a step."""
        seen: set[int] = set()
        for container, value, _ in self._all():
            if id(value) not in seen:  # what several objects share is the first one's
                seen.add(id(value))
                self._counts.setdefault(container, []).append((step, len(value)))

    def holder(self, bytes_per_step: float) -> Holder | None:
        """What explains memory that grows so much; None if none of them does."""
        found: list[tuple[tuple[bool, float], Holder]] = []
        for container, value, owner in self._all():
            per_step = _entries_per_step(self._counts.get(container, ()))
            if not per_step or type(value) not in _KINDS:
                continue
            held = _held(_latest(value))
            takes = per_step * held.bytes
            if held.graphs or takes >= _EXPLAINS * bytes_per_step:
                holder = Holder(
                    name=f"{container.owner}.{container.attribute}".lstrip("."),
                    kind=type(value).__name__,
                    owner=owner.__name__ if isinstance(owner, type(sys)) else type(owner).__name__,
                    entries=len(value),
                    per_step=per_step,
                    holds="graphs" if held.graphs else "tensors" if held.tensors else "",
                    where=self._adds_to(container.attribute.partition("[")[0]),
                )
                found.append(((bool(held.graphs), takes), holder))
        return max(found, key=lambda each: each[0])[1] if found else None

    def _all(self) -> Iterator[tuple[_Container, Any, Any]]:
        for name, owner in self._owners():
            for attribute, value in list(vars(owner).items()):
                if type(value) not in _KINDS or not value or attribute.startswith("__"):
                    continue
                yield _Container(name, attribute), value, owner
                if isinstance(value, dict) and len(value) <= _FEW:  # as of a list for each name
                    for key, inner in list(value.items()):
                        if type(inner) in _KINDS and inner and isinstance(key, str):
                            yield _Container(name, f"{attribute}[{key!r}]"), inner, owner

    def _adds_to(self, attribute: str) -> str:
        """The line of the user's code that adds to the attribute, as `train.py:9 training_step`; "" if unknown."""
        owners = [owner for _, owner in self._owners()]
        kinds = dict.fromkeys(kind for owner in owners for kind in type(owner).__mro__)
        scopes = [*kinds, *(owner for owner in owners if isinstance(owner, type(sys)))]
        functions = (each for scope in scopes for each in vars(scope).values() if isinstance(each, FunctionType))
        places = (_line_that_adds(each.__code__, attribute) for each in functions)
        return next(filter(None, places), "")


def _entries_per_step(counts: Iterable[tuple[int, int]]) -> float:
    """How many entries come on top in each step; 0 for what does not get longer all the time."""
    counts = sorted(dict(counts).items())
    if len(counts) < _FEWEST or any(later[1] <= earlier[1] for earlier, later in pairwise(counts)):
        return 0.0
    (begin, fewest), (step, entries), (end, most) = counts[0], counts[len(counts) // 2], counts[-1]
    halves = (entries - fewest) / (step - begin), (most - entries) / (end - step)
    return (most - fewest) / (end - begin) if max(halves) <= _MOST_EVEN * min(halves) else 0.0


def _latest(value: Any) -> Any:
    """An entry, the latest one where the container has an order."""
    if isinstance(value, set):
        return next(iter(value), None)
    return value[next(reversed(value))] if isinstance(value, dict) else next(reversed(value), None)


def _held(entry: Any, depth: int = 0) -> _Held:
    if isinstance(entry, torch.Tensor):
        size = entry.untyped_storage().nbytes() if entry.layout is torch.strided else 0
        return _Held(1, int(entry.grad_fn is not None), size)
    inner: Iterable[Any] = ()
    if type(entry) in {dict, defaultdict, OrderedDict}:
        inner = entry.values()
    elif type(entry) in {list, tuple, deque}:
        inner = entry
    held = [_held(each, depth + 1) for each in islice(inner, _FIRST)] if depth < _DEEP else []
    is_array = type(entry).__module__ == "numpy"
    own = int(entry.nbytes) if is_array else sys.getsizeof(entry) if type(entry) in {str, bytes, int, float} else 0
    return _Held(
        sum(each.tensors for each in held), sum(each.graphs for each in held), own + sum(each.bytes for each in held)
    )


def _line_that_adds(code: CodeType, attribute: str) -> str:
    if attribute in code.co_names and is_users(code.co_filename):
        lines: defaultdict[int, set[str]] = defaultdict(set)
        for each in dis.get_instructions(code):
            line = each.positions.lineno if each.positions is not None else None
            if line is not None:
                lines[line] |= {str(each.argval), each.opname, "extend" if each.argrepr == "+=" else ""}
        for line, named in lines.items():
            if attribute in named and named & _ADDS:
                return f"{shown_file(code.co_filename)}:{line} {code.co_name}"
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return next(filter(None, (_line_that_adds(each, attribute) for each in inner)), "")
