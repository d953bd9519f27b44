"""Names from a trace are untrusted: how each output escapes and shortens them."""

import re
from html import escape
from math import floor, log10

from lightning_forge_profiling.plain_text import plain

_LONGEST_NAME = 2000  # real C++ names stay below it; what comes after is never shown


# GitHub makes links, notifications or images of these in text, but not in a code span: mentions, addresses,
# issues (#1, GH-1, TICKET-1, CVE-2026-1), emoji (:bug:), mathematics ($x$), commits.
_LIVE = re.compile(r"[@#]\w|\$|://|www\.|\w-\d|:[\w+-]+:|(?<![^\W_])[0-9a-f]{7,40}(?![^\W_])", re.IGNORECASE)
_WORD = re.compile(r"[^\s|]+")  # without pipes, which end a table's cell even in a code span
# An underscore inside a word is no markup, and setting names are full of them.
_MARKUP = re.compile(r"[\\`*\[\]|~#]|(?<![^\W_])_|_(?![^\W_])")
_LIST = re.compile(r"^(?:\d{1,9}(?=[.)](?:\s|$))|(?=[-+=]))")  # or the line below a heading


def escaped(text: str) -> str:
    """Text as it stands in HTML, where it can add no markup."""
    return escape(plain(text))


def prose(text: str) -> str:
    r"""Text escaped for a line or a table cell of GitHub's Markdown.

    There is no markup, no HTML, no new line, column or list in it. A word that GitHub would link, or that would notify
    a user, becomes a code span.

    Example:
        >>> prose("set num_workers | <b>*4*</b>")
        'set num_workers \\| &lt;b&gt;\\*4\\*&lt;/b&gt;'
        >>> prose("ask @octocat, see GH-12 or https://example.com")
        'ask `@octocat`, see `GH-12` or `https://example.com`'
    """
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
    """Text as a code span of Markdown, outside of tables.

    Example:
        >>> code("vector<int> a|b")
        '`vector<int> a|b`'
        >>> code("a`b")
        '``a`b``'
    """
    text = plain(text) or " "
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    padding = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{padding}{text}{padding}{fence}"


def code_cell(text: str) -> str:
    r"""Text as a code span in a table cell, with its pipes escaped.

    Example:
        >>> code_cell("vector<int> a|b")
        '`vector<int> a\\|b`'
    """
    # Parsers differ on a backslash before an escaped pipe: drop it.
    return re.sub(r"\\*\|", r"\|", code(text))


_LAMBDA = re.compile(r"\([^()]*\)(?:::\{lambda\([^()]*\)#\d+\}|::operator\(\)\([^()]*\)(?: const)?)+")
_NAMESPACES = re.compile(r"\b(?:\w+::)+")
_RETURN_TYPE = re.compile(r"^(?:void|int|bool|float|double) ")
_CAST = re.compile(r"\([\w:]+(?: [\w:]+)*\)(?=-?\d)")  # as in (int)4
_CONSTANT = re.compile(r"\b(?:C<|constant<int, )(-?\d+)>")  # CuTe's, as its shapes: tuple<C<128>, C<64>>
_SHAPE = re.compile(r"\btuple<(\d+(?:, ?\d+)+)>")


def short_kernel_name(name: str, width: int = _LONGEST_NAME) -> str:
    """A kernel's short name: without return type, namespaces and arguments, its template kept.

    The template names what an elementwise or reduction kernel computes, so a long name is cut at its end.

    Example:
        >>> short_kernel_name("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float> >(int)")
        'vectorized_elementwise_kernel<4, AddFunctor<float>>'
        >>> short_kernel_name("cutlass::device_kernel<CollectiveMma<cute::tuple<cute::C<128>, cute::C<64> > > >")
        'device_kernel<CollectiveMma<128x64>>'
        >>> short_kernel_name("Memcpy HtoD (Pageable -> Device)", width=12)
        'Memcpy HtoD…'
    """
    name = plain(name[:_LONGEST_NAME])
    bare = _RETURN_TYPE.sub("", name).replace("(anonymous namespace)::", "")
    bare = _LAMBDA.sub("", _without_arguments(bare))
    bare = _CONSTANT.sub(r"\1", _CAST.sub("", _NAMESPACES.sub("", bare)).replace(" >", ">"))
    return short(_SHAPE.sub(lambda shape: re.sub(", ?", "x", shape[1]), bare) or name, width)


def short(text: str, width: int) -> str:
    """Plain text of at most `width` characters, an ellipsis for what is cut off; a number in it is cut off whole.

    Example:
        >>> short("aten::convolution_backward", 12)
        'aten::convo…'
        >>> short("gemm_256x128", 11)
        'gemm_256x…'
    """
    text = plain(text[: max(width, _LONGEST_NAME) + 1])  # a name may have megabytes
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
    """At least three digits of a rate, never an exponent.

    Example:
        >>> digits(1234.5), digits(0.01234)
        ('1,234', '0.0123')
    """
    return f"{rate:,.{max(0, 2 - floor(log10(rate)))}f}" if rate > 0 else "0"
