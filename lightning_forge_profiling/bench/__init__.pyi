from .comparison import compare_benchmarks as compare_benchmarks
