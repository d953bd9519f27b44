"""Lines of a record, `forge_record/rankN.jsonl`: one JSON object each, with its type in the field `line`.

A file starts with a `begin`. An `interval` follows for each log entry, an `event` for each incident, and from time to
time a `state` with the run's totals; an `end` closes a run that ended. Each later segment starts with the same `begin`,
except for its number, and a `state`. Timestamps are Unix time in seconds; names of durations end in the unit.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from lightning_forge_profiling.json_layout import decoded
from lightning_forge_profiling.plain_text import LONGEST_FILE, all_plain
from lightning_forge_profiling.schema import LoaderSettings, RunReport, StepCounters

SCHEMA_VERSION: Final = 2

_LONG: Final = 1 << 18  # bytes of a line; most have less than a third of it

_Whole = Annotated[int, Meta(ge=0, le=10**15)]
_Seconds = Annotated[float, Meta(ge=0, le=1e11)]
_SetSeconds = Annotated[float, Meta(ge=-1e11, le=1e11, description="how far the machine's clock was set by then.")]


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag_field="line", tag="begin"):
    """What runs where, and its settings. Contains no environment variables.

    Attributes:
        schema_version: version of this layout.
        run: id of the run, the same on all ranks.
        rank: the global rank.
        world_size: number of training processes.
        segment: number of the file, counted from 0.
        at: start of the fit.
        versions: versions of Python, torch, lightning and this package, by name.
        host: name of the machine.
        device: the training device, such as `cuda:0 (NVIDIA H200)`.
        gpu: UUID of the GPU that it trains on; "" if unknown, and without one.
        settings: settings of the Trainer: `precision`, `strategy`, `devices`, `max_steps`, `log_every_n_steps`, ...;
            `train_batches` is the number of training batches of an epoch.
        batches: number of steps that the fit will have, by `max_steps` and `max_epochs`; None if unlimited or unknown.
        first_epoch: number of the epoch that it begins in.
        first_batch: number of the batch of that epoch that it begins with.
        loader: settings of the training DataLoader; None if unknown.
        argv: name of the script and of its options, without their values.
        commit: git commit of the working directory; "" if there is none.
        restored_from: checkpoint that the run resumed from; "" for none.
        continues: record of the run that wrote the checkpoint; "" if unknown.
    """

    schema_version: Literal[2] = SCHEMA_VERSION
    run: str
    rank: _Whole
    world_size: Annotated[int, Meta(ge=1, le=10**9)]
    segment: _Whole = 0
    at: _Seconds
    versions: Mapping[str, str]
    host: str
    device: str
    gpu: str = ""
    settings: Mapping[str, str | int | float | bool | None]
    batches: _Whole | None = None
    first_epoch: _Whole = 0
    first_batch: _Whole = 0
    loader: LoaderSettings | None = None
    argv: tuple[str, ...] = ()
    commit: str = ""
    restored_from: str = ""
    continues: str = ""


class _Timed(msgspec.Struct, frozen=True, kw_only=True, tag_field="line"):
    at: _Seconds
    set_s: _SetSeconds = 0.0


class IntervalLine(_Timed, frozen=True, kw_only=True, tag="interval"):
    """The steps since the previous interval.

    Attributes:
        at: end of the interval.
        step: number of the step after its last one, counted from 0 at the start of the fit.
        logger_step: x-axis value of the log entry.
        counters: its counted steps: neither warm-up nor recorded. Without custom regions; host times of a GPU's steps
            only.
        ledger_s: wall time since the previous interval by part of the ledger, in seconds.
        metrics: latest logged rates and telemetry, by name.
    """

    step: _Whole
    logger_step: _Whole
    counters: StepCounters
    ledger_s: Mapping[str, _Seconds] = {}
    metrics: Mapping[str, float] = {}

    @property
    def counted(self) -> int:
        """Number of its counted steps."""
        return self.counters.steps


class EventLine(_Timed, frozen=True, kw_only=True, tag="event"):
    """A single event, such as a checkpoint.

    Attributes:
        at: end of the event.
        step: number of the current step.
        kind: `validation`, `checkpoint`, `epoch`, `window`, `slow-step`, `recompilation`, `graph-break`, ...
        text: one sentence.
        seconds: duration; 0 for an instant.
    """

    step: _Whole
    kind: str
    text: str = ""
    seconds: _Seconds = 0.0


class State(_Timed, frozen=True, kw_only=True, tag="state"):
    """Totals of the run so far: the content of the table at the end of a fit, and the metrics.

    Attributes:
        at: time of the totals.
        step: number of the current step.
        report: content of the table.
        metrics: logged metrics over all counted steps, by name.
        counters: all counted steps, as in an interval.
        blocks: at the end of the run, the same in up to 64 blocks of as many step numbers each; empty before.
    """

    step: _Whole
    report: RunReport
    metrics: Mapping[str, float]
    counters: StepCounters = msgspec.field(default_factory=StepCounters)
    blocks: tuple[StepCounters, ...] = ()


class End(_Timed, frozen=True, kw_only=True, tag="end"):
    """End of the run; a `state` precedes it.

    Attributes:
        at: end of the fit.
        step: number of steps.
        outcome: `finished`, or `failed` after an exception.
        exception: type and message of the exception; "" without one.
    """

    step: _Whole
    outcome: Literal["finished", "failed"]
    exception: str = ""


Line = Begin | IntervalLine | EventLine | State | End

_encoder = msgspec.json.Encoder(enc_hook=str)  # paths
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line, dec_hook=lambda kind, value: kind(value))


def encode_line(line: Line) -> bytes:
    """The line as JSON, with a newline. What is not Unicode, such as bytes of a file's name, becomes "?"."""
    try:
        text = _encoder.encode(line)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(line, str_keys=True, enc_hook=str)
        text = json.dumps(plain, ensure_ascii=False).encode(errors="replace")
    return (text if len(text) <= _LONG else _encoder.encode(all_plain(msgspec.json.decode(text), LONGEST_FILE))) + b"\n"


def decode_line(text: bytes) -> Line:
    """Parse one line."""
    return decoded(text, _decoder, SCHEMA_VERSION, untrusted=True)
