"""JSON that this package writes: decoding with the version of its layout, results of analyses, and the schemas."""

import hashlib
import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from lightning_forge_profiling.plain_text import LONGEST_FILE, all_plain, encodable, plain
from lightning_forge_profiling.safe_files import open_regular, read_regular, write_whole
from lightning_forge_profiling.schema import SCHEMA_VERSION, Analysis, RankResult, TraceFile

_T = TypeVar("_T")

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_PROMISE: Final = (
    f"Within schema_version {SCHEMA_VERSION} fields are added, but not removed, renamed or redefined: ignore unknown "
    "ones. Codes of findings are stable, texts and the names in evidence are not. Fields end in their unit: _ms, _us, "
    "_s, _pct, _bytes. Percentages are of the step, and ms_per_step is the mean over the counted steps, where nothing "
    "else is said. There is no NaN and no infinity: what is unknown is null, an empty string or an empty array."
)
_ATTRIBUTES: Final = "\n\nAttributes:\n"
_ATTRIBUTE: Final = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)

# other numbers than 0 are between these, so that products and quotients of a few of them neither overflow nor vanish.
# The difference of two equal times may be 1e-17.
_LEAST: Final = 1e-30
_MOST: Final = 1e24


class _Layout(msgspec.Struct):
    schema_version: int = 0


_layout = msgspec.json.Decoder(_Layout)


def decoded(content: bytes, decoder: msgspec.json.Decoder[_T], version: int, *, untrusted: bool = False) -> _T:
    """Decode JSON of a layout. Raises ValueError if it is damaged or has another layout, and says which."""
    try:
        found = decoder.decode(content)
        if not untrusted or _is_short(data := msgspec.json.decode(content)):
            return found
        return decoder.decode(msgspec.json.encode(all_plain(data, LONGEST_FILE)))  # with long texts cut
    except (msgspec.MsgspecError, ValueError, TypeError, ArithmeticError, RecursionError) as exc:
        problem = str(exc)
    try:
        layout = _layout.decode(content).schema_version
    except (msgspec.MsgspecError, ValueError, RecursionError):
        layout = 0
    if layout > version:
        problem = f"written by a newer version of forge-profiling (layout {layout}, this reads {version}): upgrade"
    elif 0 < layout < version:
        old = f"written by an older version of forge-profiling (layout {layout}, this reads {version})"
        problem = f"{old}: read it with that version, which the file names, or record the run again"
    raise ValueError(problem)


def _is_short(content: Any) -> bool:
    """Whether no text is too long. Raises ValueError for a number that products and quotients could overflow with."""
    waiting, is_short = [content], True
    while waiting:
        value = waiting.pop()
        if type(value) is dict:
            is_short, value = is_short and max(map(len, value), default=0) <= LONGEST_FILE, value.values()
        for each in value:
            kind = type(each)
            if kind is float or kind is int:
                if each and not _LEAST <= abs(each) <= _MOST:
                    raise ValueError("a number is out of range")
            elif kind is dict or kind is list:
                waiting.append(each)
            elif kind is str and len(each) > LONGEST_FILE:
                is_short = is_short and plain(each, LONGEST_FILE) == each
    return is_short


PACKAGE: Final = str(vars(sys.modules[__name__.partition(".")[0]])["__version__"])

_decoder = msgspec.json.Decoder(RankResult)
_of_all = msgspec.json.Decoder(Analysis)


def write_rank_result(result: RankResult, path: Path) -> None:
    """Write a result. Raises OSError."""
    write_whole(path, msgspec.json.encode(result, enc_hook=dict) + b"\n")  # the hook is for mappings that are no dict


def read_rank_result(path: Path) -> RankResult:
    """Read a result. Raises OSError, or ValueError if it is damaged or has another layout."""
    return decoded(read_regular(path), _decoder, SCHEMA_VERSION)


def summary_json(analysis: Analysis) -> bytes:
    """The content of `summary.json`: indented, with a final newline."""
    encoded = msgspec.json.encode(analysis, enc_hook=dict)  # the hook is for mappings that are no dict
    return msgspec.json.format(encoded, indent=2) + b"\n"


def read_summary(path: Path) -> Analysis:
    """Read a `summary.json`. Raises OSError, or ValueError if it is damaged or has another layout."""
    return decoded(read_regular(path), _of_all, SCHEMA_VERSION)


def described(files: Sequence[Path]) -> tuple[TraceFile, ...]:
    """Size and digest of files. Raises OSError."""
    found = []
    for file in files:
        with open_regular(file) as source:
            digest = hashlib.blake2b(digest_size=16)
            while piece := source.read(1 << 20):
                digest.update(piece)
            found.append(TraceFile(name=encodable(file.name), bytes=source.tell(), blake2b=digest.hexdigest()))
    return tuple(found)


def is_of(result: RankResult, files: Sequence[Path]) -> bool:
    """Whether a result is of these files as they are, by this version. Raises OSError."""
    if result.package != PACKAGE or len(result.traces) != len(files):
        return False
    sizes = [(encodable(file.name), file.stat().st_size) for file in files]
    return sizes == [(trace.name, trace.bytes) for trace in result.traces] and result.traces == described(files)


def schema_of(kind: Any, title: str) -> bytes:
    """The schema of a type, indented, in the dialect of 2020-12; what fields mean is taken from the docstrings."""
    (schema,), definitions = msgspec.json.schema_components(
        [kind],
        ref_template="#/$defs/{name}",
        schema_hook=lambda _: {"type": "string"},  # paths
    )
    for definition in definitions.values():
        _describe(definition)
    document = {"$schema": _DIALECT, "title": title, "description": _PROMISE, **schema, "$defs": definitions}
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def _describe(definition: dict[str, Any]) -> None:
    """Put the docstring's attributes to the fields, and leave the rest of it as the description of the whole."""
    docstring = inspect.cleandoc(definition.get("description", ""))
    definition["description"] = " ".join(docstring.partition(_ATTRIBUTES)[0].split())
    for field, text in field_texts(docstring).items():
        definition["properties"][field]["description"] = text.replace("None", "null")


def field_texts(docstring: str) -> dict[str, str]:
    """What a docstring says of each field."""
    attributes = docstring.partition(_ATTRIBUTES)[2]
    return {field: " ".join(text.split()) for field, text in _ATTRIBUTE.findall(attributes)}
