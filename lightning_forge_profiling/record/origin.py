"""Origin of a run: command line without secrets, git commit, and the record of the run that it continues."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from lightning_forge_profiling.names import RECORD_FOLDER, record_name
from lightning_forge_profiling.record.lines import Begin, decode_line

_SECRET: Final = re.compile(r"key|token|secret|password|passwd|credential", re.IGNORECASE)
_COMMIT: Final = re.compile(r"[0-9a-f]{40,64}")
_LEFT_OUT: Final = "..."
_HEAD_BYTES: Final = 1 << 16


def command_line(argv: Sequence[str]) -> tuple[str, ...]:
    """The arguments without secrets.

    Values of options named like `key`, `token`, `secret`, `password` or `credential`, and credentials in URLs, become
    `...`.

    Args:
        argv: the program and its arguments.

    Example:
        >>> command_line(["train.py", "--lr=0.1", "--api-key", "12ab", "--hub.token=34cd", "s3://me:56ef@host/data"])
        ('train.py', '--lr=0.1', '--api-key', '...', '--hub.token=...', 's3://...@host/data')
    """
    kept: list[str] = []
    secret = False
    for argument in argv:
        name, equals, _ = argument.partition("=")
        if secret and not argument.startswith("-"):
            kept.append(_LEFT_OUT)
            secret = False
            continue
        secret = bool(_SECRET.search(name)) and (name.startswith("-") or bool(equals))
        kept.append(
            f"{name}={_LEFT_OUT}" if secret and equals else re.sub(r"://[^/@\s]+@", f"://{_LEFT_OUT}@", argument)
        )
        secret = secret and not equals
    return tuple(kept)


def git_commit(folder: Path) -> str:
    """The checked-out commit, read from git's files; "" outside a repository.

    Args:
        folder: a folder in the working tree.
    """
    found = (each / ".git" for each in (folder, *folder.parents))
    git = next((path for path in found if os.path.exists(path)), None)  # noqa: PTH110  (False without permission)
    if git is None:
        return ""
    if git.is_file():  # of a worktree or a submodule
        git = (git.parent / _text(git).removeprefix("gitdir:").strip()).resolve()
    common = (git / (_text(git / "commondir").strip() or ".")).resolve()
    head = _text(git / "HEAD").strip()
    if not head.startswith("ref:"):
        return head if _COMMIT.fullmatch(head) else ""
    ref = head.removeprefix("ref:").strip()
    commit = _text(git / ref).strip() or _text(common / ref).strip()
    if not commit:
        packed = re.search(rf"^([0-9a-f]+) {re.escape(ref)}$", _text(common / "packed-refs"), re.MULTILINE)
        commit = packed[1] if packed else ""
    return commit if _COMMIT.fullmatch(commit) else ""


def record_of_checkpoint(checkpoint: Path, *, but: Path) -> str:
    """The record of the run that wrote a checkpoint.

    That is the last one begun before the checkpoint was saved, in the closest parent folder that has records.

    Args:
        checkpoint: file or folder of the checkpoint.
        but: this run's own record, which is ignored.

    Returns:
        The record's folder; "" if there is none.
    """
    if not os.path.exists(checkpoint):  # noqa: PTH110
        return ""
    saved_at = checkpoint.stat().st_mtime
    for parent in checkpoint.absolute().parents:
        begins = {folder: _began_at(folder) for folder in parent.glob(f"{RECORD_FOLDER}*") if folder != but}
        found = {folder: at for folder, at in begins.items() if at is not None}
        if found:  # a copy without its mtime may look older than every record
            before = {folder: at for folder, at in found.items() if at <= saved_at} or found
            return str(max(before, key=before.__getitem__))
    return ""


def _began_at(folder: Path) -> float | None:
    paths = [folder / record_name(0), *sorted(folder.glob("rank*.jsonl"))]
    for path in paths:
        with suppress(OSError, msgspec.DecodeError), path.open("rb") as file:
            first = decode_line(file.readline(_HEAD_BYTES))
            if isinstance(first, Begin):
                return first.at
    return None


def _text(path: Path) -> str:
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""
