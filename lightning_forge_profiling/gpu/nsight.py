"""Ranges for the timeline of NVIDIA Nsight Systems, where it records this process."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

_RECORDS: Final = "NSYS_PROFILING_SESSION_ID"  # which `nsys` sets in what it starts


def nsight_ranges(environment: Mapping[str, str]) -> Callable[[str], AbstractContextManager[Any]] | None:
    """What makes an NVTX range of a name; None unless `nsys` has started this process, on a machine with a GPU.

    Examples:
        >>> nsight_ranges({}) is None
        True
    """
    if _RECORDS not in environment or not torch.cuda.is_available():
        return None
    make: Callable[[str], AbstractContextManager[Any]] = torch.cuda.nvtx.range
    return make
