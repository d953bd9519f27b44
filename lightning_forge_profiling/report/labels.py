"""Names from a trace, shortened so that no two of a table read alike."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, takewhile
from typing import Final

from lightning_forge_profiling.kernel_name import loop_name, short, short_kernel_name, templated_name
from lightning_forge_profiling.plain_text import LONGEST_KERNEL

_TOKEN: Final = re.compile(r"[^\W_]+|.", re.DOTALL)
_TAIL: Final = 2 / 3  # the share of a label for the part that differs; the rest is the beginning of the name
_ROUNDS: Final = 3  # a label that separates two names may equal that of a third; then those two are separated
_Shorten = Callable[[str, int], str]


def kernel_labels(names: Sequence[str], width: int) -> dict[str, str]:
    """Short names of kernels; those that would read alike show what they differ in."""
    return _labels(names, width, short_kernel_name)


def operator_labels(names: Sequence[str], width: int) -> dict[str, str]:
    """Names of operators, long ones without their middle; those that would read alike show what they differ in."""
    return _labels(names, width, _without_middle)


def _without_middle(name: str, width: int) -> str:
    """An operator's name. The end of a long one matters: the function whose backward autograd runs."""
    name = short(name, LONGEST_KERNEL)
    head = width // 3
    return name if len(name) <= width else f"{name[:head]}…{name[head + 1 - width :]}"


def _labels(names: Sequence[str], width: int, shorten: _Shorten) -> dict[str, str]:
    labels = {name: shorten(name, width) for name in names}
    for _ in range(_ROUNDS):
        for alike in _alike(labels):
            labels.update(_apart(alike, width, shorten))
    taken: Counter[str] = Counter()
    for name, label in labels.items():  # names that differ in what is never shown, or too far behind
        taken[label] += 1
        if taken[label] > 1:
            number = f" #{taken[label]}"
            labels[name] = short(label, width - len(number)) + number
    return labels


def _alike(labels: Mapping[str, str]) -> list[list[str]]:
    sharing = defaultdict(list)
    for name, label in labels.items():
        sharing[label].append(name)
    return [names for names in sharing.values() if len(names) > 1]


def _apart(names: Sequence[str], width: int, shorten: _Shorten) -> Iterator[tuple[str, str]]:
    """Labels of what names begin with, and of the part in which they differ."""
    texts, begins = [shorten(name, LONGEST_KERNEL) for name in names], [""] * len(names)
    if len(set(texts)) == 1:  # their templates differ, their arguments, or their namespaces
        begins = [loop_name(name) for name in names]
        templated = [templated_name(name) for name in names]
        texts = templated if len(set(templated)) == len(names) else [short(name, LONGEST_KERNEL) for name in names]
    tokens = [_TOKEN.findall(text) for text in texts]
    same = _same(tokens)
    same_end = _same([list(reversed(own[same:])) for own in tokens])
    for name, own, begin in zip(names, tokens, begins, strict=True):
        head_tokens = [*_TOKEN.findall(begin), " ", "…"] if begin else own[:same]
        head, differs = "".join(head_tokens), "".join(own[same : len(own) - same_end])
        least = int((1 - _TAIL if begin else _TAIL) * width)
        tail = short(differs + "…" * (same_end > 0), max(least, width - len(head)))
        if len(head) > width - len(tail):
            lengths = accumulate(map(len, head_tokens))
            whole = [length for length in lengths if length < width - len(tail)]
            head = f"{head[: max(whole, default=0)].rstrip()}…"
        yield name, head + tail


def _same(tokens: Sequence[Sequence[str]]) -> int:
    """How many tokens all of them begin with."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*tokens, strict=False)))
