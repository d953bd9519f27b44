"""Argument types for `argparse`: whole numbers, percentages, shares, ports, seconds, step ranges."""

import argparse
import math
from collections.abc import Callable

_LAST_PORT = 65_535
_SHORTEST_S = 0.1


def at_least(lowest: int) -> Callable[[str], int]:
    """A whole number of at least `lowest`."""

    def whole(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if value < lowest:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {lowest}")
        return value

    return whole


def number(text: str) -> float:
    """A number; NaN for a text that is none, which lies in no range."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def percentage(text: str) -> float:
    """A number that is not negative, with or without a percent sign."""
    value = number(text.removesuffix("%"))
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage")
    return value


def share(text: str) -> float:
    """A share between 0 and 1, neither included."""
    value = number(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1, as 0.005 for half a percent")
    return value


def port(text: str) -> int:
    """A TCP port; 0 for any free one."""
    value = int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(_LAST_PORT)) else -1
    if not 0 <= value <= _LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to {_LAST_PORT}")
    return value


def seconds(text: str) -> float:
    """A number of seconds, at least 0.1."""
    value = number(text)
    if not _SHORTEST_S <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds of at least {_SHORTEST_S}")
    return value


def step_range(text: str) -> tuple[int, int]:
    """A half-open range A:B of steps."""
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of steps such as 5:8")
    return int(first), int(end)
