"""A rank's summary on disk, beside the trace that it is of."""

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from lightning_forge_profiling.json_layout import decoded
from lightning_forge_profiling.plain_text import encodable
from lightning_forge_profiling.safe_files import open_regular, read_regular, write_whole
from lightning_forge_profiling.schema import SCHEMA_VERSION, RankResult, TraceFile

PACKAGE: Final = str(vars(sys.modules[__name__.partition(".")[0]])["__version__"])

_decoder = msgspec.json.Decoder(RankResult)


def write_rank_result(result: RankResult, path: Path) -> None:
    """Write a result. Raises OSError."""
    write_whole(path, msgspec.json.encode(result, enc_hook=dict) + b"\n")  # the hook is for mappings that are no dict


def read_rank_result(path: Path) -> RankResult:
    """Read a result. Raises OSError, or ValueError if it is damaged or has another layout."""
    return decoded(read_regular(path), _decoder, SCHEMA_VERSION)


def described(files: Sequence[Path]) -> tuple[TraceFile, ...]:
    """Size and digest of files. Raises OSError."""
    return tuple(map(_described, files))


def _described(file: Path) -> TraceFile:
    with open_regular(file) as source:
        digest = hashlib.blake2b(digest_size=16)
        while piece := source.read(1 << 20):
            digest.update(piece)
        return TraceFile(name=encodable(file.name), bytes=source.tell(), blake2b=digest.hexdigest())


def is_of(result: RankResult, files: Sequence[Path]) -> bool:
    """Whether a result is of these files as they are, by this version. Raises OSError."""
    if result.package != PACKAGE or len(result.traces) != len(files):
        return False
    sizes = [(encodable(file.name), file.stat().st_size) for file in files]
    return sizes == [(trace.name, trace.bytes) for trace in result.traces] and result.traces == described(files)
