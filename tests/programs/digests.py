"""What each program ends with: a line that differs where any bit of its result does."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np


def print_digest(results: Mapping[str, Any]) -> None:
    """Print one digest of arrays or tensors, by name."""
    digest = hashlib.sha256()
    for name, values in sorted(results.items()):
        array = np.ascontiguousarray(values)
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    print("digest", digest.hexdigest())
