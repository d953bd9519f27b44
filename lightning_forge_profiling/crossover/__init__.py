"""The size from which an operation is faster on the GPU than on the CPU. No other room needs this one."""

from lightning_forge_profiling.crossover.curves import read_crossover

__all__ = ["read_crossover"]
