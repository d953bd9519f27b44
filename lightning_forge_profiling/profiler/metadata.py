"""The metadata in the header of a trace: rank, world size, recorded steps, cores."""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Final

import torch

from lightning_forge_profiling.names import METADATA_KEY
from lightning_forge_profiling.profiler.window import StepWindow

_INSTALLED: Final = re.compile(r".*[/\\](?:site|dist)-packages[/\\]", re.DOTALL)


def installed_packages() -> list[str]:
    """Names of the imported packages that are installed, to distinguish their functions from the user's in stacks."""
    files = {
        name: vars(module).get("__file__")
        for name, module in list(sys.modules.items())
        if name.isidentifier() and not name.startswith("__") and isinstance(module, ModuleType)
    }
    return sorted(name for name, file in files.items() if isinstance(file, str) and _INSTALLED.match(file))


def trace_metadata(
    rank: int, world_size: int, window: StepWindow, steps: Sequence[int], more: Mapping[str, object]
) -> dict[str, str]:
    """The metadata to add to a trace."""
    about = {
        "rank": rank,
        "world_size": world_size,
        "intra_op_threads": torch.get_num_threads(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "start_step": window.start_step,
        "end_step": window.end_step,
        "recorded_steps": list(steps),
        **more,
    }
    metadata = {METADATA_KEY: json.dumps(about)}
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        # PyTorch writes it for distributed runs only. json.dumps puts the space that HTA's '"rank": N' needs.
        metadata["distributedInfo"] = json.dumps({"backend": "none", "rank": rank, "world_size": world_size})
    return metadata
