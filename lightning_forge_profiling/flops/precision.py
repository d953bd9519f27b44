"""Number formats of matrix products: a module's own, and the rate that a device reaches now in each: `measure_peak`."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from numbers import Real
from statistics import median
from time import perf_counter
from typing import Final, NamedTuple

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from lightning_forge_profiling.errors import ConfigurationError

_TF32_SINCE: Final = (8, 0)  # the first compute capability with TF32: Ampere

_NAMES: Final = {
    "float64": "fp64",
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "int8": "int8",
}


def dtype_name(dtype: torch.dtype | str) -> str | None:
    """The name of a type in the table of peaks."""
    return _NAMES.get(str(dtype).removeprefix("torch."))


def parameter_dtype(module: nn.Module) -> str:
    """The type of most of a module's floating-point parameters, by number of elements; `fp32` without any."""
    elements: Counter[str] = Counter()
    for parameter in module.parameters():
        name = dtype_name(parameter.dtype)
        if name is not None and parameter.is_floating_point():
            elements[name] += parameter.numel()
    return elements.most_common(1)[0][0] if elements else "fp32"


def has_tf32(device: torch.device) -> bool:
    """Whether a device can compute fp32 products as TF32."""
    if device.type != "cuda" or torch.version.hip is not None:  # ROCm has no such switch that works by itself
        return False
    return torch.cuda.get_device_capability(device) >= _TF32_SINCE


def fp32_runs_as_tf32(module: nn.Module) -> bool:
    """Whether PyTorch lets a GPU that `has_tf32` compute this module's fp32 products in it."""
    # The defaults differ: cuDNN allows TF32, matrix products do not. Then most of the module's layers decide; a
    # recurrent one has two products, of its input and of its state, in each direction.
    allowed = tf32_allowed()
    products: Counter[bool] = Counter()
    for part in module.modules():
        if isinstance(part, _ConvNd):
            products[allowed.convolutions] += 1
        elif isinstance(part, nn.RNNBase):
            products[allowed.recurrent] += 2 * part.num_layers * (1 + part.bidirectional)
        elif isinstance(part, nn.Linear):
            products[allowed.products] += 1
    return allowed.products if products[True] == products[False] else products[True] > products[False]


class Tf32Allowed(NamedTuple):
    """Which layers PyTorch lets a GPU compute in TF32."""

    products: bool
    convolutions: bool
    recurrent: bool


def tf32_allowed() -> Tf32Allowed:
    """PyTorch's current settings."""
    # readable whichever of PyTorch's two interfaces has set it; `allow_tf32` may raise
    return Tf32Allowed(
        products=bool(torch.backends.cuda.matmul.fp32_precision == "tf32"),
        convolutions=bool(torch.backends.cudnn.conv.fp32_precision == "tf32"),  # type: ignore[attr-defined]
        recurrent=bool(torch.backends.cudnn.rnn.fp32_precision == "tf32"),  # type: ignore[attr-defined]
    )


_DTYPES: Final = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp64": torch.float64,
}
# Of square products. Smaller ones do not fill a GPU; the largest draws the most power, and is not always the fastest.
_SIZES: Final = {"cuda": (4096, 8192, 16384), "cpu": (512, 1024)}
_GROUPS: Final = 10  # of products back to back; the median is over all but the first
_FEWEST_GROUPS: Final = 3  # if a single product takes longer than the given time


@dataclass(frozen=True, slots=True)
class MeasuredPeak:
    """The measured peak rate of a device.

    Attributes:
        device: name of the device.
        dtype: type of the operands: `bf16`, `fp16`, `fp32`, `tf32` or `fp64`.
        tflops: 10¹² operations per second in the fastest shape; a multiply-add is two.
        shape: that shape: rows, inner size and columns.
        clock_mhz: SM clock during the measurement; None on a CPU and without `nvidia-ml-py`.
    """

    device: str
    dtype: str
    tflops: float
    shape: tuple[int, int, int]
    clock_mhz: int | None

    @property
    def flops(self) -> float:
        """Operations per second, for `ThroughputCallback(peak_flops=...)`."""
        return self.tflops * 1e12

    def __str__(self) -> str:
        clock = "" if self.clock_mhz is None else f" at {self.clock_mhz} MHz"
        return f"{self.tflops:,.4g} TFLOP/s {self.dtype} on {self.device}{clock} ({'x'.join(map(str, self.shape))})"


def measure_peak(
    dtype: str | torch.dtype = "bf16", *, device: torch.device | str | int | None = None, seconds: float = 1.0
) -> MeasuredPeak:
    """Measure the fastest matrix product of an otherwise idle device.

    Products of random numbers run back to back, so that the GPU never waits for the host. The rate of a shape is the
    median over groups of equal length; the fastest shape's is returned. The numbers are random because a GPU multiplies
    zeros with less power, and so at a higher clock than in training. The L2 cache is neither warmed nor flushed. Random
    number generators and settings stay unchanged.

    Args:
        dtype: `bf16`, `fp16`, `fp32` (without TF32), `tf32` or `fp64`, or a `torch.dtype`.
        device: a GPU or the CPU; None takes the current GPU, or the CPU without one.
        seconds: time to measure over all shapes, without warm-up; longer if three products of the smallest shape take
            longer. A GPU at its power or temperature limit is slower after some seconds.

    Returns:
        The rate, its shape and the clock.

    Raises:
        ConfigurationError: the type or device cannot be measured, or `seconds` is not positive.

    Examples:
        >>> peak = measure_peak("fp32", device="cpu", seconds=0.05)
        >>> peak.flops > 1e9
        True
    """
    dtype = dtype_name(dtype) or str(dtype)
    if dtype not in _DTYPES:
        raise ConfigurationError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}.")
    if not isinstance(seconds, Real) or isinstance(seconds, bool) or not 0 < seconds < float("inf"):
        raise ConfigurationError(f"seconds must be a number above 0, got {seconds!r}.")
    where = _device(device)
    if where.type not in _SIZES:
        raise ConfigurationError(f"Only a GPU or the CPU can be measured, not {where}.")
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu"
    if dtype == "tf32" and not has_tf32(where):
        raise ConfigurationError(f"{name} has no TF32; measure fp32.")
    sizes = _SIZES[where.type]
    best: MeasuredPeak | None = None
    with _fp32_precision("tf32" if dtype == "tf32" else "ieee"), torch.inference_mode():
        for size in sizes:
            try:
                group_s, clock_mhz = _measure(size, _DTYPES[dtype], where, seconds / len(sizes))
            except torch.OutOfMemoryError:
                break
            tflops = 2 * size**3 / group_s / 1e12
            if best is None or tflops > best.tflops:
                best = MeasuredPeak(name, dtype, tflops, (size, size, size), clock_mhz)
            if group_s * 2**3 > seconds:  # the next size
                break
    if best is None:
        raise ConfigurationError(f"{name} has no memory free for a product of {sizes[0]}x{sizes[0]}.")
    return best


def _device(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        where = torch.device(device)
    except RuntimeError as exc:
        raise ConfigurationError(f"device must be one that PyTorch knows, got {device!r}.") from exc
    if where.type == "cuda" and (not torch.cuda.is_available() or (where.index or 0) >= torch.cuda.device_count()):
        raise ConfigurationError(f"There is no {where} here: PyTorch sees {torch.cuda.device_count()} CUDA devices.")
    return where


@contextmanager
def _fp32_precision(wanted: str) -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    # the value may be inherited from the setting for all of PyTorch, and has to stay inherited
    inherited = before == torch.backends.fp32_precision  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.fp32_precision = wanted
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none" if inherited else before


def _measure(size: int, dtype: torch.dtype, device: torch.device, seconds: float) -> tuple[float, int | None]:
    """Seconds per product, and the SM clock meanwhile."""
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    result = torch.empty_like(left)

    def product() -> None:
        torch.mm(left, right, out=result)

    product()  # the library chooses its kernel
    [once], _ = _time_groups(product, 1, 3 if device.type == "cuda" else 1, device)
    groups = min(_GROUPS, max(_FEWEST_GROUPS, int(seconds / once)))
    times, clock_mhz = _time_groups(product, groups, max(1, ceil(seconds / groups / once)), device)
    return median(times[1:]), clock_mhz


def _time_groups(
    product: Callable[[], None], groups: int, calls: int, device: torch.device
) -> tuple[list[float], int | None]:
    """Seconds per product in each group, on a GPU by events on its timeline, and the SM clock meanwhile."""
    if device.type == "cpu":
        ends = [perf_counter()]
        for _ in range(groups):
            for _ in range(calls):
                product()
            ends.append(perf_counter())
        return [(end - start) / calls for start, end in pairwise(ends)], None
    with torch.cuda.device(device):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(groups + 1)]  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        marks[0].record()
        for mark in marks[1:]:
            for _ in range(calls):
                product()
            mark.record()
        marks[groups // 2].synchronize()  # the other half is queued: the GPU stays busy
        clock_mhz = None
        with suppress(Exception):  # nvidia-ml-py or a permission is missing
            clock_mhz = torch.cuda.clock_rate(device)
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 / calls for a, b in pairwise(marks)], clock_mhz
