"""First line of a run's record: what runs where, with which settings; and the folder shared by all ranks."""

import os
import platform
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, NamedTuple

import torch
from msgspec.structs import replace

from lightning_forge_profiling.callbacks import lightning_api
from lightning_forge_profiling.callbacks.lightning_api import Trainer
from lightning_forge_profiling.callbacks.loader import loader_settings
from lightning_forge_profiling.names import RECORD_FOLDER
from lightning_forge_profiling.plain_text import plain_logger
from lightning_forge_profiling.profiler.paths import numbered_folders
from lightning_forge_profiling.record.lines import Begin
from lightning_forge_profiling.record.origin import command_line, git_commit, record_of_checkpoint

_log = plain_logger(__name__)

_SETTINGS: Final = (
    "precision",
    "accumulate_grad_batches",
    "max_steps",
    "max_epochs",
    "log_every_n_steps",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "val_check_interval",
    "check_val_every_n_epoch",
    "limit_train_batches",
    "limit_val_batches",
    "reload_dataloaders_every_n_epochs",
    "num_nodes",
)
"""Attributes of the Trainer that are recorded."""


class RecordPlace(NamedTuple):
    """Folder and id of a run's record, the same on all ranks.

    Attributes:
        folder: folder of the record.
        run: id of the run.
        url: remote folder that it is copied to at the end; "" for none.
    """

    folder: Path
    run: str
    url: str = ""


def claim_place(trainer: Trainer) -> RecordPlace | None:
    """Create the folder of this run's record on rank 0 and broadcast it; None, with a warning, if that fails.

    This is a collective: call it on every rank.
    """
    run = lightning_api.run_folder(trainer)
    place = None
    if trainer.is_global_zero:
        try:
            folder = _new_folder(run.path.absolute() / RECORD_FOLDER)  # the working directory may change
            place = RecordPlace(folder, token_hex(8), (run / folder.name).url)
        except OSError as exc:
            _log.warning("This run will have no record: %s", exc)
    found: RecordPlace | None = trainer.strategy.broadcast(place)
    return found


def _new_folder(first: Path) -> Path:
    first.parent.mkdir(parents=True, exist_ok=True)
    for folder in numbered_folders(first):
        try:
            folder.mkdir(mode=0o775)
        except FileExistsError:
            continue
        return folder
    raise AssertionError  # numbered_folders is endless


def begin_line(trainer: Trainer, place: RecordPlace) -> Begin:
    """The first line of this rank's record, without what `with_origin` adds."""
    checkpoint = str(trainer.ckpt_path or "")
    return Begin(
        run=place.run,
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        at=time.time(),
        versions=_versions(),
        host=socket.gethostname(),
        device=lightning_api.device_name(trainer),
        settings=_settings(trainer),
        loader=loader_settings(trainer),
        argv=command_line(sys.argv),
        restored_from=checkpoint,
    )


def with_origin(begin: Begin, own: Path) -> Begin:
    """The first line with what files of others say, which may be on a disk that hangs: not for the training thread."""
    with suppress(Exception):  # such as a working directory that was removed
        begin = replace(begin, commit=git_commit(Path.cwd()))
    with suppress(Exception):
        continues = record_of_checkpoint(Path(begin.restored_from), but=own) if begin.restored_from else ""
        begin = replace(begin, continues=continues)
    return begin


def _versions() -> dict[str, str]:
    package = __name__.partition(".")[0]
    modules = ("torch", "lightning", "pytorch_lightning", "numpy", package)
    found = {name: str(vars(sys.modules[name]).get("__version__", "")) for name in modules if name in sys.modules}
    cuda = {"cuda": torch.version.cuda} if torch.version.cuda else {}
    return {"python": platform.python_version(), **found, **cuda}


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by the newer interface
        return str(torch.backends.cuda.matmul.fp32_precision)


def _settings(trainer: Trainer) -> dict[str, str | int | float | bool | None]:
    backend = os.environ.get("PL_TORCH_DISTRIBUTED_BACKEND") or getattr(trainer.strategy, "process_group_backend", None)
    settings: dict[str, Any] = {
        "accelerator": type(trainer.accelerator).__name__,
        "strategy": type(trainer.strategy).__name__,
        "devices": int(trainer.num_devices),
        "backend": backend,
        **{name: getattr(trainer, name, None) for name in _SETTINGS},
        "sync_batchnorm": bool(getattr(trainer.strategy, "_layer_sync", None)),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": _matmul_precision(),
        "module": type(trainer.lightning_module).__name__,
    }
    plain = (str, int, float, bool, type(None))
    return {name: value if isinstance(value, plain) else str(value) for name, value in settings.items()}
