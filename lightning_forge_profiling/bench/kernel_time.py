"""The time in which the kernels of a call ran, from a trace of `torch.profiler`."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from lightning_forge_profiling.bench.cuda import Gpu
from lightning_forge_profiling.errors import ForgeProfilingError

CALL: Final = "forge.benchmark.call"
"""The name of a call's span in the trace."""

_WORK: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES: Final = frozenset({"cuda_runtime", "cuda_driver"})
_UNCOUNTED: Final = 3  # meanwhile the profiler still sets up its buffers


def kernel_times_us(call: Callable[[], None], count: int, gpu: Gpu, *, flush_l2: bool) -> list[float]:
    """Profile some calls."""

    def run() -> None:
        gpu.sleep(1)  # a profiler that works records this, whatever the function does
        for number in range(-_UNCOUNTED, count):
            if count == 1 and number < 0:  # calls are long, and any work sets the buffers up
                gpu.sleep(1)
                continue
            if flush_l2:
                gpu.flush_l2()
            if number < 0:
                call()
            else:
                with gpu.mark(CALL):
                    call()

    events = gpu.trace(run)
    if not any(event.get("cat") in _WORK for event in events):
        raise ForgeProfilingError("the profiler saw no GPU work at all (is nsys or ncu attached?)")
    return busy_us_per_call(events)


def busy_us_per_call(events: Iterable[Mapping[str, Any]]) -> list[float]:
    """The union of the kernels, copies and fills of each call, in order; 0 for a call without any.

    Work belongs to the call during which the host launched it, on any thread: autograd launches the backward pass from
    its own threads while the caller waits.
    """
    spans: list[tuple[float, float]] = []
    launched: dict[int, float] = {}
    work: list[tuple[float, float, int]] = []
    for event in events:
        if event.get("ph") != "X":
            continue
        kind, start = event.get("cat"), float(event["ts"])
        correlation = event.get("args", {}).get("correlation")
        if kind == "user_annotation" and event["name"] == CALL:
            spans.append((start, start + float(event["dur"])))
        elif kind in _LAUNCHES and correlation is not None:
            launched[correlation] = start
        elif kind in _WORK:
            work.append((start, start + float(event["dur"]), correlation))
    spans.sort()
    starts = [start for start, _ in spans]
    by_call: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for start, end, correlation in work:
        at = launched.get(correlation)
        if at is None:
            continue
        number = bisect_right(starts, at) - 1
        if number >= 0 and at <= spans[number][1]:
            by_call[number].append((start, end))
    return [_union(by_call[number]) for number in range(len(spans))]


def _union(intervals: list[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total
