"""Times an operation at one size: on the CPU, or in one of the ways to run it on the GPU."""

from collections.abc import Callable
from datetime import datetime
from functools import partial
from itertools import repeat
from time import perf_counter_ns
from typing import Any, Final

import torch

from lightning_forge_profiling.bench.benchmark import benchmark
from lightning_forge_profiling.bench.methods import calls_for
from lightning_forge_profiling.bench.result import BenchmarkResult, median_interval
from lightning_forge_profiling.crossover.curves import Point, Setting, Way
from lightning_forge_profiling.crossover.operations import DTYPES, OPERATIONS, Operation
from lightning_forge_profiling.flops.precision import tf32_allowed
from lightning_forge_profiling.host import free_memory_bytes, processor_name

_MIN_TIME_S: Final = 0.02
_MAX_NOISE: Final = 0.02  # as much as the plot can show, where sizes double
_LONG_CALL: Final = 0.1  # of the time for a point; one such call is warm-up enough
_BURST_US: Final = 4000.0  # one synchronization, some 10 µs, is then well under 1 %
_MOST_IN_BURST: Final = 200  # a few kernels each; the launch queue holds about 1000
_MEMORY_FACTOR: Final = 2  # of the tensors: libraries take workspace, and a copy needs room beside the original


class OperationTimer:
    """Times operations for `measure`."""

    def __init__(self, dtype: str, gpu: torch.device | None, max_time_s: float) -> None:
        self._dtype = DTYPES[dtype]
        self._gpu = gpu
        self._max_time_s = max_time_s
        self._made_for: tuple[str, int] | None = None
        self._on_cpu: tuple[torch.Tensor, ...] = ()
        self._on_gpu: tuple[torch.Tensor, ...] = ()

    def __call__(self, name: str, size: int, way: Way, expected_us: float | None) -> Point | str:
        """Time an operation at one size, in one way."""
        operation = OPERATIONS[name]
        needed = _MEMORY_FACTOR * operation.bytes(size, self._dtype)
        if self._made_for != (name, size):
            self._made_for, self._on_cpu, self._on_gpu = (name, size), (), ()
        if not self._on_cpu:
            free = free_memory_bytes()
            if free is not None and needed > free:
                return f"it needs about {_gib(needed)}, and {_gib(free)} of memory are free"
        if way != "cpu" and not self._on_gpu:
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(self._gpu)
            if needed > free:
                return f"it needs about {_gib(needed)}, and {_gib(free)} of the GPU's memory are free"
        try:
            return self._time(operation, size, way, expected_us)
        except (RuntimeError, MemoryError) as error:  # out of memory, or not implemented for this type
            self._made_for = None
            return (str(error).strip() or type(error).__name__).split("\n")[0]

    def _time(self, operation: Operation, size: int, way: Way, expected_us: float | None) -> Point:
        self._on_cpu = self._on_cpu or operation.arguments(size, self._dtype)
        if way == "cpu":
            return _point(size, self._run(operation.call, self._on_cpu, "cpu", expected_us))
        self._on_gpu = self._on_gpu or tuple(tensor.to(self._gpu) for tensor in self._on_cpu)
        match way:
            case "stream":
                calls = calls_for(self._lone_us(operation.call), _MOST_IN_BURST, 1, _BURST_US)
                burst = partial(_burst, operation.call, calls)
                return _point(size, self._run(burst, self._on_gpu, "wall", expected_us), calls)
            case "copies":
                kept = self._on_gpu[len(self._on_gpu) - operation.parameters :]
                moved = self._on_cpu[: len(self._on_cpu) - operation.parameters]
                with_copies = partial(_with_copies, operation.call, kept, self._gpu)
                return _point(size, self._run(with_copies, moved, "wall", expected_us))
        return _point(size, self._run(operation.call, self._on_gpu, "wall", expected_us))

    def _run(
        self, fn: Callable[..., object], arguments: tuple[Any, ...], method: str, expected_us: float | None
    ) -> BenchmarkResult:
        long = expected_us is not None and expected_us / 1e6 > _LONG_CALL * self._max_time_s
        return benchmark(
            fn,
            *arguments,
            method=method,
            flush_l2=False,  # nor are the CPU's caches
            warmup=0 if long else None,
            min_time=min(_MIN_TIME_S, self._max_time_s),
            max_time=self._max_time_s,
            max_noise=_MAX_NOISE,
            device="cpu" if method == "cpu" else self._gpu,
            name="",
        )

    def _lone_us(self, call: Callable[..., torch.Tensor]) -> float:
        """About how long one call takes, with the wait for its end."""
        for _ in range(2):  # the first may load the kernel
            torch.cuda.synchronize(self._gpu)
            began = perf_counter_ns()
            call(*self._on_gpu)
            torch.cuda.synchronize(self._gpu)
            took_us = (perf_counter_ns() - began) / 1e3
        return took_us


def _burst(call: Callable[..., torch.Tensor], calls: int, *arguments: torch.Tensor) -> None:
    for _ in repeat(None, calls):
        call(*arguments)


def _with_copies(
    call: Callable[..., torch.Tensor],
    kept: tuple[torch.Tensor, ...],
    gpu: torch.device | None,
    *moved: torch.Tensor,
) -> torch.Tensor:
    return call(*(tensor.to(gpu) for tensor in moved), *kept).to("cpu")


def _point(size: int, result: BenchmarkResult, calls: int = 1) -> Point:
    """A result as a point; each call that was timed made `calls` calls."""
    low, high = median_interval(result.samples_us)
    return Point(
        size=size,
        us=result.median_us / calls,
        low_us=low / calls,
        high_us=high / calls,
        samples=len(result.samples_us),
        warnings=result.warnings,
    )


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB"


def find_gpu() -> torch.device | None:
    """The current CUDA or ROCm device; None if PyTorch sees none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def setting(dtype: str, gpu: torch.device | None) -> Setting:
    """Where and how the crossover is measured."""
    words = {True: "on", False: "off"}
    tf32 = tf32_allowed()
    platforms = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    on_gpu_in_float32 = gpu is not None and dtype == "float32"
    return Setting(
        date=datetime.now().astimezone().date().isoformat(),
        dtype=dtype,
        tf32=f"{words[tf32.products]} for products, {words[tf32.convolutions]} for convolutions"
        if on_gpu_in_float32
        else "",
        cpu=processor_name(),
        threads=torch.get_num_threads(),
        gpu="" if gpu is None else torch.cuda.get_device_name(gpu),
        torch=str(torch.__version__),
        platform=" ".join(f"{name} {version}" for name, version in platforms.items() if version),
    )
