"""The folder of a run, which may be a local one that is copied to a URL at the end, and what loggers call the run."""

import os
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from functools import reduce
from operator import truediv
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Final, NamedTuple

from lightning_forge_profiling.plain_text import name_of, plain_logger
from lightning_forge_profiling.profiler.child import problems_within
from lightning_forge_profiling.profiler.config import local_folder
from lightning_forge_profiling.run.training import Training
from lightning_forge_profiling.schema import TrackedRun

_log = plain_logger(__name__)

UPLOAD_S: Final = 60.0  # longest wait for a copy at the end of a fit. A longer copy goes on while the process lives.
# temporary folder of this process. With several ranks, rank 0's is used.
_STAGING: Final = f"forge-profiling-{secrets.token_hex(6)}"

_OWN: Final = re.compile(r"rank(\d+)\.")


class Folder(NamedTuple):
    """A folder that files are written to."""

    path: Path  # the local folder
    url: str = ""  # remote folder that it is copied to at the end of the fit; "" for none

    def __truediv__(self, name: str | os.PathLike[str]) -> "Folder":
        """A subfolder."""
        return Folder(self.path / name, f"{self.url}/{os.fspath(name)}" if self.url else "")


class WindowFolders:
    """The folders of a fit's windows, the same on all ranks, and which of the ranks write to this one's."""

    def __init__(self, root: Folder, name: str, rank: int) -> None:
        self.root, self._name, self._rank = root, name, rank
        self._here: set[str] = set()  # the signs that were found

    def of(self, window: object | None) -> Folder:
        """The folder of a window; None for the first one of a steady run."""
        return self.root / f"{self._name}_{'steady' if window is None else str(window).replace(' ', '_')}"

    def _sign(self, rank: int | str) -> str:
        return f".{self._name}.rank{rank}"

    def sign(self) -> None:
        """Leave a file, before any rank trains: who finds it has the same folder."""
        with suppress(OSError):  # no other rank then waits for this one's traces
            self.root.path.mkdir(parents=True, exist_ok=True)
            (self.root.path / self._sign(self._rank)).touch(exist_ok=False)

    def ranks_here(self, ranks: Iterable[int]) -> list[int]:
        """Which of some ranks have the same folder."""
        self._here |= {path.name for path in self.root.path.glob(self._sign("*"))}
        return [rank for rank in ranks if rank == self._rank or self._sign(rank) in self._here]

    def leave(self, *, made: bool) -> None:
        """Take the sign away, and a folder that was made for the windows if it has none, nor signs of others."""
        with suppress(OSError):
            (self.root.path / self._sign(self._rank)).unlink(missing_ok=True)
            if made:
                self.root.path.rmdir()


def folder_of(name: str | os.PathLike[str]) -> Folder:
    """The folder for a name that Lightning accepts: `~/runs`, `file:///runs` or `s3://bucket/runs`."""
    path, url = local_folder(name), os.fspath(name).rstrip("/")
    if path is not None:
        return Folder(path)
    return Folder(Path(gettempdir(), _STAGING, *(part for part in re.split(r"[:/\\]+", url) if part.strip("."))), url)


def run_folder(training: Training) -> Folder:
    """The folder of this run: of TensorBoard's logger, else of the first logger, else the default. A collective."""
    facts = training.facts
    folder = logger_folder(training) or folder_of(facts.folder) if facts.is_zero else Folder(Path())
    return training.broadcast(folder)


def logger_folder(training: Training) -> Folder | None:
    """The folder of this run that its loggers give it; None without a logger. For rank 0; no collective."""
    loggers = sorted(training.loggers, key=_is_tensorboard, reverse=True)  # stable: the others stay in their order
    return next(filter(None, (_folder(logger, training.facts.folder) for logger in loggers)), None)


def _folder(logger: Any, root: str) -> Folder | None:
    try:
        if own := getattr(logger, "log_dir", None):
            return folder_of(own)
        # where Lightning puts its checkpoints, so that a run's files lie together and outside of the tracker's
        run, saved = tracked_run(logger), logger.save_dir
        version = f"version_{run.version}" if isinstance(logger.version, int) else run.version
        if not (saved or run.name or version):
            return None
        return reduce(truediv, filter(None, (run.name, version)), folder_of(saved or root))
    except Exception:  # a server's, which may be gone by the end of the fit
        return None


def tracked_runs(training: Training) -> tuple[TrackedRun, ...]:
    """What each logger calls this run. For rank 0."""
    runs = []
    for logger in training.loggers:
        with suppress(Exception):  # a server's, as above
            runs.append(tracked_run(logger))
    return tuple(runs)


def tracked_run(logger: Any) -> TrackedRun:
    """What a logger calls this run."""
    name, version = ("" if said is None else str(said) for said in (logger.name, logger.version))
    return TrackedRun(logger=name_of(logger), name=name, version=version)


def _is_tensorboard(logger: Any) -> bool:
    return any(base.__name__ == "TensorBoardLogger" for base in type(logger).__mro__)


def remote_problem(url: str) -> str:
    """Why files cannot be copied to a URL, such as a client that is not installed; "" if no reason is known."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # noqa: PLC0415  (only where one is remote)

    try:
        url_to_fs(url)
    except Exception as exc:
        return f"Nothing can be copied to {url!r}: {type(exc).__name__}: {exc}"
    return ""


def finished_files(folder: Path, rank: int | None = None, *, others: bool = True) -> list[Path]:
    """The complete files of a folder."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and not path.is_symlink()
        and path.suffix != ".part"
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and _is_wanted(path.name if path.parent == folder else "", rank, others=others)
    ]


def _is_wanted(name: str, rank: int | None, *, others: bool) -> bool:
    owner = _OWN.match(name)
    return others if owner is None else rank is None or int(owner[1]) == rank


def upload(folder: Path, url: str, files: Iterable[Path] | None = None, *, limit_s: float = UPLOAD_S) -> bool:
    """Copy a folder to a URL. Never raises: a failure is one warning that says where the files are."""
    chosen = finished_files(folder) if files is None else list(files)
    [problem] = problems_within(limit_s, [lambda: _copy(folder, url, chosen)])
    if problem is not None:
        what = f"{type(problem).__name__}: {problem}"
        _log.warning("The files of this run could not be copied to %s (%s). They are in %s", url, what, folder)
    return problem is None


def _copy(folder: Path, url: str, files: Iterable[Path]) -> None:
    from fsspec.core import url_to_fs  # noqa: PLC0415  (only where a folder is remote)

    system, root = url_to_fs(url)
    for file in files:
        target = f"{root}/{file.relative_to(folder).as_posix()}"
        system.makedirs(target.rpartition("/")[0], exist_ok=True)
        system.put_file(str(file), target)
