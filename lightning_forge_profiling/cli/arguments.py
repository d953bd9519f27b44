"""Argument types for `argparse`: whole numbers, percentages, shares, ports, seconds, step ranges."""

import argparse
import math
from collections.abc import Callable

_LAST_PORT = 65_535
_SHORTEST_S = 0.1


def at_least(lowest: int) -> Callable[[str], int]:
    """A whole number of at least `lowest`."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if value < lowest:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {lowest}")
        return value

    return number


def percentage(text: str) -> float:
    """A number that is not negative, with or without a percent sign.

    Example:
        >>> percentage("5%")
        5.0
    """
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if value < 0 or not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage")
    return value


def share(text: str) -> float:
    """A share between 0 and 1, neither included.

    Example:
        >>> share("0.005")
        0.005
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1, as 0.005 for half a percent")
    return value


def port(text: str) -> int:
    """A TCP port; 0 for any free one.

    Example:
        >>> port("9001")
        9001
    """
    value = int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(_LAST_PORT)) else -1
    if not 0 <= value <= _LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to {_LAST_PORT}")
    return value


def seconds(text: str) -> float:
    """A number of seconds, at least 0.1.

    Example:
        >>> seconds("0.5")
        0.5
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not _SHORTEST_S <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds of at least {_SHORTEST_S}")
    return value


def step_range(text: str) -> tuple[int, int]:
    """A half-open range A:B of steps.

    Example:
        >>> step_range("5:8")
        (5, 8)
    """
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of steps such as 5:8")
    return int(first), int(end)
