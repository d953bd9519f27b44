"""The summaries that analyses leave beside the traces: of one rank, and of all with the run around them."""

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from lightning_forge_profiling.json_layout import decoded
from lightning_forge_profiling.plain_text import encodable
from lightning_forge_profiling.safe_files import open_regular, read_regular, write_whole
from lightning_forge_profiling.schema import SCHEMA_VERSION, Analysis, RankResult, TraceFile

PACKAGE: Final = str(vars(sys.modules[__name__.partition(".")[0]])["__version__"])

_decoder = msgspec.json.Decoder(RankResult)
_of_all = msgspec.json.Decoder(Analysis)


def write_rank_result(result: RankResult, path: Path) -> None:
    """Write a result. Raises OSError."""
    write_whole(path, msgspec.json.encode(result, enc_hook=dict) + b"\n")  # the hook is for mappings that are no dict


def read_rank_result(path: Path) -> RankResult:
    """Read a result. Raises OSError, or ValueError if it is damaged or has another layout."""
    return decoded(read_regular(path), _decoder, SCHEMA_VERSION)


def summary_json(analysis: Analysis) -> bytes:
    """The content of `summary.json`: indented, with a final newline."""
    encoded = msgspec.json.encode(analysis, enc_hook=dict)  # the hook is for mappings that are no dict
    return msgspec.json.format(encoded, indent=2) + b"\n"


def read_summary(path: Path) -> Analysis:
    """Read a `summary.json`. Raises OSError, or ValueError if it is damaged or has another layout."""
    return decoded(read_regular(path), _of_all, SCHEMA_VERSION)


def described(files: Sequence[Path]) -> tuple[TraceFile, ...]:
    """Size and digest of files. Raises OSError."""
    found = []
    for file in files:
        with open_regular(file) as source:
            digest = hashlib.blake2b(digest_size=16)
            while piece := source.read(1 << 20):
                digest.update(piece)
            found.append(TraceFile(name=encodable(file.name), bytes=source.tell(), blake2b=digest.hexdigest()))
    return tuple(found)


def is_of(result: RankResult, files: Sequence[Path]) -> bool:
    """Whether a result is of these files as they are, by this version. Raises OSError."""
    if result.package != PACKAGE or len(result.traces) != len(files):
        return False
    sizes = [(encodable(file.name), file.stat().st_size) for file in files]
    return sizes == [(trace.name, trace.bytes) for trace in result.traces] and result.traces == described(files)
