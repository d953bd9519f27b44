"""The files by which a live run is asked for a window, and answers: in the folder of its record."""

from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from lightning_forge_profiling.json_layout import decoded
from lightning_forge_profiling.names import WINDOW_PLAN, WINDOW_REQUEST
from lightning_forge_profiling.safe_files import read_regular, write_whole
from lightning_forge_profiling.schema import WindowPlan, WindowRequest

_VERSION: Final = 1
_MOST_BYTES: Final = 1 << 16
_encoder = msgspec.json.Encoder()
_plans: msgspec.json.Decoder[WindowPlan] = msgspec.json.Decoder(WindowPlan)
_requests: msgspec.json.Decoder[WindowRequest] = msgspec.json.Decoder(WindowRequest)


def encode_plan(plan: WindowPlan) -> bytes:
    """The plan as JSON."""
    return _encoder.encode(plan)


def decode_plan(content: bytes) -> WindowPlan:
    """A plan. Raises ValueError if it is damaged, out of range or of another layout."""
    return decoded(content, _plans, _VERSION, untrusted=True)


def write_request(folder: Path, request: WindowRequest) -> bool:
    """Ask the run whose record is in a folder; False if another request waits there. Raises OSError."""
    own = folder / f".{WINDOW_REQUEST}.{request.id}"
    write_whole(own, _encoder.encode(request))
    try:
        with suppress(OSError):  # there is a file, or the file system has no links
            (folder / WINDOW_REQUEST).hardlink_to(own)
            return True
        if _waiting_request(folder) is not None:
            return False
        own.replace(folder / WINDOW_REQUEST)  # what is there is no request of this user
        return True
    finally:
        own.unlink(missing_ok=True)


def withdraw_request(folder: Path, request: WindowRequest) -> None:
    """Take back a request that nobody has taken."""
    if _waiting_request(folder) == request:
        (folder / WINDOW_REQUEST).unlink(missing_ok=True)


def _waiting_request(folder: Path) -> WindowRequest | None:
    try:
        return decoded(_own(folder / WINDOW_REQUEST), _requests, _VERSION, untrusted=True)
    except (OSError, ValueError):
        return None


def take_request(folder: Path) -> WindowRequest | None:
    """The request in the folder, if this user has made one, which is then gone from it; None for none."""
    path = folder / WINDOW_REQUEST
    try:
        content = _own(path)
        path.unlink()
        return decoded(content, _requests, _VERSION, untrusted=True)
    except (OSError, ValueError):
        return None


def write_plan(folder: Path, plan: WindowPlan) -> None:
    """Leave a plan for those who asked, and for ranks that no store reaches. Raises OSError."""
    write_whole(folder / WINDOW_PLAN, encode_plan(plan))


def read_plan(folder: Path) -> WindowPlan | None:
    """The latest plan of the run whose record is in a folder; None if there is none, or it is another user's."""
    try:
        return decode_plan(_own(folder / WINDOW_PLAN))
    except (OSError, ValueError):
        return None


def _own(path: Path) -> bytes:
    """The content of a file that belongs to the owner of its folder. Raises OSError."""
    return read_regular(path, _MOST_BYTES, owners={path.parent.lstat().st_uid})
