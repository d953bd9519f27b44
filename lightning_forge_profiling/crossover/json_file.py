"""The JSON file of a crossover, written and read: measured on one machine, drawn on another."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from lightning_forge_profiling.crossover.curves import SCHEMA_VERSION, CrossoverResult
from lightning_forge_profiling.errors import ConfigurationError
from lightning_forge_profiling.safe_files import read_regular


@dataclass(frozen=True, slots=True)
class _Versioned:
    """The field that files of all versions share."""

    schema_version: int

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            raise ConfigurationError(f"schema version {self.schema_version} is not supported, only {SCHEMA_VERSION}")


def crossover_json(result: CrossoverResult) -> bytes:
    """The content of the file: indented, with a final newline. The crossovers in it are for other readers."""
    return msgspec.json.format(msgspec.json.encode(result.to_dict()), indent=2) + b"\n"


def read_crossover(path: Path) -> CrossoverResult:
    """Read a file that `crossover --json` wrote."""
    return parse_crossover(read_regular(path.resolve()), str(path))


def parse_crossover(content: bytes, name: str) -> CrossoverResult:
    """The result from the content of a file."""
    try:
        msgspec.json.decode(content, type=_Versioned)
        return msgspec.json.decode(content, type=CrossoverResult)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{name}: not what crossover --json wrote: {error}") from error
