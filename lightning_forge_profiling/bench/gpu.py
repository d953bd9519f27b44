"""The GPU as the timing methods use it: everything in this folder that calls `torch.cuda` or the profiler."""

import json
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_forge_profiling.errors import ForgeProfilingError
from lightning_forge_profiling.timing.events import DeviceEventSource, Event

__all__ = ["Gpu", "MemoryCounts"]

_L2_UNKNOWN: Final = 128 * 2**20  # more than any L2 on the market has, for a driver that does not say
_WARM_UP_CALLS: Final = 3  # on the capturing stream, as PyTorch's notes on CUDA graphs ask


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
            Exception: whatever PyTorch raises where the calls cannot be captured.
        """
        new_stream: Callable[[torch.device], Any] = torch.cuda.Stream  # untyped in PyTorch
        side, current = new_stream(self.device), torch.cuda.current_stream(self.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            calls(_WARM_UP_CALLS)
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads (a data loader's, say) may go on calling CUDA meanwhile
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                calls(count)
        finally:
            torch.cuda.set_stream(current)  # a capture that fails leaves the side stream in its place
        replay: Callable[[], None] = graph.replay
        return replay

    def trace(self, run: Callable[[], object]) -> list[dict[str, Any]]:
        """Run something under the profiler.

        Returns:
            The events of the trace.

        Raises:
            ForgeProfilingError: another profiler is active in this process; there can be only one.
        """
        if torch._C._autograd._profiler_enabled():  # noqa: SLF001  (no public way to ask)
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
