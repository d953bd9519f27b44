"""The JSON text of a trace as lists of events, decoded in chunks so that memory does not grow with the file."""

import contextlib
import os
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, Generic, TypeVar

import msgspec

from lightning_forge_profiling.errors import TraceError
from lightning_forge_profiling.safe_files import open_regular

COMPRESS_LEVEL: Final = 4  # of gzip files we write: a third of level 9's time for some 10 % more bytes

_PIECE_BYTES: Final = 1 << 20
_READ_BYTES: Final = 1 << 18
_GZIP_MAGIC: Final = b"\x1f\x8b"
_GZIP_WBITS: Final = 31

EXPORT_IT: Final = 'export one with prof.export_chrome_trace("trace.json") of torch.profiler'

# How other files begin, what they are, and what to do.
_OTHER_FORMATS: Final = tuple(
    (re.compile(start, re.DOTALL | re.IGNORECASE), what, advice)
    for start, what, advice in (
        (rb"PK(?:\x03\x04|\x05\x06)", "a zip archive", "unzip it and give the file in it"),
        (rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", "compressed with zstd", "decompress it with zstd -d"),
        (rb"\xfd7zXZ\0", "compressed with xz", "decompress it with xz -d"),
        (rb"BZh[1-9]", "compressed with bzip2", "decompress it with bzip2 -d"),
        (rb"\x04\x22\x4d\x18", "compressed with lz4", "decompress it with lz4 -d"),
        (rb".{257}ustar", "a tar archive", "unpack it with tar -xf and give the file in it"),
        (rb"SQLite format 3\0", "an SQLite database, as of Nsight Systems", EXPORT_IT),
        (rb"\x80[\x02-\x05]", "a pickle, as a memory snapshot is", "open a snapshot at https://pytorch.org/memory_viz"),
        (rb"version https://git-lfs", "a pointer of Git LFS", "fetch the file with git lfs pull"),
        (rb"\s*<(?:!DOCTYPE|html)", "a web page", "download the file itself"),
    )
)
_PERFETTO: Final = f"a Perfetto trace (protobuf), not one of torch.profiler: {EXPORT_IT}"
_PACKET: Final = re.compile(
    rb"\n([\x80-\xff]{0,4}[\0-\x7f])", re.DOTALL
)  # field 1 of a protobuf message and its length
_BEGINNING: Final = 4096

# Traces compress to between a tenth and a thirtieth. A file that exceeds both limits is a decompression bomb.
_ALWAYS_ALLOWED: Final = 128 << 20
_ALLOWED_RATIO: Final = 100


def other_format(text: bytes) -> str:
    """What a file that begins like this is instead of a trace, and what to do; "" if it may be a trace."""
    other = next((f"{what}, not a trace: {advice}" for start, what, advice in _OTHER_FORMATS if start.match(text)), "")
    return other or (_PERFETTO if _is_perfetto(text) else "")


def _is_perfetto(text: bytes) -> bool:
    """Whether it begins with a packet of protobuf. What looks like JSON is one only if another packet follows."""
    packet = _PACKET.match(text)
    if packet is None or min(text[:_BEGINNING]) >= ord("\t"):
        return False
    length = sum((byte & 0x7F) << 7 * position for position, byte in enumerate(packet[1]))
    return not _OPENING.match(text) or text[packet.end() + length :][:1] in (b"", b"\n")


def unpacked(path: Path, problems: list[str], *, always_allowed: int = _ALWAYS_ALLOWED) -> Iterator[bytes]:
    """Read a file, decompressing it if it is gzipped."""
    try:
        with open_regular(path) as file:
            packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            file.seek(0)
            if packed:
                size = os.fstat(file.fileno()).st_size
                yield from _unzipped(file, problems, max(always_allowed, _ALLOWED_RATIO * size))
            else:
                while piece := file.read(_PIECE_BYTES):
                    yield piece
    except OSError as exc:
        exc.filename = exc.filename or str(path)  # a failed read, unlike a failed open, does not name the file
        raise


def ahead(pieces: Iterator[bytes]) -> Generator[bytes]:
    """Reads the next piece in a thread while the caller uses this one: reading and decompressing release the GIL."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, pieces, b"")
        while piece := coming.result():
            coming = pool.submit(next, pieces, b"")
            yield piece


def _unzipped(file: BinaryIO, problems: list[str], limit: int) -> Iterator[bytes]:
    unpacker = zlib.decompressobj(_GZIP_WBITS)
    parts: list[bytes] = []
    size = total = 0
    unfinished = False
    packed = b""
    while packed := packed or file.read(_READ_BYTES):
        try:
            part = unpacker.decompress(packed, _PIECE_BYTES)
        except zlib.error as exc:
            raise TraceError(
                f"{file.name}: damaged gzip data after {total} unpacked bytes ({exc}). "
                "Copy the file again, or record again."
            ) from exc
        parts.append(part)
        size += len(part)
        total += len(part)
        if total > limit:
            raise TraceError(f"{file.name}: unpacks to more than {limit >> 20} MB, implausible for a trace of its size")
        if size >= _PIECE_BYTES:
            yield b"".join(parts)
            parts, size = [], 0
        unfinished = not unpacker.eof
        if unfinished:
            packed = unpacker.unconsumed_tail
        else:  # a gzip file may have several members, and zeros to fill a block
            packed, unpacker = unpacker.unused_data.lstrip(b"\0"), zlib.decompressobj(_GZIP_WBITS)
    if unfinished:
        problems.append(f"damaged gzip data: it ends too early, after {total} unpacked bytes")
    yield b"".join(parts)


_MB: Final = 1 << 20
_LONGEST_EVENT: Final = 64 * _MB
_NEAR_THE_END: Final = 1 << 16
_NOT_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_OPENING: Final = re.compile(rb"(?:\xef\xbb\xbf)?\s*([\[{])")  # behind a byte order mark
_EVENTS_KEY: Final = re.compile(rb'"traceEvents"\s*:\s*\[')
_LAST_BOUNDARY: Final = re.compile(rb".*\}(\s*,\s*)(?=\{)", re.DOTALL)
_SEPARATOR: Final = re.compile(rb"[\s,]*")
_TOKEN: Final = re.compile(rb"[-+.\w]*\s*")  # a number or a word, as far as it goes

_NOT_A_NUMBER: Final = re.compile(rb'"(?<!\\")\s*:(\s*[-+]?(?i:nan|inf)\w*)(?=\s*[,}\]])')  # behind a key
_AT_BYTE: Final = re.compile(r" \(byte (\d+)\)")
_AROUND: Final = 40  # bytes of the text before and behind damage that are shown
_NO_ESCAPE: Final = re.compile(rb'\\(?!["/bfnrt]|u[0-9a-fA-F]{4})')
_CONTROL_TO_SPACE: Final = bytes.maketrans(bytes(range(32)), b" " * 32)

_skip = msgspec.json.Decoder(msgspec.Raw).decode

T = TypeVar("T")


@dataclass(slots=True)
class TraceText(Generic[T]):
    """A trace file, read once from beginning to end."""

    path: Path
    decode: Callable[[bytes], list[T]]
    # fields of the trace besides its events; complete once all events have been read
    header: dict[str, msgspec.Raw] = field(default_factory=dict, init=False)
    problems: list[str] = field(default_factory=list, init=False)  # of the file, in words, as far as it has been read
    _offset: int = field(default=0, init=False)
    _is_object: bool = field(default=False, init=False)
    _ended: bool = field(default=False, init=False)
    _between_events: bool = field(default=False, init=False)

    @property
    def complete(self) -> bool:
        """Whether the list of events has been read to its end; a bare list may lack its closing bracket."""
        return self._ended or (self._between_events and not self._is_object)

    def events(self) -> Generator[list[T]]:
        """The events, some thousands at a time."""
        with contextlib.closing(ahead(unpacked(self.path, self.problems))) as pieces:
            yield from self._events(pieces)

    def _events(self, pieces: Iterator[bytes]) -> Iterator[list[T]]:
        text = self._read_to_events(pieces)
        any_event = last = False
        while True:
            events, text = self._take(text, last=last)
            if events:
                any_event = True
                yield events
            if self._ended or last:
                break
            if len(text) > _LONGEST_EVENT:
                self.problems.append(f"no event ends within {_LONGEST_EVENT // _MB} MB after byte {self._offset}")
                break
            # double it, so that an event of many megabytes is not parsed again with each piece
            more = b"".join(_at_least(len(text), pieces))
            text, last = text + more, not more
        if self._ended:
            self._read_after_events(text + b"".join(_at_least(_LONGEST_EVENT, pieces)))
        if not any_event:
            raise TraceError(f"{self.path}: no complete event: {'; '.join(self.problems) or 'its list has none'}")

    def _read_to_events(self, pieces: Iterator[bytes]) -> bytes:
        """Read up to the first event; returns the text from there on."""
        text = b""
        # double it, so that a long header is not parsed again with each piece
        while piece := b"".join(_at_least(min(len(text), _LONGEST_EVENT + 1 - len(text)), pieces)):
            if not text and (other := other_format(piece)):
                raise TraceError(f"{self.path}: {other}")
            text += piece
            opening = _OPENING.match(text)
            if opening and opening[1] == b"[":
                self._offset = opening.end()
                return text[opening.end() :]
            key = _EVENTS_KEY.search(text)
            if opening and key:
                self._is_object = True
                self._offset = opening.start(1)
                self._read_header(text[self._offset : key.start()].rstrip().removesuffix(b",") + b"}")
                self._offset = key.end()
                return text[key.end() :]
            if (text.strip() and not opening) or len(text) > _LONGEST_EVENT:
                break
        raise TraceError(f"{self.path}: {self._no_trace(text)}")

    def _no_trace(self, text: bytes) -> str:
        if not text.strip():
            return "; ".join(["the file is empty", *self.problems])
        if not text.lstrip().startswith((b"{", b"[")):
            return f"not a trace: a trace is JSON, also as gzip; {EXPORT_IT}"
        if len(text) > _LONGEST_EVENT:
            return f"not a trace: no traceEvents list in its first {_LONGEST_EVENT // _MB} MB; {EXPORT_IT}"
        try:
            msgspec.json.decode(_repaired(text))
        except _NOT_JSON as exc:
            cut = "truncated" in str(exc) or self.problems
            return f"cut before its first event, at byte {len(text)}" if cut else f"not JSON: {exc}"
        return f"JSON, but not a trace: it has no traceEvents list; {EXPORT_IT}"

    def _read_after_events(self, text: bytes) -> None:
        """Read what follows the list of events."""
        rest = text.strip().removeprefix(b",")
        if self._is_object:
            self._read_header(b"{" + rest)
        elif rest:
            self.problems.append(f"the text after the list of events, at byte {self._offset}, was not read")

    def _read_header(self, text: bytes) -> None:
        try:
            self.header |= msgspec.json.decode(_repaired(text), type=dict[str, msgspec.Raw])
        except _NOT_JSON as exc:
            if not self._ended:
                raise self._damage(text, 0, exc) from exc
            self.problems.append("the trace's own fields after its events could not be read")

    def _take(self, text: bytes, *, last: bool) -> tuple[list[T], bytes]:
        """All whole events, and the text behind them.

        The end of the last event but one is guessed. If the text before it decodes, the guess is right: a text that
        begins with an event and is a list of whole values can only have been split between two events.
        """
        end, following = (0, 0) if last else _last_boundary(text)
        begin = _end_of(_SEPARATOR, text)
        for readable in (bytes, _repaired) if end > begin else ():
            with contextlib.suppress(*_NOT_JSON):
                events = self.decode(b"".join((b"[", memoryview(readable(text))[begin:end], b"]")))
                self._offset += following
                return events, text[following:]
        return self._take_each(text, last=last)

    def _take_each(self, text: bytes, *, last: bool) -> tuple[list[T], bytes]:
        """The same where the guess is wrong or the list ends: finds the end of each event."""
        readable = _repaired(text)
        begin = at = end = _end_of(_SEPARATOR, readable)
        while at < len(text):
            if readable[at : at + 1] == b"]":
                self._ended = True
                break
            stop = self._end_of_value(readable, at)
            if stop is None or (stop == len(text) and not last):
                break  # the rest of it is in the next piece
            end, at = stop, _end_of(_SEPARATOR, readable, stop)
        try:
            events = self.decode(b"".join((b"[", memoryview(readable)[begin:end], b"]")))
        except _NOT_JSON as exc:
            raise self._damage(readable, begin - 1, exc) from exc
        if last and not self._ended and at < len(text):
            self.problems.append(f"the file ends in the middle of an event, at byte {self._offset + len(text)}")
        elif last and not self._ended:
            self._between_events = True
            self.problems.append(f"the file ends before its list of events does, at byte {self._offset + at}")
        at += self._ended
        self._offset += at
        return events, text[at:]

    def _end_of_value(self, text: bytes, at: int) -> int | None:
        """The end of the value at a place; None if it is cut off. Raises TraceError if it is damaged."""
        try:
            _skip(memoryview(text)[at:])
        except _NOT_JSON as exc:
            found = _AT_BYTE.search(str(exc))
            if found and "trailing characters" in str(exc):
                return at + int(found[1]) - 1  # it counts the first of them
            if "truncated" in str(exc) or (found and _TOKEN.fullmatch(text, at + int(found[1]))):
                return None
            raise self._damage(text, at, exc) from exc
        return len(text)

    def _damage(self, text: bytes, at: int, exc: Exception) -> TraceError:
        """What is wrong with the part of a text that begins at a place."""
        found = _AT_BYTE.search(str(exc))
        at += int(found[1]) if found else 0
        around = text[max(at - _AROUND, 0) : at + _AROUND].decode(errors="replace")
        return TraceError(
            f"{self.path}: damaged at byte {self._offset + at}, in {around!r} ({_AT_BYTE.sub('', str(exc))}). "
            "Copy the file again, or record again; rename regions with a quotation mark, which PyTorch does not escape."
        )


def _last_boundary(text: bytes) -> tuple[int, int]:
    """Probable end of the last event but one and start of the last; zeros if there is no such place."""
    begin = max(len(text) - _NEAR_THE_END, 0)
    if match := _LAST_BOUNDARY.match(text, begin):
        return match.span(1)
    comma = text.rfind(b",", begin)  # the list may hold other values than events
    return (comma, comma + 1) if comma > begin else (0, 0)


def _repaired(text: bytes) -> bytes:
    r"""The text with Kineto's invalid JSON replaced, byte for byte, so that offsets stay the same.

    Kineto writes infinite bandwidths (`inf`, which becomes a string), Windows paths (`\` becomes `/`, as in later
    versions of Kineto), and control characters and broken UTF-8 in names.
    """
    text = text.translate(_CONTROL_TO_SPACE)
    if not text.isascii():
        text = text.decode(errors="surrogateescape").encode(errors="replace")
    # with escaped backslashes out of the way, every other one begins an escape
    text = _NO_ESCAPE.sub(b"/", text.replace(b"\\\\", b"\0\0")).replace(b"\0\0", b"\\\\")
    return _NOT_A_NUMBER.sub(lambda match: match[0].removesuffix(match[1]) + b'""'.rjust(len(match[1])), text)


def _end_of(pattern: re.Pattern[bytes], text: bytes, at: int = 0) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _at_least(size: int, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Pieces that together reach this size, or all that are left; at least one."""
    for piece in pieces:
        yield piece
        size -= len(piece)
        if size <= 0:
            break
