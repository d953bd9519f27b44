"""Where every millisecond of a PyTorch Lightning run went, at no measurable cost.

```python
import lightning as L
from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback

trainer = L.Trainer(callbacks=[ForgeProfilerCallback(start_step=5, end_step=8), ThroughputCallback()])
```

Names are imported when they are first used: `import lightning_forge_profiling` alone loads neither torch nor Lightning.
Exceptions are in `errors`, and the types that functions return in `result_types`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_forge_profiling.bench.benchmark import benchmark
    from lightning_forge_profiling.bench.comparison import compare_benchmarks
    from lightning_forge_profiling.bench.result import BenchmarkResult
    from lightning_forge_profiling.callbacks.forge_profiler import ForgeProfilerCallback
    from lightning_forge_profiling.callbacks.throughput import ThroughputCallback
    from lightning_forge_profiling.compat import SynchronizedWallClockTimer, ThroughputTimer, print_rank_0
    from lightning_forge_profiling.errors import ForgeProfilingError
    from lightning_forge_profiling.flops.count import count_flops
    from lightning_forge_profiling.flops.measured_peak import measure_peak
    from lightning_forge_profiling.gpu.clocks import locked_clocks
    from lightning_forge_profiling.pipeline import analyze
    from lightning_forge_profiling.profiler.config import ProfilingConfig
    from lightning_forge_profiling.profiler.session import build_profiler
    from lightning_forge_profiling.profiler.summary import print_profiler_summary
    from lightning_forge_profiling.report.files import write_reports
    from lightning_forge_profiling.results.analysis import Analysis, Finding
    from lightning_forge_profiling.timing.collection import CUDATimer, CUDATimerCollection
    from lightning_forge_profiling.timing.region import region

__version__ = "0.1.0"

_HOMES = {
    "Analysis": "results.analysis",
    "BenchmarkResult": "bench.result",
    "CUDATimer": "timing.collection",
    "CUDATimerCollection": "timing.collection",
    "Finding": "results.analysis",
    "ForgeProfilerCallback": "callbacks.forge_profiler",
    "ForgeProfilingError": "errors",
    "ProfilingConfig": "profiler.config",
    "SynchronizedWallClockTimer": "compat",
    "ThroughputCallback": "callbacks.throughput",
    "ThroughputTimer": "compat",
    "analyze": "pipeline",
    "benchmark": "bench.benchmark",
    "build_profiler": "profiler.session",
    "compare_benchmarks": "bench.comparison",
    "count_flops": "flops.count",
    "locked_clocks": "gpu.clocks",
    "measure_peak": "flops.measured_peak",
    "print_profiler_summary": "profiler.summary",
    "print_rank_0": "compat",
    "region": "timing.region",
    "write_reports": "report.files",
}

_SHOWN_IN_NOTEBOOKS = frozenset({"Analysis", "ForgeProfilerCallback", "ThroughputCallback", "analyze"})
"""Whoever uses one of these gets an analysis or a ledger, which a notebook shows by what `report` makes of it."""

__all__ = [
    "Analysis",
    "BenchmarkResult",
    "CUDATimer",
    "CUDATimerCollection",
    "Finding",
    "ForgeProfilerCallback",
    "ForgeProfilingError",
    "ProfilingConfig",
    "SynchronizedWallClockTimer",
    "ThroughputCallback",
    "ThroughputTimer",
    "analyze",
    "benchmark",
    "build_profiler",
    "compare_benchmarks",
    "count_flops",
    "locked_clocks",
    "measure_peak",
    "print_profiler_summary",
    "print_rank_0",
    "region",
    "write_reports",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in _SHOWN_IN_NOTEBOOKS:
        import_module(f"{__name__}.report.notebook")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
