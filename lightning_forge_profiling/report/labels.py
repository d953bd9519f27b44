"""Names from a trace, shortened so that no two of a table read alike."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, takewhile
from typing import Final

from lightning_forge_profiling.plain_text import LONGEST_KERNEL, plain

_LAMBDA = re.compile(r"\([^()]*\)(?:::\{lambda\([^()]*\)#\d+\}|::operator\(\)\([^()]*\)(?: const)?)+")
_NAMESPACES = re.compile(r"\b(?:\w+::)+")
_RETURN_TYPE = re.compile(r"^(?:void|int|bool|float|double) ")
_CAST = re.compile(r"\([\w:]+(?: [\w:]+)*\)(?=-?\d)")  # as in (int)4
_CONSTANT = re.compile(r"\b(?:C<|constant<int, )(-?\d+)>")  # CuTe's, as its shapes: tuple<C<128>, C<64>>
_SHAPE = re.compile(r"\btuple<(\d+(?:, ?\d+)+)>")


def short_kernel_name(name: str, width: int = LONGEST_KERNEL) -> str:
    """A kernel's short name: without return type, namespaces and arguments, its template kept.

    The template names what an elementwise or reduction kernel computes, so a long name is cut at its end.
    """
    name = plain(name)[:LONGEST_KERNEL]
    bare = _RETURN_TYPE.sub("", name).replace("(anonymous namespace)::", "")
    bare = _LAMBDA.sub("", _without_arguments(bare))
    bare = _CONSTANT.sub(r"\1", _CAST.sub("", _NAMESPACES.sub("", bare)).replace(" >", ">"))
    return short(_SHAPE.sub(lambda shape: re.sub(", ?", "x", shape[1]), bare) or name, width)


def short(text: str, width: int) -> str:
    """Plain text of at most `width` characters, an ellipsis for what is cut off; a number in it is cut off whole."""
    text = plain(text)
    if len(text) <= width:
        return text
    kept, lost = text[: max(0, width - 1)], text[max(0, width - 1) :]
    return (kept.rstrip("0123456789") if lost[0].isalnum() else kept).rstrip() + "…"


def _without_arguments(name: str) -> str:
    """The name without its argument list; parentheses after a space are a remark, as in a copy's name."""
    if not name.endswith(")"):
        return name
    depth = 0
    for position in range(len(name) - 1, 0, -1):
        depth += {")": 1, "(": -1}.get(name[position], 0)
        if depth == 0:
            return name if name[position - 1] == " " else name[:position]
    return name


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
    texts = [shorten(name, LONGEST_KERNEL) for name in names]
    if len(set(texts)) < len(texts):
        texts = [short(name, LONGEST_KERNEL) for name in names]  # their arguments differ, or their namespaces
    tokens = [_TOKEN.findall(text) for text in texts]
    same = _same(tokens)
    same_end = _same([list(reversed(own[same:])) for own in tokens])
    for name, own in zip(names, tokens, strict=True):
        head, differs = "".join(own[:same]), "".join(own[same : len(own) - same_end])
        tail = short(differs + "…" * (same_end > 0), max(int(_TAIL * width), width - len(head)))
        if len(head) > width - len(tail):
            lengths = accumulate(map(len, own[:same]))
            whole = [length for length in lengths if length < width - len(tail)]
            head = f"{head[: max(whole, default=0)].rstrip()}…"
        yield name, head + tail


def _same(tokens: Sequence[Sequence[str]]) -> int:
    """How many tokens all of them begin with."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*tokens, strict=False)))
