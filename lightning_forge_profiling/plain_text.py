"""Untrusted text, such as names in a trace, without terminal escapes and invisible characters, and cut."""

import logging
import os
import re
import unicodedata
from functools import cache
from typing import Any, Final

# Terminal escape sequences (ECMA-48): CSI with its parameters, OSC and similar strings with their text, the rest.
_ESCAPES: Final = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]P^_X]|[\x9d\x90\x9e\x9f\x98])[^\x07\x1b\x9c]*"
    r"|\x1b.?"
)
_SPACE: Final = {"\t", "\n", "\r", "\v", "\f", "\u2028", "\u2029", "\x85"}
_INVISIBLE: Final = {"Cc", "Cf", "Cs"}  # control, format (direction overrides among them), lone surrogates

LONGEST_NAME: Final = 200  # of a class, a callback, a host
LONGEST_FILE: Final = 255  # a file's name is not cut
LONGEST_KERNEL: Final = 2048  # nor that of a kernel: real C++ names stay below it
_LONGEST_TEXT: Final = 4096  # as of a path
_LONG_WORD: Final = re.compile(rf"(?<![^\s/])[^\s/]{{{LONGEST_FILE},}}")


def plain(text: str, longest_word: int = LONGEST_KERNEL) -> str:
    r"""Text without anything that could mislead a terminal or a reader, or fill it.

    Escape sequences, control characters and invisible ones, such as overrides of the writing direction, are removed;
    line breaks and tabs become spaces. It is cut at 4,096 characters, and a word of more than `longest_word` at 200.

    Examples:
        >>> plain("red \x1b[31malert\x07 and\na\u202enoitcerid wen")
        'red alert and anoitcerid wen'
    """
    text = _cut(text, _LONGEST_TEXT)
    if not text.isprintable():
        text = "".join(
            " " if character in _SPACE else character
            for character in _ESCAPES.sub("", text)
            if character in _SPACE or unicodedata.category(character) not in _INVISIBLE
        )
    # as a rule, and for Dynamo, which does not trace every lambda
    if len(text) <= longest_word:  # pragma: no mutate
        return text
    return _LONG_WORD.sub(lambda word: word[0] if len(word[0]) <= longest_word else _cut(word[0], LONGEST_NAME), text)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def name_of(named: object) -> str:
    """A name, or that of an object's class, as it is written and shown: plain, and of at most 200 characters."""
    return _cut(plain(named if isinstance(named, str) else type(named).__name__), LONGEST_NAME)


def all_plain(content: Any, longest_word: int = LONGEST_KERNEL) -> Any:
    """Data of JSON with all of its texts plain, names of fields included."""
    if isinstance(content, dict):
        return {plain(key, longest_word): all_plain(value, longest_word) for key, value in content.items()}
    if isinstance(content, list):
        return [all_plain(each, longest_word) for each in content]
    return plain(content, longest_word) if isinstance(content, str) else content


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


@cache
def once(logger: str, phrase: str) -> None:
    """Let a logger, of another package, say messages with a phrase once in this process."""
    was_said = False

    def is_news(record: logging.LogRecord) -> bool:
        nonlocal was_said
        if phrase not in str(record.msg):
            return True
        was_said, is_first = True, not was_said
        return is_first

    logging.getLogger(logger).addFilter(is_news)
