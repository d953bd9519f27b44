"""Folder of a run's files: a local one, and the URL that a remote one is copied to at the end."""

import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from tempfile import gettempdir
from typing import Final, NamedTuple

from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.profiler.child import problems_within
from lightning_forge_profiling.profiler.paths import local_folder

_log = plain_logger(__name__)

UPLOAD_S: Final = 60.0
"""Longest wait for a copy at the end of a fit. A longer copy goes on while the process lives."""

_STAGING: Final = f"forge-profiling-{secrets.token_hex(6)}"
"""Temporary folder of this process. With several ranks, rank 0's is used."""

_OWN: Final = re.compile(r"rank(\d+)\.")


class Folder(NamedTuple):
    """A folder that files are written to.

    Attributes:
        path: the local folder.
        url: remote folder that it is copied to at the end of the fit; "" for none.
    """

    path: Path
    url: str = ""

    def __truediv__(self, name: str | os.PathLike[str]) -> "Folder":
        """A subfolder."""
        return Folder(self.path / name, f"{self.url}/{os.fspath(name)}" if self.url else "")


def folder_of(name: str | os.PathLike[str]) -> Folder:
    """The folder for a name that Lightning accepts: `~/runs`, `file:///runs` or `s3://bucket/runs`.

    Example:
        >>> folder_of("file:///data/runs").path
        PosixPath('/data/runs')
        >>> (folder_of("s3://bucket/runs/") / "gpt").url
        's3://bucket/runs/gpt'
    """
    path, url = local_folder(name), os.fspath(name).rstrip("/")
    if path is not None:
        return Folder(path)
    return Folder(Path(gettempdir(), _STAGING, *(part for part in re.split(r"[:/\\]+", url) if part.strip("."))), url)


def remote_problem(url: str) -> str:
    """Why files cannot be copied to a URL, such as a client that is not installed; "" if no reason is known.

    Example:
        >>> remote_problem("memory://runs")
        ''
        >>> remote_problem("nowhere://runs")
        "Nothing can be copied to 'nowhere://runs': ValueError: Protocol not known: nowhere"
    """
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
    """Copy a folder to a URL. Never raises: a failure is one warning that says where the files are.

    Example:
        >>> from tempfile import mkdtemp
        >>> folder = Path(mkdtemp())
        >>> _ = (folder / "rank0.jsonl").write_text("{}")
        >>> upload(folder, "memory://runs/forge_record")
        True
    """
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
