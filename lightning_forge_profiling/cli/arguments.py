"""Argument types for `argparse`: whole numbers, percentages, shares, ports, seconds, step ranges."""

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")

_LAST_PORT = 65_535
_SHORTEST_S = 0.1


def at_least(lowest: int) -> Callable[[str], int]:
    """A whole number of at least `lowest`."""

    def whole(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        return checked(text, value, value >= lowest, f"a whole number of at least {lowest}")

    return whole


def checked(text: str, value: _T, is_valid: bool, what: str) -> _T:
    """The value of an argument, refused if it is not valid."""
    if not is_valid:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def number(text: str) -> float:
    """A number; NaN for a text that is none, which lies in no range."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def positive(text: str) -> float:
    """A number above zero."""
    value = number(text)
    return checked(text, value, 0 < value < math.inf, "a number above zero")


def percentage(text: str) -> float:
    """A number that is not negative, with or without a percent sign."""
    value = number(text.removesuffix("%"))
    return checked(text, value, 0 <= value < math.inf, "a percentage")


def share(text: str) -> float:
    """A share between 0 and 1, neither included."""
    value = number(text)
    return checked(text, value, 0 < value < 1, "a share above 0 and below 1, as 0.005 for half a percent")


def port(text: str) -> int:
    """A TCP port; 0 for any free one."""
    value = int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(_LAST_PORT)) else -1
    return checked(text, value, 0 <= value <= _LAST_PORT, f"a port from 0 to {_LAST_PORT}")


def seconds(text: str) -> float:
    """A number of seconds, at least 0.1."""
    value = number(text)
    return checked(text, value, _SHORTEST_S <= value < math.inf, f"a number of seconds of at least {_SHORTEST_S}")


def step_range(text: str) -> tuple[int, int]:
    """A half-open range A:B of steps."""
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of steps such as 5:8")
    return int(first), int(end)
