"""Timing one function well."""

from lightning_forge_profiling.bench.result import compare_benchmarks

__all__ = ["compare_benchmarks"]
