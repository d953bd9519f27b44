"""The types that the public functions return, for annotations: `Interval`, `TraceReport`, `AnalysisResult`, ...

`Analysis` is at the top of the package.
"""

from lightning_forge_profiling.bench.result import BenchmarkResult, Comparison
from lightning_forge_profiling.flops.count import FlopCount
from lightning_forge_profiling.pipeline import AnalysisResult
from lightning_forge_profiling.profiler.session import TraceSession
from lightning_forge_profiling.report.page import ReportPaths
from lightning_forge_profiling.schema import Finding, TraceReport
from lightning_forge_profiling.schema import RunLedger as Ledger
from lightning_forge_profiling.timing.steps import Interval

__all__ = [
    "AnalysisResult",
    "BenchmarkResult",
    "Comparison",
    "Finding",
    "FlopCount",
    "Interval",
    "Ledger",
    "ReportPaths",
    "TraceReport",
    "TraceSession",
]
