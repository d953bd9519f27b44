"""What `benchmark` and others read for the same call, beside the trace of the same run.

The truth is the union of the call's own kernels in a trace of 50 calls, recorded right before and right after each
reading. Contenders take turns, after a rest each, so that none inherits a clock that the one before has driven down.
Everything is hot: the same tensors, and no L2 flush where the contender lets one choose (`triton.testing.do_bench`
always flushes). An error is the median over the rounds of a reading less its own truth.

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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.benchmark import Timer

from lightning_forge_profiling.bench.benchmark import benchmark
from lightning_forge_profiling.bench.gpu import Gpu

TRACED_CALLS = 50
REST_S = 0.1
OURS = ("auto", "graph", "saturated", "events", "wall")
OTHERS = ("do_bench", "do_bench_cudagraph", "torch.utils.benchmark")


def subjects() -> dict[str, Callable[[], object]]:
    """The functions to time."""
    half: Any = {"device": "cuda", "dtype": torch.bfloat16}
    small, large = torch.randn(2**20, device="cuda"), torch.randn(2**26, device="cuda")
    square, rows = torch.randn(4096, 4096, device="cuda"), torch.randn(8192, 1024, device="cuda")
    target, out = torch.empty_like(small), torch.empty_like(large)
    a, b = torch.randn(512, 512, **half), torch.randn(4096, 4096, **half)
    return {
        "add 1 M": partial(torch.add, small, small),
        "copy 1 M": partial(target.copy_, small),
        "add 64 M": partial(torch.add, large, large, out=out),
        "softmax 4096x4096": partial(torch.softmax, square, -1),
        "layer norm 8192x1024": partial(torch.nn.functional.layer_norm, rows, (1024,)),
        "matmul 512 bf16": partial(torch.matmul, a, a),
        "matmul 4096 bf16": partial(torch.matmul, b, b),
    }


def traced_us(fn: Callable[[], object], calls: int = TRACED_CALLS) -> float:
    """The union of a call's kernels, median over the calls of a trace.

    It shares no code with `benchmark`: the kernels are taken in their order and dealt out evenly to the calls.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(calls):
            fn()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    work = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X" and e.get("cat") in kinds)
    each, left = divmod(len(work), calls)
    if left or not each:
        raise RuntimeError(f"{len(work)} kernels cannot be dealt out to {calls} calls")
    found = []
    for first in range(0, len(work), each):
        total, reached = 0.0, 0.0
        for start, end in work[first : first + each]:
            total += max(end - max(start, reached), 0.0)
            reached = max(reached, end)
        found.append(total)
    return statistics.median(found)


def contenders(fn: Callable[[], object], min_time: float) -> dict[str, Callable[[], float]]:
    """What reads microseconds of one call, by name."""

    def ours(method: str) -> float:
        result = benchmark(
            fn, method=method, flush_l2=False, min_time=min_time, max_time=5 * min_time, device="cuda", name="it"
        )
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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--min-time", type=float, default=0.1, help="seconds for each reading")
    parser.add_argument("--only", default="", help="functions whose name has this in it")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no GPU here.")
        return
    gpu = Gpu(torch.device("cuda", 0))
    print(f"{gpu.name}, torch {torch.__version__}, CUDA {torch.version.cuda}, {args.rounds} rounds")
    rows: dict[str, dict[str, Reading]] = {}
    for name, fn in subjects().items():
        if args.only in name:
            rows[name] = measure(fn, args.rounds, args.min_time)
            print(f"{name}: done", flush=True)
    columns = list(next(iter(rows.values()), {}))
    print("\nMicroseconds of one call, and how far off the trace beside it.\n")
    print(f"| call | trace | {' | '.join(columns)} |\n|---|---:|{'---:|' * len(columns)}")
    for name, found in rows.items():
        cells = " | ".join(f"{one.us:.2f} ({one.off:+.2f})" for one in found.values())
        print(f"| {name} | {found['auto'].truth:.2f} | {cells} |")
    print()
    for name, found in rows.items():
        auto, off = found["auto"], {one: abs(found[one].off) for one in OTHERS if one in found}
        nearest = min(off, key=lambda one: off[one])
        within = abs(auto.off) <= max(0.05 * auto.truth, 0.5)
        print(
            f"{name}: auto off by {auto.off:+.2f} us, {'within' if within else 'NOT WITHIN'} 5 % or 0.5 us; "
            f"the nearest other is {nearest}, off by {off[nearest]:.2f}"
            + (", NEARER" if off[nearest] < abs(auto.off) else "")
        )


if __name__ == "__main__":
    main()
