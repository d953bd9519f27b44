"""What the commands share: what goes to the terminal, and the values of arguments."""

import argparse
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self, TextIO, TypeVar

from lightning_forge_profiling.plain_text import plain

_T = TypeVar("_T")

CUT_OFF = 65  # the exit code for traces that end too early: EX_DATAERR of sysexits.h


class Progress:
    """Context manager that shows the latest text on a terminal, or in a file a line each once work takes a while."""

    def __init__(self, stream: TextIO | None = None, *, after_s: float = 1.0) -> None:
        self._stream = stream or sys.stderr
        self._redraws = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._from_s = time.monotonic() + after_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._redraws:
            self("")

    def __call__(self, text: str) -> None:
        """Set the text of the current stage."""
        with suppress(OSError):  # a closed stream must not stop the work
            if self._redraws:
                self._stream.write(f"\r{plain(text)[: shutil.get_terminal_size().columns - 1]}\x1b[K")
            elif time.monotonic() >= self._from_s:
                self._stream.write(f"{plain(text)}\n")
            self._stream.flush()


def wraps() -> bool:
    """Whether sentences on standard output are wrapped: on a terminal, or to a width that `COLUMNS` asks for."""
    columns = os.environ.get("COLUMNS", "")
    return sys.stdout.isatty() or (columns.isdecimal() and int(columns) > 0)


def say(text: str) -> None:
    """Write a line on standard output."""
    sys.stdout.write(f"{plain(text)}\n")


def warn(text: str) -> None:
    """Write a line on standard error."""
    sys.stderr.write(f"forge-profiling: {plain(text)}\n")


def write_json(content: bytes) -> None:
    """Write JSON on standard output, with control and invisible characters escaped."""
    text = re.sub(r"[^\n -~]", _escaped, content.decode())
    sys.stdout.buffer.write(text.removesuffix("\n").encode() + b"\n")


def write_as_json(result: object) -> None:
    """Write a result as indented JSON on standard output."""
    import msgspec  # noqa: PLC0415  (`--help` loads this file)

    write_json(msgspec.json.format(msgspec.json.encode(result, enc_hook=dict), indent=2))


def _escaped(character: re.Match[str]) -> str:
    return character[0] if plain(character[0]) == character[0] else json.dumps(character[0])[1:-1]


_MOST_DIGITS = 15

# names in `crossover.operations`, repeated here so that `--help` loads no torch
OPERATIONS = ("matmul", "add", "softmax", "layernorm", "conv2d")
GRAPHS = ("forward", "backward", "optimizer")

# groups of `trial.changes.ROWS`, repeated here so that `--help` loads none of it
CHANGES = (
    *("anomaly", "workers", "precision", "compile", "optimizer", "convolutions", "deterministic", "attention"),
    *("checkpointing", "ddp", "threads"),
)

METRICS = """\
metrics of runs (default: step and fit): step, fit, median, p95, samples, tokens, a region (data, transfer, forward,
backward, optimizer, other), last_fifth, validation, checkpoint, startup, goodput, rank1, rank2, ...
metrics of traces (default: step): step, busy, idle, matmul, comm, memory, other_kernels
metric of results of benchmark(): call"""


def checked(text: str, value: _T, is_valid: bool, what: str) -> _T:
    """The value of an argument, refused if it is not valid."""
    if not is_valid:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def whole(lowest: int, highest: float = math.inf, what: str = "a whole number") -> Callable[[str], int]:
    """A whole number in a range, its ends included."""
    where = f"of at least {lowest}" if highest == math.inf else f"from {lowest} to {highest}"

    def number(text: str) -> int:
        value = int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else -1
        return checked(text, value, lowest <= value <= highest, f"{what} {where}")

    return number


def as_number(text: str) -> float:
    """A number; NaN for a text that is none, which lies in no range."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def positive(text: str) -> float:
    """A number above zero."""
    value = as_number(text)
    return checked(text, value, 0 < value < math.inf, "a number above zero")


def duration(text: str) -> float:
    """A time in seconds: `90s`, `10m`, `1h`, or a number of seconds."""
    value = as_number(text.rstrip("smh")) * {"m": 60, "h": 3600}.get(text[-1:], 1)
    return checked(text, value, 0 < value < math.inf, "a time such as 90s or 10m")


def percentage(text: str) -> float:
    """A number of percent, with or without the sign."""
    value = as_number(text.removesuffix("%"))
    return checked(text, value, 0 <= value < math.inf, "a percentage")


def step_range(text: str) -> tuple[int, int]:
    """A half-open range A:B of steps."""
    first, _, end = text.partition(":")
    steps = (int(first), int(end)) if first.isdecimal() and end.isdecimal() else (0, 0)
    return checked(text, steps, steps[0] < steps[1], "a range of steps such as 5:8")


def metric(name: str) -> str:
    """The name of a metric that runs, traces or benchmarks have."""
    if re.search(rf"\b{re.escape(name)}\b", METRICS) is None and re.fullmatch(r"rank\d+", name) is None:
        raise argparse.ArgumentTypeError(f"{name!r} is not a metric; {METRICS}")
    return name


def some_of(choices: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Names out of these, each once."""

    def names(text: str) -> tuple[str, ...]:
        return tuple(
            checked(name, name, name in choices, f"one of {', '.join(choices)}")
            for name in dict.fromkeys(text.split(","))
        )

    return names


def scale(text: str) -> tuple[str, float]:
    """A kind of kernels, and a factor."""
    kind, _, factor = text.partition("=")
    value, what = as_number(factor), "KIND=X with a number of at least 0, as matmul=0.5"
    return checked(text, (kind, value), bool(kind) and 0 <= value < math.inf, what)


def sizes(text: str) -> tuple[int, ...]:
    """Sizes, ascending: doubling in a range as 64:512, or a list as 100,300."""
    from lightning_forge_profiling.crossover.curves import MOST_SIZE  # noqa: PLC0415  (loads msgspec)

    size = whole(1, MOST_SIZE, "a size")
    first, colon, last = text.partition(":")
    if not colon:
        return tuple(sorted({size(each) for each in text.split(",")}))
    least, most = size(first), size(last)
    checked(text, text, least <= most, "a range of sizes such as 64:8192")
    return tuple(least * 2**k for k in range((most // least).bit_length()))
