"""Untrusted text, such as names in a trace, without terminal escapes and invisible characters."""

import logging
import os
import re
import unicodedata
from typing import Final

# Terminal escape sequences (ECMA-48): CSI with its parameters, OSC and similar strings with their text, the rest.
_ESCAPES: Final = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]P^_X]|[\x9d\x90\x9e\x9f\x98])[^\x07\x1b\x9c]*"
    r"|\x1b.?"
)
_SPACE: Final = {"\t", "\n", "\r", "\v", "\f", "\u2028", "\u2029", "\x85"}
_INVISIBLE: Final = {"Cc", "Cf", "Cs"}  # control, format (direction overrides among them), lone surrogates


def plain(text: str) -> str:
    r"""Text without anything that could mislead a terminal or a reader.

    Escape sequences, control characters and invisible ones, such as overrides of the writing direction, are removed;
    line breaks and tabs become spaces.

    Examples:
        >>> plain("red \x1b[31malert\x07 and\na\u202enoitcerid wen")
        'red alert and anoitcerid wen'
    """
    text = _ESCAPES.sub("", text)
    return "".join(
        " " if character in _SPACE else character
        for character in text
        if character in _SPACE or unicodedata.category(character) not in _INVISIBLE
    )


def encodable(name: str | os.PathLike[str]) -> str:
    """A file's name, or a text with one in it, as text that can be encoded: bytes that are not UTF-8 become U+FFFD."""
    return os.fsencode(name).decode(errors="replace")


class _PlainArguments(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(arg if isinstance(arg, int | float) else _plain_argument(arg) for arg in record.args)
        return True


def _plain_argument(argument: object) -> str:
    try:
        return plain(str(argument))
    except Exception:
        return f"<{type(argument).__name__}>"


_PLAIN_ARGUMENTS: Final = _PlainArguments()


def plain_logger(name: str) -> logging.Logger:
    """Get a logger whose messages are one line of plain text, whatever their arguments contain."""
    log = logging.getLogger(name)
    log.addFilter(_PLAIN_ARGUMENTS)
    return log
