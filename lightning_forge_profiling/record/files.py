"""Files of a record: bytes of its lines, of the ranks' latest pulses, and of requests and plans for windows.

`forge_record/rankN.jsonl` has lines of JSON, each with its type in the field `line`. A file starts with a `begin`. An
`interval` follows for each log entry, an `event` for each incident, and from time to time a `state` with the run's
totals; an `end` closes a run that ended. Each later segment starts with the same `begin`, except for its number, and a
`state`. Timestamps are Unix time in seconds; names of durations end in the unit.

Rank 0 writes the pulses that it hears to `ranks.json`. A rank that has no other channel, or that something is wrong
with, writes its own to `rankN.pulse.json`.
"""

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from lightning_forge_profiling.json_layout import decoded
from lightning_forge_profiling.names import RANKS_JSON, WINDOW_PLAN, WINDOW_REQUEST, pulse_name
from lightning_forge_profiling.plain_text import LONGEST_FILE, all_plain
from lightning_forge_profiling.safe_files import read_regular, write_whole
from lightning_forge_profiling.schema import RECORD_VERSION, LastPulse, Line, Pulse, State, WindowPlan, WindowRequest

_LONG: Final = 1 << 18  # bytes of a line; most have less than a third of it
_VERSION: Final = 1  # of the layout of pulses, requests and plans
_MOST_BYTES: Final = 1 << 16  # of one of these; most have 1 KB
MOST_RANKS: Final = 1 << 14

_encoder = msgspec.json.Encoder(enc_hook=str)  # paths
_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line, dec_hook=lambda kind, value: kind(value))
_pulses: msgspec.json.Decoder[Pulse] = msgspec.json.Decoder(Pulse)
_heards: msgspec.json.Decoder[list[LastPulse]] = msgspec.json.Decoder(list[LastPulse])
_plans: msgspec.json.Decoder[WindowPlan] = msgspec.json.Decoder(WindowPlan)
_requests: msgspec.json.Decoder[WindowRequest] = msgspec.json.Decoder(WindowRequest)


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
    line = decoded(text, _decoder, RECORD_VERSION, untrusted=True)
    return _with_run(line) if isinstance(line, State) else line


def _with_run(state: State) -> State:
    """The totals as they were made: the run that an analysis is of stands once in a line."""
    report, analysis = state.report, state.report.analysis
    if analysis is None or analysis.run is not None or not report.run.timing.is_evidence:
        return state
    return replace(state, report=replace(report, analysis=replace(analysis, run=report.run)))


def encode_message(message: Pulse | WindowPlan) -> bytes:
    """A pulse or a plan as JSON."""
    return _encoder.encode(message)


def decode_pulse(content: bytes) -> Pulse:
    """A pulse. Raises ValueError if it is damaged, out of range or of another layout."""
    if len(content) > _MOST_BYTES:
        raise ValueError("it is too long for a pulse")
    return decoded(content, _pulses, _VERSION, untrusted=True)


def later(known: LastPulse | None, pulse: Pulse, at: float) -> LastPulse:
    """What is known of a rank after a pulse that was read at that time, new or not."""
    if known is None:
        return LastPulse(pulse=pulse, at=at)
    before = known.pulse
    if (pulse.host, pulse.pid) == (before.host, before.pid):
        newer, restarts = pulse.number > before.number, known.restarts
    else:  # a pulse of the process before may still be there
        newer, restarts = pulse.at > before.at, known.restarts + 1
    return LastPulse(pulse=pulse, at=at, restarts=restarts) if newer else known


def write_pulse(folder: Path, pulse: Pulse) -> None:
    """Write a rank's own file. Raises OSError."""
    write_whole(folder / pulse_name(pulse.rank), encode_message(pulse))


def read_pulses(folder: Path, run: str) -> list[Pulse]:
    """The pulses of a run that ranks wrote to files of their own."""
    pulses: list[Pulse] = []
    for path in folder.glob(pulse_name("*")):
        if re.fullmatch(pulse_name(r"\d{1,9}"), path.name):
            with suppress(OSError, ValueError):
                pulse = decode_pulse(read_regular(path, _MOST_BYTES))
                if pulse.run == run and path.name == pulse_name(pulse.rank):
                    pulses.append(pulse)
    return pulses


def write_heard(folder: Path, heard: Iterable[LastPulse]) -> None:
    """Write what rank 0 heard. Raises OSError."""
    write_whole(folder / RANKS_JSON, _encoder.encode(list(heard)))


def read_heard(folder: Path, run: str) -> dict[int, LastPulse]:
    """The latest pulse of each rank of a run by all files in its record's folder; {} if there are none."""
    heard: dict[int, LastPulse] = {}
    with suppress(OSError, ValueError):
        content = read_regular(folder / RANKS_JSON, MOST_RANKS * _MOST_BYTES)
        heard = {
            one.pulse.rank: one for one in decoded(content, _heards, _VERSION, untrusted=True) if one.pulse.run == run
        }
    ahead_s = {one.pulse.host: one.at - one.pulse.at for one in heard.values()}  # rank 0's clock of each host's
    for pulse in read_pulses(folder, run):
        at = max(pulse.at + ahead_s.get(pulse.host, 0.0), 0.0)
        heard[pulse.rank] = later(heard.get(pulse.rank), pulse, at)
    return heard


class HeardFiles:
    """The latest pulse of each rank by the files in a folder, which are opened again only if one was replaced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._state: object = None
        self._heard: dict[int, LastPulse] = {}

    def read(self, run: str) -> Mapping[int, LastPulse]:
        """As `read_heard`."""
        files: list[tuple[str, int, int]] = []
        for path in (self._folder / RANKS_JSON, *self._folder.glob(pulse_name("*"))):
            with suppress(OSError):
                stat = path.lstat()
                files.append((path.name, stat.st_ino, stat.st_mtime_ns))
        state = (run, sorted(files))
        if state != self._state:
            self._state, self._heard = state, read_heard(self._folder, run)
        return self._heard


def decode_plan(content: bytes) -> WindowPlan:
    """A plan. Raises ValueError if it is damaged, out of range or of another layout."""
    return decoded(content, _plans, _VERSION, untrusted=True)


def write_request(folder: Path, request: WindowRequest) -> bool:
    """Ask the run whose record is in a folder; False if another request waits there. Raises OSError."""
    own = folder / f".{WINDOW_REQUEST}.{request.id}"
    write_whole(own, _encoder.encode(request))
    try:
        with suppress(OSError):  # there is a file, or the file system has no links
            (folder / WINDOW_REQUEST).hardlink_to(own)
            return True
        if _waiting_request(folder) is not None:
            return False
        own.replace(folder / WINDOW_REQUEST)  # what is there is no request of this user
        return True
    finally:
        own.unlink(missing_ok=True)


def withdraw_request(folder: Path, request: WindowRequest) -> None:
    """Take back a request that nobody has taken."""
    if _waiting_request(folder) == request:
        (folder / WINDOW_REQUEST).unlink(missing_ok=True)


def take_request(folder: Path) -> WindowRequest | None:
    """The request in the folder, if this user has made one, which is then gone from it; None for none."""
    return _waiting_request(folder, takes=True)


def _waiting_request(folder: Path, *, takes: bool = False) -> WindowRequest | None:
    with suppress(OSError, ValueError):
        content = _own(folder / WINDOW_REQUEST)
        if takes:
            (folder / WINDOW_REQUEST).unlink()
        return decoded(content, _requests, _VERSION, untrusted=True)
    return None


def write_plan(folder: Path, plan: WindowPlan) -> None:
    """Leave a plan for those who asked, and for ranks that no store reaches. Raises OSError."""
    write_whole(folder / WINDOW_PLAN, encode_message(plan))


def read_plan(folder: Path) -> WindowPlan | None:
    """The latest plan of the run whose record is in a folder; None if there is none, or it is another user's."""
    with suppress(OSError, ValueError):
        return decode_plan(_own(folder / WINDOW_PLAN))
    return None


def _own(path: Path) -> bytes:
    """The content of a file that belongs to the owner of its folder. Raises OSError."""
    return read_regular(path, _MOST_BYTES, owners={path.parent.lstat().st_uid})
