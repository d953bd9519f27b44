"""The latest pulses of a run's ranks, as bytes and as files in the record's folder.

Rank 0 writes those that it hears to `ranks.json`. A rank that has no other channel, or that something is wrong with,
writes its own to `rankN.pulse.json`.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from lightning_forge_profiling.json_layout import decoded
from lightning_forge_profiling.names import RANKS_JSON, pulse_name
from lightning_forge_profiling.safe_files import read_regular, write_whole
from lightning_forge_profiling.schema import Heard, Pulse

_VERSION: Final = 1
_MOST_BYTES: Final = 1 << 16  # of one pulse; most have 1 KB
MOST_RANKS: Final = 1 << 14

_encoder = msgspec.json.Encoder()
_pulses: msgspec.json.Decoder[Pulse] = msgspec.json.Decoder(Pulse)
_heards: msgspec.json.Decoder[list[Heard]] = msgspec.json.Decoder(list[Heard])


def encode_pulse(pulse: Pulse) -> bytes:
    """The pulse as JSON."""
    return _encoder.encode(pulse)


def decode_pulse(content: bytes) -> Pulse:
    """A pulse. Raises ValueError if it is damaged, out of range or of another layout."""
    if len(content) > _MOST_BYTES:
        raise ValueError("it is too long for a pulse")
    return decoded(content, _pulses, _VERSION, untrusted=True)


def later(known: Heard | None, pulse: Pulse, at: float) -> Heard:
    """What is known of a rank after a pulse that was read at that time, new or not."""
    if known is None:
        return Heard(pulse=pulse, at=at)
    before = known.pulse
    if (pulse.host, pulse.pid) == (before.host, before.pid):
        newer, restarts = pulse.number > before.number, known.restarts
    else:  # a pulse of the process before may still be there
        newer, restarts = pulse.at > before.at, known.restarts + 1
    return Heard(pulse=pulse, at=at, restarts=restarts) if newer else known


def write_pulse(folder: Path, pulse: Pulse) -> None:
    """Write a rank's own file. Raises OSError."""
    write_whole(folder / pulse_name(pulse.rank), encode_pulse(pulse))


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


def write_heard(folder: Path, heard: Iterable[Heard]) -> None:
    """Write what rank 0 heard. Raises OSError."""
    write_whole(folder / RANKS_JSON, _encoder.encode(list(heard)))


def read_heard(folder: Path, run: str) -> dict[int, Heard]:
    """The latest pulse of each rank of a run by all files in its record's folder; {} if there are none."""
    heard: dict[int, Heard] = {}
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
        self._heard: dict[int, Heard] = {}

    def read(self, run: str) -> Mapping[int, Heard]:
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
