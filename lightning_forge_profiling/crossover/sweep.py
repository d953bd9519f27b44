"""Timing operations over sizes, and ending each curve before a call takes too long.

`measure` runs no operation itself: it is given a function that times one, such as an `OperationTimer`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import repeat
from math import prod
from time import perf_counter_ns
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.nn import functional as F

from lightning_forge_profiling.bench.benchmark import Options, time_on
from lightning_forge_profiling.bench.call import TimedCall
from lightning_forge_profiling.bench.device import first_line
from lightning_forge_profiling.bench.methods import calls_for
from lightning_forge_profiling.bench.result import BenchmarkResult, in_unit
from lightning_forge_profiling.crossover.curves import Curve, OperationCurves, Point, Setting, Way
from lightning_forge_profiling.flops.precision import tf32_allowed
from lightning_forge_profiling.host import free_memory_bytes, processor_name

_CHANNELS: Final = 16
_SEED: Final = 0


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation whose work depends on one size."""

    meaning: str  # what it computes at size n
    call: Callable[..., torch.Tensor]  # takes tensors and returns a new one, in eager mode, forward only
    shapes: Callable[[int], tuple[tuple[int, ...], ...]]  # of its tensors at a size; the result is the last one
    exponent: int  # the power of the size with which its arithmetic or its tensors grow, whichever is higher
    parameters: int = 0  # this many of its last arguments stay on the GPU when the others are copied

    def arguments(self, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Its arguments, on the CPU: normal random numbers, the same each time."""
        # Constants would not do: a GPU's power draw, and with it its clock, depends on how many bits flip.
        generator = torch.Generator().manual_seed(_SEED)
        return tuple(torch.randn(shape, generator=generator, dtype=dtype) for shape in self.shapes(size)[:-1])

    def bytes(self, size: int, dtype: torch.dtype) -> int:
        """The size of its tensors in bytes, the result included."""
        return sum(prod(shape) for shape in self.shapes(size)) * dtype.itemsize


OPERATIONS: Final = MappingProxyType(
    {
        "matmul": Operation("product of two n by n matrices", torch.matmul, lambda n: ((n, n),) * 3, exponent=3),
        "add": Operation("sum of two n by n matrices", torch.add, lambda n: ((n, n),) * 3, exponent=2),
        "softmax": Operation(
            "softmax of each row of an n by n matrix",
            partial(torch.softmax, dim=-1),
            lambda n: ((n, n),) * 2,
            exponent=2,
        ),
        "layernorm": Operation(
            "layer norm of each row of an n by n matrix",
            lambda rows, weight, bias: F.layer_norm(rows, weight.shape, weight, bias),
            lambda n: ((n, n), (n,), (n,), (n, n)),
            exponent=2,
            parameters=2,
        ),
        "conv2d": Operation(
            f"3 by 3 convolution of one n by n image, {_CHANNELS} channels to {_CHANNELS}",
            partial(F.conv2d, padding=1),
            lambda n: ((1, _CHANNELS, n, n), (_CHANNELS, _CHANNELS, 3, 3), (1, _CHANNELS, n, n)),
            exponent=2,
            parameters=1,
        ),
    }
)
"""The operations of `--ops`."""


_MIN_TIME_S: Final = 0.02
_MAX_NOISE: Final = 0.02  # little where sizes double
_LONG_CALL: Final = 0.1  # of the time for a point; one such call is warm-up enough
_BURST_US: Final = 4000.0  # one synchronization, some 10 µs, is then well under 1 %
_MOST_IN_BURST: Final = 200  # a few kernels each; the launch queue holds about 1000
_MEMORY_FACTOR: Final = 2  # of the tensors: libraries take workspace, and a copy needs room beside the original


class OperationTimer:
    """Times operations for `measure`."""

    def __init__(self, dtype: str, gpu: torch.device | None, max_time_s: float) -> None:
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._gpu = gpu
        self._max_time_s = max_time_s
        self._made_for: tuple[str, int] | None = None
        self._on_cpu: tuple[torch.Tensor, ...] = ()
        self._on_gpu: tuple[torch.Tensor, ...] = ()

    def __call__(self, name: str, size: int, way: Way, expected_us: float | None) -> Point | str:
        """Time an operation at one size, in one way."""
        operation = OPERATIONS[name]
        if self._made_for != (name, size):
            self._made_for, self._on_cpu, self._on_gpu = (name, size), (), ()
        needed, free = _MEMORY_FACTOR * operation.bytes(size, self._dtype), free_memory_bytes()
        if not self._on_cpu and free is not None and needed > free:  # the GPU's allocator says so itself
            return f"it needs about {_gib(needed)}, and {_gib(free)} of memory are free"
        try:
            return self._time(operation, size, way, expected_us)
        except (RuntimeError, MemoryError) as error:  # out of memory, or not implemented for this type
            self._made_for = None
            return first_line(error)

    def _time(self, operation: Operation, size: int, way: Way, expected_us: float | None) -> Point:
        self._on_cpu = self._on_cpu or operation.arguments(size, self._dtype)
        if way == "cpu":
            return Point.of(size, self._run(operation.call, self._on_cpu, "cpu", expected_us))
        self._on_gpu = self._on_gpu or tuple(tensor.to(self._gpu) for tensor in self._on_cpu)
        fn: Callable[..., object] = operation.call
        arguments, calls = self._on_gpu, 1
        if way == "stream":
            calls = calls_for(self._lone_us(operation.call), _MOST_IN_BURST, _BURST_US)
            fn = partial(_burst, operation.call, calls)
        elif way == "copies":
            moved = len(arguments) - operation.parameters
            fn = partial(_with_copies, operation.call, arguments[moved:], self._gpu)
            arguments = self._on_cpu[:moved]
        return Point.of(size, self._run(fn, arguments, "wall", expected_us), calls)

    def _run(
        self, fn: Callable[..., object], arguments: tuple[Any, ...], method: str, expected_us: float | None
    ) -> BenchmarkResult:
        long = expected_us is not None and expected_us / 1e6 > _LONG_CALL * self._max_time_s
        options = Options(
            method=method,
            flush_l2=False,  # nor are the CPU's caches
            max_time=self._max_time_s,
            min_time=_MIN_TIME_S,
            max_noise=_MAX_NOISE,
            one_call_warms_up=long,
        )
        return time_on("cpu" if method == "cpu" else self._gpu, TimedCall(fn, arguments, name=""), options)

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


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB"


def find_gpu() -> torch.device | None:
    """The current CUDA or ROCm device; None if PyTorch sees none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def setting(dtype: str, gpu: torch.device | None) -> Setting:
    """Where and how the crossover is measured."""
    tf32 = ""
    if gpu is not None and dtype == "float32":
        products, convolutions = ("on" if allowed else "off" for allowed in tf32_allowed()[:2])
        tf32 = f"{products} for products, {convolutions} for convolutions"
    platforms = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    return Setting(
        date=datetime.now().astimezone().date().isoformat(),
        dtype=dtype,
        tf32=tf32,
        cpu=processor_name(),
        threads=torch.get_num_threads(),
        gpu="" if gpu is None else torch.cuda.get_device_name(gpu),
        torch=str(torch.__version__),
        platform=" ".join(f"{name} {version}" for name, version in platforms.items() if version),
    )


def measure(
    operations: Mapping[str, Operation],
    sizes: Sequence[int],
    ways: Sequence[Way],
    time: Callable[[str, int, Way, float | None], Point | str],
    *,
    longest_us: float,
    progress: Callable[[str, int], None] = lambda _name, _size: None,
) -> tuple[OperationCurves, ...]:
    """Time operations over sizes.

    `time` is given an operation's name, a size, a way and about how many microseconds a call will take (None if
    unknown). It returns the point, or why there is none at this size and at larger ones.
    """
    operation_curves = []
    for name, operation in operations.items():
        points: dict[Way, list[Point]] = {way: [] for way in ways}
        ended: dict[Way, str] = {}
        for size in sizes:
            progress(name, size)
            for way in ways:
                if way in ended:
                    continue
                expected_us = predicted_us(points[way], size, operation.exponent)
                most_us = max([longest_us, *(point.us for point in points.get("cpu", ()) if point.size == size)])
                if too_long := _too_long(points[way], size, expected_us, most_us):
                    ended[way] = too_long
                    continue
                timed = time(name, size, way, expected_us)
                if isinstance(timed, str):
                    ended[way] = f"{size}: {timed}"
                else:
                    points[way].append(timed)
        curves = [Curve(way=way, points=tuple(points[way]), ended=ended.get(way, "")) for way in ways]
        operation_curves.append(OperationCurves(name=name, meaning=operation.meaning, curves=tuple(curves)))
    return tuple(operation_curves)


def _too_long(points: Sequence[Point], size: int, expected_us: float | None, most_us: float) -> str:
    """Why a call of that size takes too long; "" if it does not, or if that is unknown."""
    if points and points[-1].us > most_us:
        return f"a call at {points[-1].size} took {in_unit(points[-1].us)}"
    if expected_us is not None and expected_us > most_us:
        return f"a call at {size} would take about {in_unit(expected_us)}"
    return ""


def predicted_us(points: Sequence[Point], size: int, exponent: int) -> float | None:
    """How long a call of a larger size will take: on the line through the last two points on logarithmic axes."""
    # No steeper than the work grows: noise or the end of a cache between two points makes the line too steep.
    if len(points) < 2:  # noqa: PLR2004  (points of a line)
        return None
    first, last = points[-2:]
    slope = math.log(last.us / first.us) / math.log(last.size / first.size)
    return last.us * float((size / last.size) ** min(max(slope, 0.0), exponent))
