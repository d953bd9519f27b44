"""Names cut to a width so that different names of one table stay different."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile, zip_longest
from typing import Final

from lightning_forge_profiling.report.text import short, short_kernel_name

_LONGEST_NAME: Final = 2000
_TOKEN: Final = re.compile(r"[^\W_]+|.", re.DOTALL)
_RETURN_TYPE_OR_NAMESPACE: Final = re.compile(r"^void |\(anonymous namespace\)::|\b(?:\w+::)+")
_TAIL: Final = 2 / 3
"""The share of a label for the part that differs; the rest is the beginning of the name."""
_ROUNDS: Final = 3
"""A label that separates two names may equal that of a third; then those two are separated."""
_FILLERS: Final = 2
"""This many equal tokens between two that differ are shown: they take no more room than an ellipsis."""

_Shorten = Callable[[str, int], str]


def kernel_labels(names: Sequence[str], width: int) -> list[str]:
    """Short names of kernels; those that would read alike show what they differ in.

    Example:
        >>> gemm = "void cutlass::device_kernel<GemmUniversal<cute::tuple<int, int>, CollectiveMma<{}, float> > >()"
        >>> tiles = ("cute::tuple<cute::C<128>, cute::C<64> >", "cute::tuple<cute::C<256>, cute::C<64> >")
        >>> for label in kernel_labels([gemm.format(tile) for tile in tiles], 40):
        ...     print(label)
        device_kernel<GemmUniversal<…128x64…
        device_kernel<GemmUniversal<…256x64…
    """
    return _labels(names, width, short_kernel_name)


def operator_labels(names: Sequence[str], width: int) -> list[str]:
    """Names of operators, long ones without their middle; those that would read alike show what they differ in.

    Example:
        >>> operator_labels(["autograd::engine::evaluate: MmBackward0", "autograd::engine::evaluate: MulBackward0"], 24)
        ['autograd…te: MmBackward0', 'autograd…e: MulBackward0']
    """
    return _labels(names, width, _without_middle)


def _labels(names: Sequence[str], width: int, shorten: _Shorten) -> list[str]:
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
    return [labels[name] for name in names]


def _alike(labels: Mapping[str, str]) -> list[list[str]]:
    """The names that have a label in common."""
    sharing = defaultdict(list)
    for name, label in labels.items():
        sharing[label].append(name)
    return [names for names in sharing.values() if len(names) > 1]


def _apart(names: Sequence[str], width: int, shorten: _Shorten) -> dict[str, str]:
    """Labels that show the tokens in which these names differ."""
    texts: list[str] = []
    for form in (shorten, _with_arguments, short):
        texts = [form(name, _LONGEST_NAME) for name in names]
        if len(set(texts)) == len(texts):
            break
    tokens = [_TOKEN.findall(text) for text in texts]
    differs = _differing(tokens)
    labels = {name: _label(own, differs, width) for name, own in zip(names, tokens, strict=True)}
    for alike in _alike(labels):
        if len(alike) < len(names):
            labels.update(_apart(alike, width, shorten))
    return labels


def _with_arguments(name: str, width: int) -> str:
    """A kernel's name without namespaces, but with the arguments and lambda numbers that `short_kernel_name` drops."""
    return _RETURN_TYPE_OR_NAMESPACE.sub("", short(name, width))


def _without_middle(name: str, width: int) -> str:
    """An operator's name. The end of a long one matters: the function whose backward autograd runs."""
    name = short(name, _LONGEST_NAME)
    head = width // 3
    return name if len(name) <= width else f"{name[:head]}…{name[head + 1 - width :]}"


def _differing(tokens: Sequence[Sequence[str]]) -> list[bool]:
    """For each token, whether the names differ there; for different lengths, everything between the equal ends does."""
    differs = [len(set(column)) > 1 for column in zip_longest(*tokens)]
    if len({len(own) for own in tokens}) == 1 or True not in differs:
        return differs
    first = differs.index(True)
    columns = zip(*(reversed(own[first:]) for own in tokens), strict=False)
    same_end = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    return [False] * first + [True] * (len(differs) - first - same_end)


def _label(tokens: Sequence[str], differs: Sequence[bool], width: int) -> str:
    places = [place for place in range(len(tokens)) if place < len(differs) and differs[place]]
    if not places:
        return short("".join(tokens), width)
    tail, before = "", places[0] - 1
    for place in places:
        between = tokens[before + 1 : place]
        tail += ("".join(between) if len(between) <= _FILLERS else "…") + tokens[place]
        before = place
    head, rest = "".join(tokens[: places[0]]), "…" if places[-1] + 1 < len(tokens) else ""
    tail = short(tail + rest, max(int(_TAIL * width), width - len(head)))
    room = width - len(tail)
    if len(head) > room:
        kept = ""
        for token in tokens:
            if len(kept + token) >= room:
                break
            kept += token
        head = f"{kept.rstrip()}…"
    return head + tail
