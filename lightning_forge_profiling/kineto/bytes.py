"""The bytes of a trace file in pieces, decompressed if gzipped, with a limit against decompression bombs."""

import contextlib
import os
import zlib
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Final

from lightning_forge_profiling.errors import TraceError
from lightning_forge_profiling.safe_files import open_regular

COMPRESS_LEVEL: Final = 4
"""Level for the gzip files we write: a third of level 9's time for some 10 % more bytes."""

_PIECE_BYTES: Final = 4 << 20
_READ_BYTES: Final = 1 << 18
_GZIP_MAGIC: Final = b"\x1f\x8b"
_GZIP_WBITS: Final = 31

# Traces compress to between a tenth and a thirtieth. A file that exceeds both limits is a decompression bomb.
_ALWAYS_ALLOWED: Final = 128 << 20
_ALLOWED_RATIO: Final = 100


def unpacked(path: Path, problems: list[str], *, always_allowed: int = _ALWAYS_ALLOWED) -> Iterator[bytes]:
    """Read a file, decompressing it if it is gzipped.

    Example:
        >>> import gzip, tempfile
        >>> path = Path(tempfile.mkdtemp()) / "trace.json.gz"
        >>> _ = path.write_bytes(gzip.compress(b"[{}]") + gzip.compress(b" "))
        >>> b"".join(unpacked(path, []))
        b'[{}] '
    """
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
        before, damage = unpacker.copy(), ""
        try:
            part = unpacker.decompress(packed, _PIECE_BYTES)
        except zlib.error as exc:
            part, damage = _before_damage(before, packed), str(exc)
        parts.append(part)
        size += len(part)
        total += len(part)
        if total > limit:
            raise TraceError(f"{file.name}: unpacks to more than {limit >> 20} MB, implausible for a trace of its size")
        if damage:
            problems.append(f"damaged gzip data after {total} unpacked bytes ({damage})")
            unfinished = False
            break
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


def _before_damage(unpacker: Any, packed: bytes) -> bytes:
    """The data before an error, byte by byte: a call of zlib that fails returns nothing."""
    content = bytearray()
    with contextlib.suppress(zlib.error):
        for place in range(len(packed)):
            content += unpacker.decompress(packed[place : place + 1])
    return bytes(content)
