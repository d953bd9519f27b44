"""What a kernel is called where it is shown: without what C++ adds, and with what a loop of PyTorch computes."""

import re
from collections.abc import Iterator
from typing import Final

from lightning_forge_profiling.plain_text import LONGEST_KERNEL, plain

_LAMBDA: Final = re.compile(r"\([^()]*\)(?:::\{lambda\([^()]*\)#\d+\}|::operator\(\)\([^()]*\)(?: const)?)+")
_NAMESPACES: Final = re.compile(r"\b(?:\w+::)+")
_RETURN_TYPE: Final = re.compile(r"^(?:void|int|bool|float|double) ")
_CAST: Final = re.compile(r"\([\w:]+(?: [\w:]+)*\)(?=-?\d)")  # as in (int)4
_CONSTANT: Final = re.compile(r"\b(?:C<|constant<int, )(-?\d+)>")  # CuTe's, as its shapes: tuple<C<128>, C<64>>
_SHAPE: Final = re.compile(r"\btuple<(\d+(?:, ?\d+)+)>")

# Kernels of PyTorch that run whatever function their template names.
_LOOP: Final = re.compile(
    r"(?:void )?(?:vectorized_|unrolled_)?(\w*elementwise_kernel|reduce_kernel|multi_tensor_apply_kernel)"
    r"(?:_manual_unroll\w*|_for_multi_outputs|_with_index)?<"
)
# Templates around that function, and what says nothing about it: types, numbers, how elements are loaded and stored.
_WRAPPERS: Final = re.compile(
    r"gpu_kernel_impl(?:_nocast)?|gpu_index_kernel|ReduceOp|func_wrapper_t|(?:Binary|AUnary|BUnary)Functor"
)
_WITH_TYPES: Final = re.compile(r"(?:Binary|AUnary|BUnary)Functor")  # of the data; inside are those to compute in
_TYPE: Final = re.compile(
    r"-?\d+u?l?|true|false|(?:unsigned )?(?:char|short|int|long)|bool|float|double|BFloat16|Half|Float8\w*|complex"
)
_VALUE: Final = re.compile(r"(?:\([\w ]+\))?(?:-?\d+u?l?|true|false)")
_LOADING: Final = re.compile(r"[aA]rray|\w*OffsetCalculator|(?:Load|Store)With\w+|\w*TensorList\w*Metadata|\w+_t")
_PART: Final = re.compile(r"\w+(?:::\w+)*")
_OF_OPERATOR: Final = re.compile(r"operator\(\)<(\w+)")  # as the `TensorAssign` of a scatter
_OF_LAMBDA: Final = re.compile(r"\{lambda\(([^()]*)\)#\d+\}$")


def short_kernel_name(name: str, width: int = LONGEST_KERNEL) -> str:
    """A kernel's short name: of a loop what it computes, of others the name and its template; cut at its end."""
    return short(loop_name(name) or templated_name(name), width)


def loop_name(name: str) -> str:
    """A kernel that runs what its template names, as `reduce_kernel: sum_functor<float>`; "" for any other."""
    bare = _NAMESPACES.sub("", _unscoped(name))
    loop = _LOOP.match(bare)
    computed = list(_computed(_inside(bare[loop.end() :]))) if loop else []
    return f"{loop[1]}: {', '.join(reversed(computed))}" if loop and computed else ""  # the operation is the last


def templated_name(name: str) -> str:
    """A kernel's name without return type, namespaces and arguments, its template kept."""
    name = plain(name)[:LONGEST_KERNEL]
    bare = _RETURN_TYPE.sub("", _unscoped(name))
    bare = _LAMBDA.sub("", _without_arguments(bare))
    bare = _CONSTANT.sub(r"\1", _CAST.sub("", _NAMESPACES.sub("", bare)).replace(" >", ">"))
    return _SHAPE.sub(lambda shape: re.sub(", ?", "x", shape[1]), bare) or name


def short(text: str, width: int) -> str:
    """Plain text of at most `width` characters, an ellipsis for what is cut off; a number in it is cut off whole."""
    text = plain(text)
    if len(text) <= width:
        return text
    kept, lost = text[: max(0, width - 1)], text[max(0, width - 1) :]
    return (kept.rstrip("0123456789") if lost[0].isalnum() else kept).rstrip() + "…"


def _unscoped(name: str) -> str:
    return plain(name)[:LONGEST_KERNEL].replace("(anonymous namespace)::", "")


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


def _computed(arguments: str, types: str = "") -> Iterator[str]:
    """The functions among template arguments, without the templates around them, with the types of their data."""
    for argument in _split(arguments):
        part = _PART.match(argument)
        if part is None or _TYPE.fullmatch(argument):
            continue
        inside = _inside(argument[part.end() + 1 :]) if argument[part.end() :].startswith("<") else ""
        if inside and _WRAPPERS.fullmatch(part[0]):
            of_data = ", ".join(filter(_TYPE.fullmatch, _split(inside))) if _WITH_TYPES.fullmatch(part[0]) else ""
            yield from _computed(inside, of_data or types)
        elif not _LOADING.fullmatch(part[0]):
            yield part[0] + _listed(types or _types(argument, inside))


def _types(function: str, template: str) -> str:
    """The types of a function: of its template, or else of the parameters of its innermost lambda."""
    operator, innermost = _OF_OPERATOR.search(function), _OF_LAMBDA.search(function)
    return operator[1] if operator else template or (innermost[1] if innermost else "")


def _listed(text: str) -> str:
    """The types of a list, each once."""
    types = dict.fromkeys(each for each in _split(text) if not _VALUE.fullmatch(each))
    return f"<{', '.join(types)}>".replace(" >", ">") if types else ""


def _inside(text: str) -> str:
    """What is in the brackets whose opening one has just been read; all of it if they do not close."""
    for part_end, depth in _depths(text):
        if depth < 0:
            return text[:part_end]
    return text


def _split(text: str) -> list[str]:
    """The values of a list that is separated by commas, which may contain others in brackets."""
    ends = [at for at, depth in _depths(text) if depth == 0 and text[at] == ","]
    pieces = [text[start:end] for start, end in zip([0, *(end + 1 for end in ends)], [*ends, len(text)], strict=True)]
    return [piece.strip() for piece in pieces if piece.strip()]


def _depths(text: str) -> Iterator[tuple[int, int]]:
    """The place of each bracket and comma, and how many brackets are open behind it."""
    depth = 0
    for match in re.finditer(r"[<>(){},]", text):
        depth += (match[0] in "<({") - (match[0] in ">)}")
        yield match.start(), depth
