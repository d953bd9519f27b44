"""What the analysis of one rank leaves for that of all: the content of `rankN.summary.json`."""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from lightning_forge_profiling.plain_text import encodable
from lightning_forge_profiling.results.json_layout import decoded
from lightning_forge_profiling.results.rank import RankSummary
from lightning_forge_profiling.results.timeline import Timeline
from lightning_forge_profiling.safe_files import open_regular, read_regular, write_whole

SCHEMA_VERSION: Final = 1
UNKNOWN_RANK: Final = -1
PACKAGE: Final = str(vars(sys.modules[__name__.partition(".")[0]])["__version__"])


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A collective as its communication kernel describes it.

    Attributes:
        name: `allreduce`, `_allgather_base`, ...
        group: name of the process group.
        elements: number of elements in one rank's input.
        dtype: its data type, as PyTorch spells it.
    """

    name: str
    group: str
    elements: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCollectives:
    """The collectives of one rank's counted steps as columns, in the order they were launched.

    Attributes:
        steps: number of counted steps.
        calls: the different collectives.
        call: position of each one's description in `calls`.
        sequence: its number in its process group.
        start_ns: begin of its kernel on the rank's clock, nanoseconds from `RankResult.base_ns`.
        end_ns: end of its kernel.
        step: position of its step, if only a stream stands for its process group; else -1.
    """

    steps: int
    calls: tuple[CollectiveCall, ...]
    call: tuple[int, ...]
    sequence: tuple[int, ...]
    start_ns: tuple[int, ...]
    end_ns: tuple[int, ...]
    step: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """A trace that was analysed, so that it can be recognized.

    Attributes:
        name: name of the file.
        bytes: its size.
        blake2b: digest of its content.
    """

    name: str
    bytes: int
    blake2b: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """The analysis of one rank's traces, without the other ranks.

    Attributes:
        schema_version: version of this layout.
        package: version of this package, whose figures these are.
        rank: the global rank; -1 if the trace has none.
        world_size: number of ranks of the run; None if unknown.
        base_ns: Unix time in nanoseconds that the times of `collectives` count from; None if unknown.
        traces: the files.
        cut_off: where the files are cut off; "" for complete ones.
        summary: the figures.
        collectives: the collectives, to be matched with those of other ranks.
        timeline: the timeline of the reports.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    package: str
    rank: int
    world_size: int | None
    base_ns: int | None
    traces: tuple[TraceFile, ...]
    cut_off: str
    summary: RankSummary
    collectives: RankCollectives
    timeline: Timeline


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
