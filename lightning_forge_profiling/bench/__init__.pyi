from .result import compare_benchmarks as compare_benchmarks
