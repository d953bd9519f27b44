from .config import ProfilingConfig as ProfilingConfig
from .session import build_profiler as build_profiler
from .summary import print_profiler_summary as print_profiler_summary
