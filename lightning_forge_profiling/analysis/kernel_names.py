"""Parses a GPU kernel's name into base name, template arguments and words.

A trace has whatever the toolchain produced: a demangled or mangled C++ signature, the name of a Triton or assembly
function, each possibly cut off. All functions accept any text, never raise and take time linear in its length.
"""

import re
from string import ascii_letters
from typing import Final, NamedTuple

_ARGUMENTS_LENGTH: Final = 400
"""Characters of the template arguments to keep: the first one or two show what a generic kernel computes."""

_LONGEST, _DEEPEST = 20_000, 100
"""No compiler produces longer or more deeply nested names; the rest of such a name is ignored."""

_ANONYMOUS: Final = re.compile(r"(?:\(anonymous namespace\)|<unnamed>|\{anonymous\}|\(anonymous\))(?:::)?")
_BRACKET: Final = re.compile(r"[<>(){}]")
_OPENING: Final = {">": "<", ")": "(", "}": "{"}
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

# Itanium C++ ABI, "External Names (a.k.a. Mangling)": https://itanium-cxx-abi.github.io/cxx-abi/abi.html#mangling
_IDENTIFIER_LENGTH: Final = re.compile(r"\d{1,4}")
_LITERAL_OR_LENGTH: Final = re.compile(r"L[a-zA-Z]n?\d+E|[ST][0-9A-Z]*_|(\d{1,4})")
_NAMELESS: Final = ("_GLOBAL__N_", "_INTERNAL_")  # how GCC and Clang, and nvcc, spell an anonymous namespace


class SplitName(NamedTuple):
    """Base name and template arguments of a kernel.

    Attributes:
        base: the qualified name, without return type, anonymous namespaces, template arguments and parameters.
        arguments: the beginning of its template arguments; "" without.
    """

    base: str
    arguments: str


def base_name(name: str) -> str:
    """A kernel's qualified name without return type, template arguments and parameters.

    Example:
        >>> base_name("void at::native::(anonymous namespace)::max_pool_forward_nchw<float, float>(int, float const*)")
        'at::native::max_pool_forward_nchw'
        >>> base_name("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float>(int)")
        'internal::gemvx::kernel'
        >>> base_name("_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi64EEEvPT0_i")
        'aiter::add_rmsnorm_quant_kernel'
        >>> base_name("Memcpy HtoD (Pinned -> Device)")
        'Memcpy HtoD'
    """
    return split_name(name).base


def split_name(name: str) -> SplitName:
    """Split a kernel's name into base name and template arguments.

    Example:
        >>> split_name("void at::native::reduce_kernel<512, at::native::MeanOps<float> >(at::native::MeanOps<float>)")
        SplitName(base='at::native::reduce_kernel', arguments='512, at::native::MeanOps<float> ')
        >>> split_name("_ZN7ck_tile6kentryILi2ENS_13FmhaFwdKernelIfEEEEvT0_")
        SplitName(base='ck_tile::kentry', arguments='FmhaFwdKernel')
    """
    text = cut(name, _LONGEST).partition(" [clone ")[0].removesuffix(".kd")  # what ROCm's compiler and GCC append
    split = _split_mangled(text) if text.startswith("_Z") else _split_signature(_ANONYMOUS.sub("", text))
    return split if split.base else SplitName(text, split.arguments)


def words(text: str) -> str:
    """The words of an identifier in lower case, joined by underscores, so that rules can match whole words.

    Example:
        >>> words("cunn_SoftMaxForward")
        '_cunn_soft_max_forward_'
        >>> words("cutlass_80_tensorop_s1688gemm_128x128_nt")
        '_cutlass_80_tensorop_s_1688_gemm_128_x_128_nt_'
    """
    return f"_{'_'.join(_WORD.findall(text)).lower()}_"


def cut(text: str, length: int) -> str:
    """Truncate a text without leaving part of a word: `lambda` must not become `lamb`.

    Example:
        >>> cut("at::native::lambda", 16)
        'at::native::'
        >>> cut("at::native", 16)
        'at::native'
    """
    return text if len(text) <= length else text[:length].rstrip(ascii_letters)


def _split_signature(text: str) -> SplitName:
    outside: list[str] = []  # the text that is in no brackets
    open_brackets: list[str] = []
    outside_from = 0
    inside_from = 0
    arguments = ""
    is_function = text.startswith("void ")
    for match in _BRACKET.finditer(text):
        bracket, at = match[0], match.start()
        if bracket in "<({":
            if not open_brackets:
                outside.append(text[outside_from:at])
                if bracket == "(" and _ends_name(text, at):
                    is_function = is_function or text[at - 1] != " "
                    outside_from = len(text)
                    break
                outside.append("()" * text.startswith("operator()", at - 8))
                is_function = is_function or bracket == "<"
                inside_from = at + 1
            open_brackets.append(bracket)
            if len(open_brackets) > _DEEPEST:
                break
        elif open_brackets and (bracket != ">" or open_brackets[-1] == "<"):  # else a comparison or an arrow
            _close(open_brackets, bracket)
            if not open_brackets:
                outside_from = at + 1
                if bracket == ">":
                    arguments = text[inside_from:at]
    if open_brackets:
        arguments = text[inside_from:].rstrip(ascii_letters)  # cut off, perhaps within a word
    else:
        outside.append(text[outside_from:])
    base = "".join(outside).strip()
    return SplitName(base.rpartition(" ")[2] if is_function else base, cut(arguments, _ARGUMENTS_LENGTH))


def _close(open_brackets: list[str], bracket: str) -> None:
    while open_brackets and open_brackets.pop() != _OPENING[bracket]:
        pass


def _ends_name(text: str, at: int) -> bool:
    """Whether the parenthesis there begins the parameters, rather than being part of `operator()` or the like."""
    before = text[max(at - 8, 0) : at]
    return before != "operator" and (before[-1:] in ("_", ">", " ") or before[-1:].isalnum())


def _split_mangled(text: str) -> SplitName:
    at = 3 if text.startswith("_ZN") else 2
    names: list[str] = []
    while length := _IDENTIFIER_LENGTH.match(text, at):
        at = length.end() + int(length[0])
        names.append(text[length.end() : at])
    arguments: list[str] = []
    end = min(at + _ARGUMENTS_LENGTH, len(text))
    while at < end and (match := _LITERAL_OR_LENGTH.search(text, at, end)):
        at = match.end()
        if match[1]:
            at += int(match[1])
            arguments.append(text[match.end() : at])
    return SplitName("::".join(name for name in names if not name.startswith(_NAMELESS)), " ".join(arguments))
