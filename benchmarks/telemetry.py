"""What GPU telemetry and the recording of allocations cost.

python -m benchmarks.telemetry
"""

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.workloads import GPT, SmallKernels
from lightning_forge_profiling.gpu.memory import MemorySnapshot, read_allocator
from lightning_forge_profiling.gpu.nvml import GpuReader, find_device, open_reader
from lightning_forge_profiling.gpu.telemetry import DEFAULT_PERIOD_S, TelemetrySampler

SAMPLES = 300
ROUNDS = 30
SECONDS = 0.5
"""Of one turn: some samples of each sampler fall into it."""


def uuid() -> str:
    """The first device's."""
    return str(torch.cuda.get_device_properties(0).uuid)


def timed(call: Callable[[], object], number: int = SAMPLES) -> str:
    """Microseconds of a call: median and 99th percentile."""
    spent = []
    for _ in range(number):
        began = time.perf_counter_ns()
        call()
        spent.append((time.perf_counter_ns() - began) / 1e3)
    return f"median {statistics.median(spent):.1f} µs, p99 {sorted(spent)[int(0.99 * number)]:.1f} µs"


def queries(reader: GpuReader) -> None:
    """How long a sample takes, and what it is made of."""
    print(f"{reader.name}, {reader.power_limit_w} W")
    print(f"one sample: {timed(lambda: reader.read(0))}")
    nvml: Any = reader.nvml
    handle = find_device(reader.nvml, uuid(), 0).handle
    asked: dict[str, Callable[[], Any]] = {
        "utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(handle),
        "encoder": lambda: nvml.nvmlDeviceGetEncoderUtilization(handle),
        "decoder": lambda: nvml.nvmlDeviceGetDecoderUtilization(handle),
        "memory": lambda: nvml.nvmlDeviceGetMemoryInfo(handle),
        "processes": lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle),
        "power": lambda: nvml.nvmlDeviceGetPowerUsage(handle),
        "temperature": lambda: nvml.nvmlDeviceGetTemperatureV(handle, 0),
        "SM clock": lambda: nvml.nvmlDeviceGetClockInfo(handle, 1),
        "memory clock": lambda: nvml.nvmlDeviceGetClockInfo(handle, 2),
        "throttle reasons": lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
        "energy": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle),
        "allocator": lambda: read_allocator(0),
    }
    for name, call in asked.items():
        try:
            print(f"  {name}: {timed(call)}")
        except nvml.NVMLError as exc:
            print(f"  {name}: {exc}")
    print(f"this sample: {reader.read(0)}")


def steps_of(model: Any, batch: torch.Tensor, *, autocast: bool) -> Callable[[], None]:
    """A training step without Lightning."""
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model.training_step(batch, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def rate_ms(step: Callable[[], None]) -> float:
    """Milliseconds per step over `SECONDS`, drained at both ends."""
    torch.cuda.synchronize()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        step()
        count += 1
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count * 1e3


@contextmanager
def sampling(period_s: float) -> Iterator[None]:
    """A sampler beside the steps; it has found its device before they begin."""
    opener = functools.partial(
        open_reader, 0, uuid=uuid(), allocated_bytes=lambda: float(read_allocator(0).allocated_bytes)
    )
    sampler = TelemetrySampler(opener, period_s=period_s)
    sampler.start()
    while sampler.device is None and not sampler.problem:
        time.sleep(0.01)
    try:
        yield
    finally:
        sampler.stop()


@contextmanager
def recording_allocations() -> Iterator[None]:
    """As with `memory_snapshot="oom"`."""
    with tempfile.TemporaryDirectory() as folder:
        snapshot = MemorySnapshot("oom", Path(folder) / "snapshot.pickle")
        snapshot.start()
        try:
            yield
        finally:
            snapshot.close()


def compare(name: str, step: Callable[[], None]) -> None:
    """Steps with and without each contender, in turns; medians of the paired differences."""
    contenders: dict[str, Callable[[], Any]] = {
        "nothing": nullcontext,
        "nothing, again": nullcontext,
        f"telemetry every {DEFAULT_PERIOD_S} s": lambda: sampling(DEFAULT_PERIOD_S),
        "telemetry every 0.02 s": lambda: sampling(0.02),
        "recording of allocations": recording_allocations,
    }
    for _ in range(20):
        step()
    rounds: list[dict[str, float]] = []
    for turn in range(ROUNDS):
        order = list(contenders)
        order = order[turn % len(order) :] + order[: turn % len(order)]  # none is always first
        taken = {}
        for contender in order:
            with contenders[contender]():
                taken[contender] = rate_ms(step)
        rounds.append(taken)
    print(f"\n{name}\n| contender | step ms | paired difference µs |\n| --- | ---: | ---: |")
    for contender in contenders:
        differences = [(taken[contender] - taken["nothing"]) * 1e3 for taken in rounds]
        error = statistics.stdev(differences) * 1.25 / len(differences) ** 0.5
        middle = statistics.median(taken[contender] for taken in rounds)
        print(f"| {contender} | {middle:.4f} | {statistics.median(differences):+.1f} ± {error:.1f} |")


def snapshot_of_a_step(step: Callable[[], None]) -> None:
    """How long writing one takes, and how large it is."""
    with tempfile.TemporaryDirectory() as folder:
        for when in (1, "oom"):
            snapshot = MemorySnapshot(when, Path(folder) / f"{when}.pickle")
            snapshot.start()
            for number in range(200 if when == "oom" else 1):
                step()
                snapshot.end_step(number)
            step()
            began = time.perf_counter()
            if when == "oom":
                snapshot.on_exception(torch.OutOfMemoryError("planted"))
            else:
                snapshot.end_step(1)
            spent = time.perf_counter() - began
            size = snapshot.written.stat().st_size / 1e6 if snapshot.written else 0.0
            print(f"memory_snapshot={when!r}: {spent:.2f} s, {size:.1f} MB {snapshot.problem}")


def main() -> None:
    """Print all of it."""
    if not torch.cuda.is_available():
        print("There is no GPU here.")
        return
    gpt = steps_of(GPT(), torch.randint(0, 50304, (16, 1025), device="cuda"), autocast=True)
    small = steps_of(SmallKernels(), torch.randn(1, 64, device="cuda"), autocast=False)
    gpt()
    reader = open_reader(0, uuid(), lambda: None)
    queries(reader)
    compare("launch-bound: 24 layers of width 64", small)
    compare("GPU-bound: GPT, 12 layers of width 768, 16 x 1024 tokens", gpt)
    snapshot_of_a_step(gpt)
    reader.nvml.nvmlShutdown()


if __name__ == "__main__":
    main()
