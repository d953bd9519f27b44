"""Origin of a run: its script and options, git commit, and the record of the run that it continues."""

import os
import re
import stat
from collections.abc import Container, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Final

from lightning_forge_profiling.names import RECORD_FOLDER, record_name
from lightning_forge_profiling.record.lines import Begin, decode_line
from lightning_forge_profiling.safe_files import open_regular, read_regular

_OPTION: Final = re.compile(r"--[A-Za-z][\w.-]*|-[A-Za-z]", re.ASCII)
_SECRET: Final = re.compile(r"key|token|secret|pass|pw|auth|cred|cookie|bearer", re.IGNORECASE)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_HEAD_BYTES: Final = 1 << 16
_PACKED_BYTES: Final = 1 << 26


def command_line(argv: Sequence[str]) -> tuple[str, ...]:
    """The name of the script and those of its options: values may be secrets."""
    kept = [os.path.basename(argument) for argument in argv[:1]]  # noqa: PTH119  (keeps "-c" and "")
    secret = False
    for argument in takewhile(lambda each: each != "--", argv[1:]):
        name, equals, _ = argument.partition("=")
        if secret or not _OPTION.fullmatch(name):
            secret = False  # a value, whatever it looks like
            continue
        kept.append(name)
        secret = not equals and _SECRET.search(name) is not None
    return tuple(kept)


def git_commit(folder: Path) -> str:
    """The checked-out commit, read from git's files; "" outside a repository."""
    # as in git, a repository of another user than this one and root does not count.
    owners = {os.geteuid(), 0}
    with suppress(OSError):
        for parent in (folder, *folder.parents):
            if os.path.lexists(parent / ".git"):
                return _head(parent / ".git", owners)
    return ""


def _head(git: Path, owners: Container[int]) -> str:
    """The commit of a `.git`, which is a folder or, in a worktree or a submodule, a file with the path of one."""
    if stat.S_ISREG(git.lstat().st_mode):
        git = git.parent / (_text(git, owners).removeprefix("gitdir:").strip() or git.name)
    common = git / (_text(git / "commondir", owners) or ".")
    if any(not stat.S_ISDIR(each.lstat().st_mode) or each.lstat().st_uid not in owners for each in (git, common)):
        return ""
    head = _text(git / "HEAD", owners)
    if not head.startswith("ref:"):
        return head if _COMMIT.fullmatch(head) else ""
    ref = head.removeprefix("ref:").strip()
    packed = re.search(rf"^(\w+) {re.escape(ref)}$", _text(common / "packed-refs", owners), re.MULTILINE)
    within = ((each.resolve() / "refs", (each / ref).resolve()) for each in (git, common))
    values = [_text(path, owners) for folder, path in within if path.is_relative_to(folder)]
    return next(filter(_COMMIT.fullmatch, [*values, packed[1] if packed else ""]), "")


def record_of_checkpoint(checkpoint: Path, *, but: Path) -> str:
    """The record of the run that wrote a checkpoint."""
    # that is the last one begun before the checkpoint was saved, in the closest parent folder that has records.
    if not os.path.exists(checkpoint):  # noqa: PTH110
        return ""
    saved_at = checkpoint.stat().st_mtime
    for parent in checkpoint.absolute().parents:
        begins = {folder: _began_at(folder) for folder in parent.glob(f"{RECORD_FOLDER}*") if folder != but}
        known = {folder: at for folder, at in begins.items() if at is not None}
        if known:  # a copy without its mtime may look older than every record
            before = {folder: at for folder, at in known.items() if at <= saved_at} or known
            return str(max(before, key=before.__getitem__))
    return ""


def _began_at(folder: Path) -> float | None:
    paths = [folder / record_name(0), *sorted(folder.glob("rank*.jsonl"))]
    for path in paths:
        with suppress(OSError, ValueError), open_regular(path) as file:
            first = decode_line(file.readline(_HEAD_BYTES))
            if isinstance(first, Begin):
                return first.at
    return None


def _text(path: Path, owners: Container[int]) -> str:
    with suppress(OSError):
        return read_regular(path, _PACKED_BYTES, owners=owners).decode(errors="replace").strip()
    return ""
