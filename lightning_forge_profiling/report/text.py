"""Names from a trace are untrusted: how each output escapes and shortens them."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile, zip_longest
from math import floor, log10
from typing import Final

from lightning_forge_profiling.plain_text import LONGEST_KERNEL, plain

# GitHub makes links, notifications or images of these in text, but not in a code span: mentions, addresses,
# issues (#1, GH-1, TICKET-1, CVE-2026-1), emoji (:bug:), mathematics ($x$), commits.
_LIVE = re.compile(r"[@#]\w|\$|://|www\.|\w-\d|:[\w+-]+:|(?<![^\W_])[0-9a-f]{7,40}(?![^\W_])", re.IGNORECASE)
_WORD = re.compile(r"[^\s|]+")  # without pipes, which end a table's cell even in a code span
# An underscore inside a word is no markup, and setting names are full of them.
_MARKUP = re.compile(r"[\\`*\[\]|~#]|(?<![^\W_])_|_(?![^\W_])")
_LIST = re.compile(r"^(?:\d{1,9}(?=[.)](?:\s|$))|(?=[-+=]))")  # or the line below a heading


def prose(text: str) -> str:
    """Text escaped for a line or cell of GitHub's Markdown; a word it would link or notify becomes a code span."""
    text = plain(text).strip()
    pieces: list[str] = []
    shown = 0
    for word in _WORD.finditer(text):
        if _LIVE.search(word[0]):
            live = word[0].rstrip(".,;!?") or word[0]
            pieces += [_escaped(text[shown : word.start()]), code(live)]
            shown = word.start() + len(live)
    return _LIST.sub(r"\g<0>\\", "".join([*pieces, _escaped(text[shown:])]))


def _escaped(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKUP.sub(r"\\\g<0>", text)


def code(text: str) -> str:
    """Text as a code span of Markdown, outside of tables."""
    text = plain(text) or " "
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    padding = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{padding}{text}{padding}{fence}"


def code_cell(text: str) -> str:
    """Text as a code span in a table cell, with its pipes escaped."""
    # Parsers differ on a backslash before an escaped pipe: drop it.
    return re.sub(r"\\*\|", r"\|", code(text))


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


def digits(rate: float) -> str:
    """At least three digits of a rate, never an exponent."""
    return f"{rate:,.{max(0, 2 - floor(log10(rate)))}f}" if rate > 0 else "0"


_TOKEN: Final = re.compile(r"[^\W_]+|.", re.DOTALL)
_RETURN_TYPE_OR_NAMESPACE: Final = re.compile(r"^void |\(anonymous namespace\)::|\b(?:\w+::)+")
_TAIL: Final = 2 / 3  # the share of a label for the part that differs; the rest is the beginning of the name
_ROUNDS: Final = 3  # a label that separates two names may equal that of a third; then those two are separated
_FILLERS: Final = 2  # this many equal tokens between two that differ are shown: they take no more room than an ellipsis
_Shorten = Callable[[str, int], str]


def kernel_labels(names: Sequence[str], width: int) -> dict[str, str]:
    """Short names of kernels; those that would read alike show what they differ in."""
    return _labels(names, width, short_kernel_name)


def operator_labels(names: Sequence[str], width: int) -> dict[str, str]:
    """Names of operators, long ones without their middle; those that would read alike show what they differ in."""
    return _labels(names, width, _without_middle)


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
    """The names that have a label in common."""
    sharing = defaultdict(list)
    for name, label in labels.items():
        sharing[label].append(name)
    return [names for names in sharing.values() if len(names) > 1]


def _apart(names: Sequence[str], width: int, shorten: _Shorten) -> dict[str, str]:
    """Labels that show the tokens in which these names differ."""
    texts: list[str] = []
    for form in (shorten, _with_arguments, short):
        texts = [form(name, LONGEST_KERNEL) for name in names]
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
    name = short(name, LONGEST_KERNEL)
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
    positions = [position for position in range(len(tokens)) if position < len(differs) and differs[position]]
    if not positions:
        return short("".join(tokens), width)
    tail, before = "", positions[0] - 1
    for position in positions:
        between = tokens[before + 1 : position]
        tail += ("".join(between) if len(between) <= _FILLERS else "…") + tokens[position]
        before = position
    head, rest = "".join(tokens[: positions[0]]), "…" if positions[-1] + 1 < len(tokens) else ""
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
