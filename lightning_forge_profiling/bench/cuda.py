"""The GPU as the timing methods use it: everything in this folder that calls `torch.cuda` or the profiler."""

import json
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_forge_profiling.errors import ForgeProfilingError
from lightning_forge_profiling.timing.events import DeviceEventSource, Event

__all__ = ["Gpu", "MemoryCounts", "first_line"]

_L2_UNKNOWN: Final = 128 * 2**20  # more than any L2 on the market has, for a driver that does not say
_WARM_UP_CALLS: Final = 3  # on the capturing stream, as PyTorch's notes on CUDA graphs ask

_BROKEN_OFF: Final[list[torch.cuda.CUDAGraph]] = []
"""Graphs that PyTorch's allocator of pinned memory may still look at during a later capture, and so must not go."""


@dataclass(frozen=True, slots=True)
class MemoryCounts:
    """What the caching allocator has done so far.

    Attributes:
        in_use_bytes: held by tensors now.
        given_bytes: handed out since the start of the process, freed or not.
        device_calls: how often it had to ask the driver for memory (cudaMalloc and its like).
    """

    in_use_bytes: int
    given_bytes: int
    device_calls: int


class Gpu:
    """One CUDA device. Its methods act on the current stream.

    Args:
        device: which, with its index.
    """

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
        """Keep the stream busy for so many cycles of the SM clock, without touching memory."""
        spin: Callable[[int], None] = torch.cuda._sleep  # noqa: SLF001  (no public way; PyTorch's own tests use it)
        spin(cycles)

    def flush_l2(self) -> None:
        """Overwrite a buffer twice the size of the L2, so that nothing of the function's data stays in it."""
        if self._flush_buffer is None:
            self._flush_buffer = torch.empty(2 * self._l2_bytes, dtype=torch.int8, device=self.device)
        self._flush_buffer.zero_()

    def capture(self, calls: Callable[[int], None], count: int) -> Callable[[], None]:
        """Capture so many calls into a CUDA graph, on a stream of its own.

        Args:
            calls: makes that many calls.
            count: how many.

        Returns:
            What replays the graph on the current stream.

        Raises:
            ForgeProfilingError: CUDA has broken the capture off. The process is as it was before.
            Exception: whatever the function raises.
        """
        new_stream: Callable[[torch.device], Any] = torch.cuda.Stream  # untyped in PyTorch
        side, current = new_stream(self.device), torch.cuda.current_stream(self.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            calls(_WARM_UP_CALLS)
        current.wait_stream(side)
        self.synchronize()
        torch.cuda.empty_cache()  # during a capture the allocator cannot give back what it has in reserve
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
        """End a capture; one that CUDA has broken off so that nothing of it stays.

        `capture_end` then raises before it tells the caching allocator, which would never give memory back again, and
        the random number generator, which would refuse every call.

        Source: CUDAGraph::capture_end and CUDAGeneratorState::increase in PyTorch's aten/src/ATen/cuda.
        """
        try:
            graph.capture_end()
        except RuntimeError as error:
            _BROKEN_OFF.append(graph)
            for undo in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):  # noqa: SLF001  (no public way)
                with suppress(RuntimeError):  # a PyTorch that has done it
                    undo(self.device.index, pool)
            orderly = torch.cuda.CUDAGraph()  # its end is the end for the generator too
            orderly.capture_begin(capture_error_mode="thread_local")
            self.sleep(1)
            orderly.capture_end()
            cause = raised or error
            if isinstance(cause, RuntimeError):  # else it is the function's own
                raise ForgeProfilingError(f"CUDA broke the capture of a graph off: {first_line(cause)}") from cause

    def trace(self, run: Callable[[], object]) -> list[dict[str, Any]]:
        """Run something under the profiler.

        Returns:
            The events of the trace.

        Raises:
            ForgeProfilingError: another profiler is active in this process; there can be only one.
        """
        # No public way to ask. The first knows this thread, the second what Python has started in any.
        if torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled:  # noqa: SLF001
            raise ForgeProfilingError("another torch profiler is active in this process")
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
            run()
            self.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
        return events

    def mark(self, name: str) -> AbstractContextManager[object]:
        """A named span in the trace."""
        return record_function(name)

    def memory(self) -> MemoryCounts:
        """What the allocator has done so far."""
        stats = torch.cuda.memory_stats(self.device)
        return MemoryCounts(
            in_use_bytes=stats.get("allocated_bytes.all.current", 0),
            given_bytes=stats.get("allocated_bytes.all.allocated", 0),
            device_calls=stats.get("num_device_alloc", 0),
        )


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).split("\n")[0]
