"""What a DataLoader's workers take to hand a batch over, and to start and end: a dataset that makes nothing.

python -m benchmarks.handover
"""

from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

BATCHES = 3000
ROUNDS = 5


class Ready(Dataset[torch.Tensor]):
    """One tensor, which is there already."""

    def __init__(self, numbers: int) -> None:
        self._tensor = torch.zeros(numbers)

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._tensor


def batch_ms(loader: DataLoader[Any]) -> float:
    """Milliseconds a batch, the first left out."""
    batches = iter(loader)
    next(batches)
    began = perf_counter()
    count = sum(1 for _ in batches)
    return (perf_counter() - began) / count * 1e3


def start_ms(workers: int) -> float:
    """Milliseconds of a pass of four batches, whose workers start and end with it."""
    began = perf_counter()
    for _ in DataLoader([torch.zeros(16)] * 4, batch_size=None, num_workers=workers):
        pass
    return (perf_counter() - began) * 1e3


def main() -> None:
    """Print a line for each size of batch and number of workers: medians of rounds in turns."""
    for workers in (0, 1, 2, 4):
        print(
            f"{workers} workers: {median(start_ms(workers) for _ in range(ROUNDS)):.1f} ms for a pass of four batches"
        )
    loaders = {
        (numbers, workers): DataLoader(
            Ready(numbers), batch_size=None, num_workers=workers, persistent_workers=workers > 0
        )
        for numbers in (16, 100_000)
        for workers in (0, 1, 2)
    }
    times: dict[tuple[int, int], list[float]] = {which: [] for which in loaders}
    for _ in range(ROUNDS):
        for which, loader in loaders.items():
            times[which].append(batch_ms(loader))
    for (numbers, workers), found in times.items():
        print(f"{numbers:7,} floats a batch, {workers} workers: {median(found):.3f} ms a batch")


if __name__ == "__main__":
    main()
