"""A CUDA device, as far as timing needs it, and what a call does there."""

import json
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any, Final, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_forge_profiling.bench.call import TimedCall
from lightning_forge_profiling.errors import ForgeProfilingError
from lightning_forge_profiling.safe_files import read_regular
from lightning_forge_profiling.timing.events import DeviceEventSource, Event

_L2_UNKNOWN: Final = 128 * 2**20  # more than any L2 cache on the market, for a driver that does not report its size
_WARM_UP_CALLS: Final = 3  # on the capturing stream, as PyTorch's notes on CUDA graphs ask

# Graphs that PyTorch's allocator of pinned memory may still read during a later capture, so they are kept alive.
_BROKEN_OFF: Final[list[torch.cuda.CUDAGraph]] = []

_CALIBRATION_CYCLES: Final = 1_000_000  # half a millisecond at 2 GHz
_EMPTY_PAIRS: Final = 31
_EMPTY_AHEAD_US: Final = 50.0  # a record takes the host 1.4 us (H200, torch 2.11)


class CaptureError(ForgeProfilingError):
    """CUDA aborted the graph capture."""


@dataclass(frozen=True, slots=True)
class MemoryCounts:
    """The caching allocator's counts so far."""

    in_use_bytes: int  # held by tensors now
    allocated_bytes: int  # since the start of the process, freed or not
    cuda_mallocs: int  # how often it asked the driver for memory (cudaMalloc and similar)


class CudaDevice:
    """One CUDA device. Its methods act on the current stream."""

    def __init__(self, device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self.device = device
        self.name = f"{properties.name} ({device})"
        self.uuid = str(properties.uuid)
        self.new_event: Callable[[], Event] = DeviceEventSource(device).new_event
        self._l2_bytes = properties.L2_cache_size or _L2_UNKNOWN
        self._flush_buffer: torch.Tensor | None = None

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        torch.cuda.synchronize(self.device)

    def sleep(self, cycles: int) -> None:
        """Keep the stream busy for a number of cycles of the SM clock, without touching memory."""
        spin: Callable[[int], None] = torch.cuda._sleep  # noqa: SLF001  (no public way; PyTorch's own tests use it)
        spin(cycles)

    def flush_l2(self) -> None:
        """Overwrite a buffer twice the size of the L2 cache, so that none of the function's data stays in it."""
        if self._flush_buffer is None:
            self._flush_buffer = torch.empty(2 * self._l2_bytes, dtype=torch.int8, device=self.device)
        self._flush_buffer.zero_()

    def capture(self, calls: Callable[[int], None], count: int) -> Callable[[], None]:
        """Capture calls into a CUDA graph, on a separate stream."""
        new_stream: Callable[[torch.device], Any] = torch.cuda.Stream  # untyped in PyTorch
        side, current = new_stream(self.device), torch.cuda.current_stream(self.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            calls(_WARM_UP_CALLS)
        current.wait_stream(side)
        self.synchronize()
        torch.cuda.empty_cache()  # during a capture the allocator cannot return its cached memory
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        with torch.cuda.stream(side):
            try:
                # other threads (a data loader's, say) may go on calling CUDA meanwhile
                graph.capture_begin(pool, capture_error_mode="thread_local")
                calls(count)
            except BaseException as error:
                self._end_capture(graph, pool, error)
                raise
            self._end_capture(graph, pool)
        replay: Callable[[], None] = graph.replay
        return replay

    def _end_capture(
        self, graph: torch.cuda.CUDAGraph, pool: tuple[int, int], raised: BaseException | None = None
    ) -> None:
        """End a capture. If CUDA has broken it off, clean up what PyTorch leaves behind."""
        try:
            graph.capture_end()
        except RuntimeError as error:
            # Raised before it notifies the caching allocator, which would never release memory again, and the random
            # number generator, which would refuse every call: CUDAGraph::capture_end and
            # CUDAGeneratorState::increase in PyTorch's aten/src/ATen/cuda.
            _BROKEN_OFF.append(graph)
            for undo in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):  # noqa: SLF001  (no public way)
                with suppress(RuntimeError):  # a PyTorch that has done it itself
                    undo(self.device.index, pool)
            orderly = torch.cuda.CUDAGraph()  # its end also ends the capture for the generator
            orderly.capture_begin(capture_error_mode="thread_local")
            self.sleep(1)
            orderly.capture_end()
            cause = raised or error
            if isinstance(cause, RuntimeError):  # other errors are the function's own
                raise CaptureError(f"CUDA aborted the graph capture: {first_line(cause)}") from cause

    def trace(self, run: Callable[[], object]) -> list[dict[str, Any]]:
        """Run a function under the profiler."""
        # There is no public way to ask. The first covers this thread, the second profilers started by Python in any.
        if torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled:  # noqa: SLF001
            raise ForgeProfilingError("another torch profiler is active in this process")
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
            run()
            self.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            text = read_regular(path, 1 << 32).decode(errors="replace")
        events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
        return events

    def mark(self, name: str) -> AbstractContextManager[object]:
        """A named span in the trace."""
        return record_function(name)

    def memory(self) -> MemoryCounts:
        """The allocator's counts so far."""
        stats = torch.cuda.memory_stats(self.device)
        return MemoryCounts(
            in_use_bytes=stats.get("allocated_bytes.all.current", 0),
            allocated_bytes=stats.get("allocated_bytes.all.allocated", 0),
            cuda_mallocs=stats.get("num_device_alloc", 0),
        )


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error).strip() or type(error).__name__).split("\n")[0]


class EventTiming(NamedTuple):
    """What one pair of events shows."""

    us: float
    saturated: bool  # both were queued before the GPU reached the first: it never waited for the host


class EventTimer:
    """Times work on the current stream by two events."""

    def __init__(self, gpu: CudaDevice, clock_ns: Callable[[], int] = perf_counter_ns) -> None:
        self.gpu = gpu
        self.clock_ns = clock_ns
        self._start, self._end = gpu.new_event(), gpu.new_event()
        self._cycles_per_us = 2000.0
        for _ in range(2):  # the first may find a sleeping GPU
            us = self.between(lambda: gpu.sleep(_CALIBRATION_CYCLES)).us
            self._cycles_per_us = _CALIBRATION_CYCLES / us if us > 0 else self._cycles_per_us
        # the time between two events with nothing between them, in a full queue
        self.empty_us = median(self.between(lambda: None, ahead_us=_EMPTY_AHEAD_US).us for _ in range(_EMPTY_PAIRS))

    def between(self, run: Callable[[], object], *, flush_l2: bool = False, ahead_us: float = 0.0) -> EventTiming:
        """Time what `run` puts on the current stream, and wait for it."""
        if flush_l2:
            self.gpu.flush_l2()
            if not ahead_us:
                self.gpu.synchronize()  # or the launch would be hidden behind the flush
        if ahead_us:
            self.gpu.sleep(int(ahead_us * self._cycles_per_us))
        self._start.record()
        run()
        self._end.record()
        saturated = not self._start.query()
        self._end.synchronize()
        return EventTiming(self._start.elapsed_time(self._end) * 1e3, saturated)

    def host_us(self, run: Callable[[], object], *, flush_l2: bool = False, waits: bool = False) -> float:
        """How long `run` keeps the host busy if the GPU is idle, in microseconds; with or without its end."""
        if flush_l2:
            self.gpu.flush_l2()
        self.gpu.synchronize()
        began = self.clock_ns()
        run()
        if waits:
            self.gpu.synchronize()
        return (self.clock_ns() - began) / 1e3


_MOST_CALLS: Final = 10
_TIME_US: Final = 20_000.0
_REPEATS: Final = 3
_AHEAD: Final = 2.0
_AHEAD_OF_LONG: Final = 1.5  # long calls vary less, and the spinning kernel takes as long again
_MARGIN_US: Final = 1000.0  # the scheduler may take the host away for some of it
_SHORTEST_WORK_US: Final = 0.5  # of two calls or more; the shortest kernel takes about 1 us


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEffects:
    """What a call does on the GPU."""

    enqueue_us: float  # how long a call keeps the host busy when the GPU is idle
    device_us: float  # about how long it takes on the GPU's timeline
    waits: bool  # for the GPU
    on_stream: bool  # whether it puts anything on the current stream
    allocated_bytes: int  # from the caching allocator
    kept_bytes: int  # of those
    cuda_mallocs: int  # in `calls` calls
    calls: int
    saturated: bool  # `device_us` was read in a full queue; otherwise some of it may be the host's time

    @property
    def certainly_on_stream(self) -> bool:
        """Whether it surely puts work on the current stream."""
        # Calls of the CPU that differ in length look like work, or like waiting for it, but take no GPU memory.
        return self.on_stream and (self.allocated_bytes > 0 or self.saturated)

    @property
    def queued_us(self) -> float | None:
        """`device_us`, if that is the time in a full queue: None if the call waits, or if nothing is on the stream."""
        return None if self.waits or not self.on_stream else self.device_us

    def warnings(self, *, wait_expected: bool) -> list[str]:
        """What the caller of `benchmark` should know, one sentence each."""
        texts = []
        if self.waits and not wait_expected:
            texts.append(
                "it waits for the GPU (.item(), .cpu(), another synchronization, CUDA_LAUNCH_BLOCKING=1, or more "
                "launches than the queue of about 1000 holds): the GPU idles meanwhile, so the time depends on the host"
            )
        if not self.on_stream:
            texts.append("it launches nothing on the current CUDA stream")
        if self.kept_bytes > 0:
            texts.append(
                f"it keeps memory: {self.kept_bytes:,} bytes more after each call, in what it stores or in reference "
                "cycles (Python's cyclic garbage collector is off while timing)"
            )
        if self.cuda_mallocs:
            texts.append(f"it allocates in steady state: {self.cuda_mallocs} cudaMalloc calls in {self.calls} calls")
        return texts


def gpu_effects(call: TimedCall, timer: EventTimer, call_us: float) -> GpuEffects:
    """Call a warm function a few times to find out what it does on the GPU."""
    long = call_us > _TIME_US
    calls = 1 if long else min(_MOST_CALLS, max(2, int(_TIME_US / max(call_us, 1.0))))
    before = timer.gpu.memory()
    enqueue_us = median(timer.host_us(call.call) for _ in range(calls))
    after = timer.gpu.memory()
    ahead = _AHEAD_OF_LONG if long else _AHEAD
    # A call that waits for the GPU cannot return before the GPU has finished the spinning kernel queued ahead of it.
    for _ in range(1 if long else _REPEATS):
        timing = timer.between(call.call, ahead_us=ahead * enqueue_us + _MARGIN_US)
        if timing.saturated:
            break
    waits = not timing.saturated
    if not long:  # several calls, to exceed the resolution of events
        timing = timer.between(
            lambda: call.call_many(calls), ahead_us=0.0 if waits else ahead * calls * enqueue_us + _MARGIN_US
        )
    device_us = max(timing.us - timer.empty_us, 0.0)
    return GpuEffects(
        enqueue_us=enqueue_us,
        device_us=device_us / calls,
        waits=waits,
        on_stream=device_us > _SHORTEST_WORK_US,
        allocated_bytes=(after.allocated_bytes - before.allocated_bytes) // calls,
        kept_bytes=(after.in_use_bytes - before.in_use_bytes) // calls,
        cuda_mallocs=after.cuda_mallocs - before.cuda_mallocs,
        calls=calls,
        saturated=timing.saturated,
    )
