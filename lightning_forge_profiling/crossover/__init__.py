"""From which size on an operation is faster on the GPU than on the CPU. Nothing else needs this room."""

from lightning_forge_profiling.crossover.json_file import read_crossover

__all__ = ["read_crossover"]
