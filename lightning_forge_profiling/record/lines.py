"""The lines of a record, `forge_record/rankN.jsonl`: one JSON object each, told apart by the field `line`.

A file begins with a `begin`, holds an `interval` per logged row and an `event` per incident, from time to time a
`state` with the totals of the run up to then, and ends with an `end` if the run did. Each later segment begins with the
same `begin` but for its number, and a `state`. Times of day are seconds since 1970; names end in the unit.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from lightning_forge_profiling.report.run_table import RunReport
from lightning_forge_profiling.results.loader_settings import LoaderSettings

SCHEMA_VERSION = 1


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="begin"):
    """What ran, and where. No environment variables.

    Attributes:
        schema_version: version of this layout.
        run: identifies the run; the same on all its ranks.
        rank: the global rank.
        world_size: number of training processes.
        segment: 0 for the first file of the run, one more for each later one.
        at: when the fit began.
        versions: of Python, torch, lightning and this package, by name.
        host: name of the machine.
        device: the device it trains on, in words.
        settings: of the Trainer: `precision`, `strategy`, `devices`, `max_steps`, `log_every_n_steps`, ...
        loader: settings of the training DataLoader; None if unknown.
        argv: the command line.
        commit: the git commit of the working directory; "" if there is none.
        restored_from: the checkpoint that the run was resumed from; "" for none.
        continues: the record of the run that wrote the checkpoint; "" if unknown.
    """

    schema_version: Literal[1] = 1
    run: str
    rank: int
    world_size: int
    segment: int = 0
    at: float
    versions: Mapping[str, str]
    host: str
    device: str
    settings: Mapping[str, str | int | float | bool | None]
    loader: LoaderSettings | None = None
    argv: tuple[str, ...] = ()
    commit: str = ""
    restored_from: str = ""
    continues: str = ""


class Interval(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="interval"):
    """The steps since the interval before.

    Attributes:
        at: when it ended.
        step: number of the step after its last, counted from 0 at the start of the fit.
        logger_step: the x-axis of the logged row.
        counted: number of its steps that count: neither warm-up nor recorded.
        optimizer_steps: number of them that changed the weights.
        samples: samples of the counted steps on this rank; None if unknown.
        tokens: tokens of them; None if not counted.
        device_ms: device time of the counted steps by region, summed; host time without a GPU. Its sum is their time.
            Steps without timed regions are one region, `step`.
        host_ms: host time likewise; empty without a GPU, where `device_ms` is that.
        steps_us: histogram of the counted steps' times (see `record.histogram`): number of steps by bucket.
        ledger_s: seconds of wall time by part of the ledger since the interval before.
        metrics: what the loggers got last, rates and telemetry, by name.
    """

    at: float
    step: int
    logger_step: int
    counted: int
    optimizer_steps: int = 0
    samples: float | None = None
    tokens: float | None = None
    device_ms: Mapping[str, float]
    host_ms: Mapping[str, float] = {}
    steps_us: Mapping[int, int]
    ledger_s: Mapping[str, float] = {}
    metrics: Mapping[str, float] = {}


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="event"):
    """Something that happened once.

    Attributes:
        at: when.
        step: number of the current step.
        kind: `validation`, `checkpoint`, `epoch`, `window`, `slow-step`, `recompilation`, `exception`, ...
        text: one sentence.
        seconds: how long it took; 0 for an instant.
    """

    at: float
    step: int
    kind: str
    text: str = ""
    seconds: float = 0.0


class State(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="state"):
    """The run up to now: what the table at its end would say, and the means of all that was logged.

    Attributes:
        at: when.
        step: number of the current step.
        report: the content of the table.
        metrics: the logged names with their values over all counted steps.
        steps_us: histogram of all counted steps' times.
    """

    at: float
    step: int
    report: RunReport
    metrics: Mapping[str, float]
    steps_us: Mapping[int, int] = {}


class End(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="end"):
    """The run ended; a `state` stands before it.

    Attributes:
        at: when.
        step: number of steps.
        outcome: `finished`, or `failed` for an exception.
        exception: its type and message; "" without one.
    """

    at: float
    step: int
    outcome: Literal["finished", "failed"]
    exception: str = ""


Line = Begin | Interval | Event | State | End

_encoder = msgspec.json.Encoder(enc_hook=str)  # paths
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line, dec_hook=lambda kind, value: kind(value))


def encode_line(line: Line) -> bytes:
    """One line with its newline."""
    return _encoder.encode(line) + b"\n"


def decode_line(text: bytes) -> Line:
    """The line that `text` holds.

    Raises:
        msgspec.DecodeError: it is torn, or of another layout.
    """
    return _decoder.decode(text)
