"""Time the parts of a plain PyTorch loop and record a window of its steps; no Lightning.

Run it with::

    python examples/plain_pytorch.py --steps 40
"""

import argparse
from collections import Counter
from pathlib import Path

import torch
from torch import nn

from lightning_forge_profiling import CUDATimerCollection
from lightning_forge_profiling.profiler import ProfilingConfig, build_profiler
from lightning_forge_profiling.result_types import Interval

WARMUP_STEPS = 10


def main() -> None:
    """Train a small perceptron on random numbers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("demo_runs/plain"), help="default: %(default)s")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(64, 256, device=device), torch.randint(10, (64,), device=device)

    timers = CUDATimerCollection(["forward", "backward", "optimizer"])
    times: Counter[str] = Counter()

    def collect(intervals: tuple[Interval, ...]) -> None:
        times.update({each.region: 0.0 for each in intervals})
        for each in intervals:
            if each.tag >= WARMUP_STEPS:  # the first steps are slower; the recorded ones, 5 to 7, are among them
                times[each.region] += each.device_ms

    with build_profiler(ProfilingConfig(enable=True, start_step=5, end_step=8, trace_dir=args.out)) as profiler:
        for step in range(args.steps):
            timers.tag = step
            with timers.region("forward"):
                loss = nn.functional.cross_entropy(model(inputs), targets)
            with timers.region("backward"):
                loss.backward()
            with timers.region("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            profiler.step()
            collect(timers.harvest())  # what the GPU has completed by now; never waits

    timers.elapsed_all()  # waits, once, for what is still on its way
    collect(timers.harvest())
    timed = max(args.steps - WARMUP_STEPS, 0)
    print(f"mean of {timed} steps, {'device' if timers.on_device else 'host'} time; {timers.dropped} intervals dropped")
    for region in timers.regions:
        print(f"{region:<10} {times[region] / max(timed, 1):8.3f} ms")
    print(f"trace: {profiler.report.path or profiler.report.message}")


if __name__ == "__main__":
    main()
