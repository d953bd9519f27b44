"""What `benchmark` and others read for the same call, beside the trace of the same run.

The truth is the union of the call's own kernels in a trace of 50 calls, recorded right before and right after each
reading. Contenders take turns, after a rest each, so that none inherits a clock that the one before has driven down.
Everything is hot: the same tensors, and no L2 flush where the contender lets one choose (`triton.testing.do_bench`
always flushes). An error is the median over the rounds of a reading less its own truth.

`auto` reads the profiler, as the truth does. `graph`, `saturated` and what follows do not. A second table says what a
trace shows of the same calls in a full queue and in a replayed graph, and what events around that graph read without
and with the profiler.

    python -m benchmarks.microbench
    python -m benchmarks.microbench --rounds 3 --only "add 1 M"
"""

import argparse
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from datetime import datetime
from functools import partial
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer

from lightning_forge_profiling.bench.benchmark import benchmark
from lightning_forge_profiling.bench.device import CudaDevice, EventTimer

TRACED_CALLS = 50
REPLAYED_CALLS = 100
AHEAD_CYCLES = 10_000_000  # 5 ms at 2 GHz: launching 100 calls under the profiler takes less
AHEAD_US = 500.0  # launching a graph takes less
REPEATS = 5
REST_S = 0.1
SHORTEST = "add 1, the shortest"
OURS = ("auto", "graph", "saturated", "events", "wall")
OTHERS = ("do_bench", "do_bench_cudagraph", "torch.utils.benchmark")


def functions() -> dict[str, Callable[[], object]]:
    """The functions to time."""
    half: Any = {"device": "cuda", "dtype": torch.bfloat16}
    small, large = torch.randn(2**20, device="cuda"), torch.randn(2**26, device="cuda")
    square, rows = torch.randn(4096, 4096, device="cuda"), torch.randn(8192, 1024, device="cuda")
    target, out, one = torch.empty_like(small), torch.empty_like(large), torch.ones(1, device="cuda")
    a, b = torch.randn(512, 512, **half), torch.randn(4096, 4096, **half)
    return {
        "add 1 M": partial(torch.add, small, small),
        "copy 1 M": partial(target.copy_, small),
        "add 64 M": partial(torch.add, large, large, out=out),
        "softmax 4096x4096": partial(torch.softmax, square, -1),
        "layer norm 8192x1024": partial(torch.nn.functional.layer_norm, rows, (1024,)),
        "matmul 512 bf16": partial(torch.matmul, a, a),
        "matmul 4096 bf16": partial(torch.matmul, b, b),
        SHORTEST: partial(torch.add, one, one),
    }


def traced_us(fn: Callable[[], object]) -> float:
    """The union of a call's kernels, median over the calls of a trace.

    It shares no code with `benchmark`: the kernels are taken in their order and dealt out evenly to the calls.
    """

    def run() -> None:
        for _ in repeat(None, TRACED_CALLS):
            fn()

    return statistics.median(union for union, _ in dealt_out(recorded(run), TRACED_CALLS))


def recorded(run: Callable[[], object]) -> list[tuple[float, float]]:
    """Start and end of everything that ran on the GPU, in microseconds and in order."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X" and e.get("cat") in kinds)


def dealt_out(work: list[tuple[float, float]], calls: int) -> list[tuple[float, float]]:
    """For each call, the union of its work and when it began."""
    each, left = divmod(len(work), calls)
    if left or not each:
        raise RuntimeError(f"{len(work)} kernels cannot be dealt out to {calls} calls")
    found = []
    for first in range(0, len(work), each):
        total, reached = 0.0, 0.0
        for start, end in work[first : first + each]:
            total += max(end - max(start, reached), 0.0)
            reached = max(reached, end)
        found.append((total, work[first][0]))
    return found


@dataclass(frozen=True)
class InARow:
    """Calls back to back, medians in microseconds.

    Attributes:
        queue_kernels: the union of a call's kernels, by a trace of a full queue.
        queue_distance: there, from the begin of a call's to the begin of the next one's.
        graph_kernels: the same for a replayed graph.
        graph_distance: likewise.
        graph_alone: a call of that graph by events around it, without the profiler.
        graph_traced: the same with the profiler recording.
    """

    queue_kernels: float
    queue_distance: float
    graph_kernels: float
    graph_distance: float
    graph_alone: float
    graph_traced: float


def in_a_row(fn: Callable[[], object]) -> InARow:
    """The same calls in a full queue and in a replayed graph."""
    gpu = CudaDevice(torch.device("cuda", torch.cuda.current_device()))
    timer = EventTimer(gpu)

    def make(calls: int) -> None:
        for _ in repeat(None, calls):
            fn()

    def queued() -> None:
        gpu.sleep(AHEAD_CYCLES)
        make(REPLAYED_CALLS)

    replay = gpu.capture(make, REPLAYED_CALLS)
    replay()
    traces = []
    for run, led in ((queued, 1), (replay, 0)):  # one kernel leads the queue
        time.sleep(REST_S)
        calls = dealt_out(recorded(run)[led:], REPLAYED_CALLS)
        traces.append(statistics.median(union for union, _ in calls))
        traces.append(statistics.median(after - before for (_, before), (_, after) in pairwise(calls)))
    read: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(REPEATS):
        for traced, found in read.items():
            time.sleep(REST_S)
            with profile(activities=[ProfilerActivity.CUDA], acc_events=True) if traced else nullcontext():
                us = timer.between(replay, ahead_us=AHEAD_US).us
            found.append((us - timer.empty_us) / REPLAYED_CALLS)
    return InARow(*traces, *map(statistics.median, read.values()))


def contenders(fn: Callable[[], object], min_time: float) -> dict[str, Callable[[], float]]:
    """What reads microseconds of one call, by name."""

    def ours(method: str) -> float:
        result = benchmark(fn, method=method, flush_l2=False, max_time=5 * min_time, device="cuda", name="it")
        if method == "auto":
            print(f"    {result.method}, {len(result.samples_us)} samples, {result.clock}", *result.warnings, sep="; ")
        return result.median_us

    readers: dict[str, Callable[[], float]] = {method: partial(ours, method) for method in OURS}
    try:
        testing = importlib.import_module("triton.testing")
    except ImportError:
        print("Triton is not installed, and so left out")
    else:
        readers["do_bench"] = lambda: float(testing.do_bench(fn, return_mode="median")) * 1e3
        readers["do_bench_cudagraph"] = lambda: float(testing.do_bench_cudagraph(fn, return_mode="median")) * 1e3
    timer = Timer("fn()", globals={"fn": fn})
    readers["torch.utils.benchmark"] = lambda: timer.blocked_autorange(min_run_time=min_time).median * 1e6
    return readers


@dataclass(frozen=True)
class Reading:
    """Medians over the rounds, in microseconds.

    Attributes:
        us: what the contender read.
        truth: the traces beside it.
        off: the reading less its truth.
    """

    us: float
    truth: float
    off: float


def measure(fn: Callable[[], object], rounds: int, min_time: float) -> dict[str, Reading]:
    """What each contender reads."""
    readers = contenders(fn, min_time)
    read: dict[str, list[tuple[float, float]]] = {name: [] for name in readers}
    for reader in readers.values():  # first times set much up
        reader()
    for turn in range(rounds):
        for name in list(readers) if turn % 2 == 0 else reversed(readers):
            time.sleep(REST_S)
            before = traced_us(fn)
            us = readers[name]()
            read[name].append((us, (before + traced_us(fn)) / 2))
    return {
        name: Reading(*(statistics.median(column) for column in zip(*((u, t, u - t) for u, t in pairs), strict=True)))
        for name, pairs in read.items()
    }


def say_how_near(name: str, found: dict[str, Reading]) -> None:
    """Which readings are within the bound, and whether another tool is nearer."""
    others = {one: abs(found[one].off) for one in OTHERS if one in found}
    nearest = min(others, key=lambda one: others[one])  # torch.utils.benchmark is always there
    for method in ("auto", "graph", "saturated"):
        off = found[method].off
        within = abs(off) <= max(0.05 * found[method].truth, 0.5)
        nearer = f"{nearest} is NEARER" if others[nearest] < abs(off) else f"the nearest other is {nearest}"
        print(
            f"{name}: {method} off by {off:+.2f} us, {'within' if within else 'NOT WITHIN'} 5 % or 0.5 us; "
            f"{nearer}, off by {others[nearest]:.2f}"
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--min-time", type=float, default=0.1, help="seconds for each reading")
    parser.add_argument("--only", default="", help="functions whose name has this in it")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no GPU here.")
        return
    gpu = CudaDevice(torch.device("cuda", 0))
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    print(f"{datetime.now().astimezone():%Y-%m-%d %H:%M}, {gpu.name}, {versions}, {args.rounds} rounds")
    rows: dict[str, dict[str, Reading]] = {}
    more: dict[str, InARow] = {}
    print("\nMicroseconds of one call, and how far off the trace beside it.\n")
    for name, fn in functions().items():
        if args.only not in name:
            continue
        found = measure(fn, args.rounds, args.min_time)
        if not rows:
            print(f"| call | trace | {' | '.join(found)} |\n|---|---:|{'---:|' * len(found)}")
        rows[name], more[name] = found, in_a_row(fn)
        cells = " | ".join(f"{one.us:.2f} ({one.off:+.2f})" for one in found.values())
        print(f"| {name} | {found['auto'].truth:.2f} | {cells} |", flush=True)
    print()
    for name, found in rows.items():
        say_how_near(name, found)
    print("\nThe same calls in a row: kernels and from begin to begin in a trace, and a graph by events around it.\n")
    columns = ("queue, kernels", "distance", "graph, kernels", "distance", "events, no trace", "events, traced")
    print(f"| call | one by one | {' | '.join(columns)} |\n|---|---:|{'---:|' * len(columns)}")
    for name, row in more.items():
        cells = " | ".join(f"{getattr(row, field.name):.2f}" for field in fields(row))
        print(f"| {name} | {rows[name]['auto'].truth:.2f} | {cells} |")


if __name__ == "__main__":
    main()
