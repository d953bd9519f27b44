"""The text of a trace, cut into pieces that hold whole events, without ever holding all of it."""

import re
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, Generic, TypeVar

import msgspec

from lightning_forge_profiling.errors import TraceError

__all__ = ["TraceText"]

_PIECE_BYTES: Final = 4 << 20
_READ_BYTES: Final = 1 << 18
_GZIP_MAGIC: Final = b"\x1f\x8b"
_BOM: Final = b"\xef\xbb\xbf"

# Traces compress to a fifteenth or so. What unpacks to a hundred times its size and more than this is a bomb.
_UNPACKED_ALWAYS: Final = 1 << 30
_UNPACKED_RATIO: Final = 100
_LONGEST_EVENT: Final = 64 << 20
_MOST_SKIPPED: Final = 1000
_TRIES: Final = 32

_EVENTS_KEY: Final = re.compile(rb'"traceEvents"\s*:\s*\[')
_BOUNDARY: Final = re.compile(rb"\}\s*,\s*(?=\{)")
_PLACE: Final = re.compile(r"\(byte (\d+)\)")

# What Kineto has written although JSON has no such thing: a bandwidth over no time, a Windows path in a name, a control
# character in an annotation.
_NOT_A_NUMBER: Final = re.compile(rb":\s*[-+]?(?:nan|inf)\w*(?=\s*[,}\]])", re.IGNORECASE)
_ESCAPE: Final = re.compile(rb'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?')
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")

T = TypeVar("T")


@dataclass(slots=True)
class TraceText(Generic[T]):
    """A file with a trace, read once from its beginning to its end.

    A cut between two events is found by trying: a text that begins with an event and decodes as a list of whole events
    can only have been cut between two of them, whatever the order of keys, the white space, or the names inside.

    Args:
        path: the file, JSON or gzipped JSON.
        decode: turns the JSON text of a list of events into events; may raise `msgspec.DecodeError`.
    """

    path: Path
    decode: Callable[[bytes], list[T]]
    header: dict[str, msgspec.Raw] = field(default_factory=dict, init=False)
    """The trace's own fields beside its events; complete when all events have been read."""
    problems: list[str] = field(default_factory=list, init=False)
    """What is wrong with the file, in words, as far as it has been read."""
    skipped: int = field(default=0, init=False)
    """How many events could not be read."""
    _offset: int = field(default=0, init=False)

    def events(self) -> Iterator[list[T]]:
        """The events, some thousands at a time.

        Raises:
            TraceError: the file holds no trace.
            OSError: the file could not be read.
        """
        pieces = _ahead(self._pieces())
        text, done = self._open(pieces)
        found = False
        while not done:
            more = next(pieces, b"")
            events, text, done = self._take(text, last=not more)
            if events:
                found = True
                yield events
            if len(text) > _LONGEST_EVENT:
                self.problems.append(f"no event ends within {_LONGEST_EVENT >> 20} MB after byte {self._offset}")
                break
            text += more
        if not found:
            where = f"; it ends at byte {self._offset + len(text)}" if self.problems else ""
            raise TraceError(f"{self.path}: a trace without a single whole event{where}")
        if done and text.strip():
            while piece := next(pieces, b""):
                text += piece
            self._read_header(b"{" + text.strip().removeprefix(b","), "after")

    def _open(self, pieces: Iterator[bytes]) -> tuple[bytes, bool]:
        """Read up to the first event; returns the text from there on."""
        text = b""
        while piece := next(pieces, b""):
            text += piece
            if not self._offset and text.startswith(_BOM):
                text = text.removeprefix(_BOM)
            start = text.lstrip()[:1]
            if start == b"[":
                self._offset = text.index(b"[") + 1
                return text[self._offset :], False
            if start not in {b"{", b""}:
                break
            match = _EVENTS_KEY.search(text)
            if match:
                self._read_header(text[: match.start()].rstrip().removesuffix(b",") + b"}", "before")
                self._offset = match.end()
                return text[match.end() :], False
            if len(text) > _LONGEST_EVENT:
                break
        raise TraceError(f"{self.path}: {self._no_trace(text)}")

    def _no_trace(self, text: bytes) -> str:
        if not text.strip():
            return "; ".join(["the file is empty", *self.problems])
        try:
            msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            cut = "truncated" in str(exc) or self.problems
            return f"cut before its first event, at byte {len(text)}" if cut else f"not JSON: {exc}"
        return "JSON, but no trace: it has no list traceEvents"

    def _read_header(self, text: bytes, where: str) -> None:
        try:
            self.header |= msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.problems.append(f"the trace's own fields {where} its events could not be read")

    def _take(self, text: bytes, *, last: bool) -> tuple[list[T], bytes, bool]:
        """Decode as many whole events as there are; returns them, the rest, and whether the list has ended."""
        end, place = len(text), -1
        for attempt in range(_TRIES):
            # the rest of a file ends with the end of the list, or else with that of an event
            whole = last and attempt < 2  # noqa: PLR2004
            cut = end if whole else _last_boundary(text, end)
            if cut <= 0:
                break
            try:
                events = self._decode(b"[" + text[:cut] + (b"" if whole and not attempt else b"]"))
            except msgspec.DecodeError as exc:
                match = _PLACE.search(str(exc))
                place = int(match[1]) - 1 if match else cut
                if "trailing" in str(exc):
                    close = text.rindex(b"]", 0, place + 1) + 1
                    self._offset += close
                    return self._decode(b"[" + text[:close]), text[close:], True
                end = min(end if whole else cut, place)
                continue
            if whole and attempt:
                self.problems.append(f"the file ends before its list of events does, at byte {self._offset + cut}")
            self._offset += cut
            return events, text[cut:].lstrip().removeprefix(b","), whole
        return self._skip(text, place, last=last)

    def _skip(self, text: bytes, place: int, *, last: bool) -> tuple[list[T], bytes, bool]:
        """The text does not begin with a whole event: wait for more of it, or go on behind what is in the way."""
        if text.lstrip()[:1] == b"]":
            return [], text.lstrip()[1:], True
        following = _BOUNDARY.search(text, place) if 0 <= place < len(text) else None
        if following and self.skipped < _MOST_SKIPPED:
            if not self.skipped:
                self.problems.append(f"an event at byte {self._offset} is not JSON")
            self.skipped += 1
            self._offset += following.end()
            return [], text[following.end() :], False
        if following:
            self.problems.append(f"more than {_MOST_SKIPPED} events are not JSON, the rest was not read")
            return [], b"", True
        if last:
            self.problems.append(f"the file ends in the middle of an event, at byte {self._offset + len(text)}")
            return [], b"", True
        return [], text, False

    def _decode(self, text: bytes) -> list[T]:
        try:
            return self.decode(text)
        except UnicodeDecodeError:
            return self.decode(_repaired(text.decode(errors="replace").encode()))
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            repaired = _repaired(text)
            if repaired == text:
                raise
            try:
                return self.decode(repaired)
            except (msgspec.DecodeError, UnicodeDecodeError):
                pass  # the place of what is wrong has to be one in the text as it is
            raise

    def _pieces(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            packed = file.read(2) == _GZIP_MAGIC
            file.seek(0)
            if packed:
                yield from self._unpacked(file)
            else:
                while piece := file.read(_PIECE_BYTES):
                    yield piece

    def _unpacked(self, file: BinaryIO) -> Iterator[bytes]:
        limit = max(_UNPACKED_ALWAYS, _UNPACKED_RATIO * self.path.stat().st_size)
        unpacker, begun = zlib.decompressobj(wbits=31), False
        parts: list[bytes] = []
        total, size, packed = 0, 0, b""
        try:
            while packed := packed or file.read(_READ_BYTES):
                parts.append(unpacker.decompress(packed, _PIECE_BYTES))
                begun = not unpacker.eof
                packed = unpacker.unconsumed_tail if begun else unpacker.unused_data.lstrip(b"\0")
                if unpacker.eof:  # a gzip file may have several members
                    unpacker = zlib.decompressobj(wbits=31)
                size += len(parts[-1])
                total += len(parts[-1])
                if total > limit:
                    raise TraceError(f"{self.path}: unpacks to more than {limit >> 20} MB, which no trace does")
                if size >= _PIECE_BYTES:
                    yield b"".join(parts)
                    parts, size = [], 0
            if begun:
                self.problems.append(f"the gzip data ends too early, after {total} unpacked bytes")
        except zlib.error as exc:
            self.problems.append(f"damaged gzip data after {total} unpacked bytes ({exc})")
        yield b"".join(parts)


def _last_boundary(text: bytes, end: int) -> int:
    """Where the last event before `end` ends that another seems to follow; 0 where there is none."""
    while (start := text.rfind(b"{", 0, end)) > 0:
        before = text[max(start - 64, 0) : start].rstrip()
        if before.endswith(b","):
            before = before[:-1].rstrip()
            if before.endswith(b"}"):
                return max(start - 64, 0) + len(before)
        end = start
    return 0


def _repaired(text: bytes) -> bytes:
    text = _NOT_A_NUMBER.sub(b":null", text)
    text = _ESCAPE.sub(lambda match: match[0] if match[1] else b"\\\\", text)
    return _CONTROL.sub(b" ", text)


def _ahead(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Get the next piece while this one is worked on: reading and unpacking do not hold the interpreter lock."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, pieces, b"")
        while piece := coming.result():
            coming = pool.submit(next, pieces, b"")
            yield piece
