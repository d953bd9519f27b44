"""Decodes the JSON that this package wrote: one exception for whatever is wrong with it."""

from typing import TypeVar

import msgspec

_T = TypeVar("_T")


class _Layout(msgspec.Struct):
    schema_version: int = 0


_layout = msgspec.json.Decoder(_Layout)


def decoded(content: bytes, decoder: msgspec.json.Decoder[_T], version: int) -> _T:
    """Decode JSON of a layout. Raises ValueError if it is damaged or has another layout, and says if that is newer."""
    try:
        return decoder.decode(content)
    except (msgspec.MsgspecError, ValueError, TypeError, ArithmeticError, RecursionError) as exc:
        problem = str(exc)
    try:
        found = _layout.decode(content).schema_version
    except (msgspec.MsgspecError, ValueError, RecursionError):
        found = 0
    if found > version:
        problem = f"written by a newer version of forge-profiling (layout {found}, this reads {version}): upgrade"
    raise ValueError(problem)
