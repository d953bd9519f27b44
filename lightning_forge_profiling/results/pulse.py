"""What a rank says of itself about once a second, and what follows from what all ranks said."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from lightning_forge_profiling.results.analysis import RankWork
from lightning_forge_profiling.results.window import WindowAnswer

_Whole = Annotated[int, Meta(ge=0, le=10**15)]
_Seconds = Annotated[float, Meta(ge=0, le=1e11)]
_Text = Annotated[str, Meta(max_length=500)]
Ended = Literal["", "finished", "failed"]


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank is that has ended no step for long, while nothing in it moves.

    Attributes:
        seconds: time since its last sign of progress.
        place: the innermost line of the user's code, `collate at data.py:31`; "" if unknown.
        call: the function that does not return, `all_reduce`, `input`, `read`; "" if unknown.
        waits: whether it waits for other ranks, in a collective.
        collective: the collective that it has entered and not completed, `all_reduce`; "" if unknown.
        number: the number of that collective in its process group.
        group: the process group of that collective.
        shape: the sizes of its inputs.
        entered: by process group, the number of the last collective that it entered.
        worker: the worker of the data loader that it waits for, `loader worker 2 (pid 1234)`; "" if it waits for none.
            `place` is then the worker's.
    """

    seconds: _Seconds
    place: _Text = ""
    call: _Text = ""
    waits: bool = False
    collective: _Text = ""
    number: _Whole = 0
    group: _Text = ""
    shape: _Text = ""
    entered: Mapping[str, _Whole] = {}
    worker: _Text = ""


class SilentRank(msgspec.Struct, frozen=True, kw_only=True):
    """What the system says of a process on the same machine whose rank publishes nothing any more.

    Attributes:
        rank: the global rank.
        pid: its process id.
        process: `gone`, `stopped` as by SIGSTOP, `blocked` if its training thread has used no core for too long, else
            `running`: a call may compute for long and hold Python's interpreter lock.
        seconds: for how long it has published nothing.
        place: the innermost line of the user's code, as in `Standing`; "" if unknown.
        waits: whether that line waits for other ranks, in a collective.
    """

    rank: _Whole
    pid: _Whole
    process: Literal["gone", "stopped", "blocked", "running"]
    seconds: _Seconds
    place: _Text = ""
    waits: bool = False


class Pulse(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's state, about 1 KB.

    Attributes:
        schema_version: version of this layout.
        run: id of the run, the same on all ranks.
        rank: the global rank.
        world_size: number of training processes.
        host: name of the machine.
        pid: process id.
        number: number of this message, counted from 0 when the process began the fit.
        restarts: how often the launcher had started the run anew by then.
        at: when it was written, Unix time in seconds by the machine's clock.
        step: number of steps that ended.
        part: the part of the ledger that is open, such as `steps`, `validation`, `checkpoint/write`.
        no_step_s: for how long no step has ended; 0 below 30 s.
        place: the innermost line of the user's code then; "" if unknown.
        ended: whether and how the fit ended.
        work: the rank's work over its latest steps; None before enough of them.
        cpu_pct: use of the cores by the process since the previous message, in percent of one core; None if unknown.
        memory_gib: resident memory of the process; None if unknown.
        sensors: the latest readings of its GPU, by name, such as `sm_mhz`; {} without one.
        standing: where it stands; None while it moves.
        silent: ranks of the same machine that publish nothing any more.
        answer: what it says of the latest plan of a window.
    """

    schema_version: Literal[1] = 1
    run: Annotated[str, Meta(max_length=100)]
    rank: _Whole
    world_size: Annotated[int, Meta(ge=1, le=10**9)]
    host: _Text
    pid: _Whole
    number: _Whole
    restarts: _Whole = 0
    at: _Seconds
    step: _Whole = 0
    part: _Text = ""
    no_step_s: _Seconds = 0.0
    place: _Text = ""
    ended: Ended = ""
    work: RankWork | None = None
    cpu_pct: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    memory_gib: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    sensors: Mapping[str, float] = {}
    standing: Standing | None = None
    silent: tuple[SilentRank, ...] = ()
    answer: WindowAnswer = WindowAnswer()


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """The latest pulse of a rank, and when it came.

    Attributes:
        pulse: the pulse.
        at: when it first was there, Unix time in seconds by the reader's clock.
        restarts: how often the rank began anew while rank 0 listened.
    """

    pulse: Pulse
    at: _Seconds
    restarts: _Whole = 0


RankState = Literal["live", "late", "stands", "waits", "gone", "stopped", "silent", "finished", "failed", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """A rank as it is now.

    Attributes:
        rank: the global rank.
        host: name of its machine; "" if it was never heard.
        pid: its process id; 0 if it was never heard.
        state: `live`; `late` if its latest pulse is old, and `silent` if it is very old; `stands` or `waits` for
            another rank; `gone` if its process has ended, `stopped` if it was stopped; how its fit ended; `missing` if
            it was never heard.
        age_s: age of its latest pulse, in seconds, when rank 0 last listened.
        step: number of steps that ended.
        own_ms: its own work per step; None if unknown.
        waits_ms: per step, for other ranks and for what they exchange; None if unknown.
        cause: the part of its step that is longer than the others'; "" for none.
        restarts: how often it began anew, alone or with the whole run.
        sensors: the latest readings of its GPU.
    """

    rank: int
    host: str = ""
    pid: int = 0
    state: RankState = "missing"
    age_s: float = 0.0
    step: int = 0
    own_ms: float | None = None
    waits_ms: float | None = None
    cause: str = ""
    restarts: int = 0
    sensors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LateRank:
    """The rank that the others wait for.

    Attributes:
        rank: the global rank.
        cause: the part of its step that is longer than the others'.
        ms: how long the others wait for it, per step.
    """

    rank: int
    cause: str
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """Where the ranks have come to a standstill.

    Attributes:
        rank: the rank that the others wait for; None if it is not one.
        where: what is known, in a sentence.
        seconds: for how long.
    """

    rank: int | None
    where: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksStatus:
    """All ranks as they are now.

    Attributes:
        ranks: by rank, also those that were never heard.
        straggler: the rank that the others wait for; None if there is none.
        hang: where they stand; None while they move.
        where: where the ranks are that have ended no step for long, whether they move or not; "" for none.
        spread_ms: largest own work per step less the smallest; None if unknown.
        exposed_comm_ms: mean over the ranks of communication and waiting that nothing hides, per step; None if unknown.
    """

    ranks: tuple[RankStatus, ...] = ()
    straggler: LateRank | None = None
    hang: Hang | None = None
    where: str = ""
    spread_ms: float | None = None
    exposed_comm_ms: float | None = None
