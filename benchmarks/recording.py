"""What recording costs, by what is recorded.

In one process, windows with each set of options in turns, every other round in reverse order. Each window is compared
with the unrecorded steps of the same loop right before it, so that what the machine does meanwhile hits both. CUPTI is
detached at the end of each window. `with_flops` makes PyTorch record shapes as well.

    python -m benchmarks.recording
    python -m benchmarks.recording --quick    # few steps of a smaller GPT, for a machine without a GPU
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from benchmarks.fresh import middle, spread
from benchmarks.workloads import GPT, SmallKernels
from lightning_forge_profiling.profiler.collector import Marks, detached_at_stop

LIVE, RECORDED, SETTLING = 12, 4, 3
OPTIONS: dict[str, dict[str, Any]] = {
    "CPU and CUDA": {},
    "record_shapes": {"record_shapes": True},
    "profile_memory": {"profile_memory": True},
    "with_flops": {"with_flops": True},
    "shapes, memory": {"record_shapes": True, "profile_memory": True},
    "shapes, memory, flops": {"record_shapes": True, "profile_memory": True, "with_flops": True},
    "shapes, memory, no external ids": {
        "record_shapes": True,
        "profile_memory": True,
        "experimental_config": _ExperimentalConfig(disable_external_correlation=True),
    },
    "with_stack": {"with_stack": True},
    "CUDA alone": {"activities": [ProfilerActivity.CUDA]},
    "light steps": {"record_shapes": True},
    "light steps, memory": {"record_shapes": True, "profile_memory": True},
}
"""By name, what is asked for beside both activities. In light steps operators are left out."""


def training_step(name: str, *, quick: bool) -> Callable[[], None]:
    """One step of a host-bound model: the loop of small kernels, or a GPT whose autocast launches many casts."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module: Any = SmallKernels() if name == "small" else GPT(2, 128, 64, 256) if quick else GPT(12, 768, 512, 8192)
    module.to(device)
    batch = torch.randn(1, 64) if name == "small" else torch.randint(0, 256, (2, 65) if quick else (4, 513))
    batch = batch.to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=device == "cuda")

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=name != "small"):
            loss = module.training_step(batch, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed_ms(step: Callable[[], None], steps: int, marks: Marks) -> list[float]:
    """Host time of each step; the host sets the pace of these models."""
    times = []
    for number in range(steps):
        began = time.perf_counter()
        with marks.begin(f"ProfilerStep#{number}"):
            step()
        times.append((time.perf_counter() - began) * 1e3)
    return times


def window(
    step: Callable[[], None], options: dict[str, Any], path: Path, *, light: bool = False
) -> tuple[float, float, float, float]:
    """Medians of live and recorded steps, how long the stop took in milliseconds, and the trace's kilobytes."""
    marks = Marks()
    timed_ms(step, SETTLING, marks)
    live = statistics.median(timed_ms(step, LIVE, marks))
    profiler = profile(**options)
    profiler.prepare_trace()
    step()
    profiler.start_trace()
    if light:
        marks.leave_operators_out()
    recorded = statistics.median(timed_ms(step, RECORDED, marks))
    marks.take_operators_in()
    began = time.perf_counter()
    with detached_at_stop():
        profiler.stop_trace()
    profiler.export_chrome_trace(str(path))
    return live, recorded, (time.perf_counter() - began) * 1e3, path.stat().st_size / 1e3


def measure(name: str, rounds: int, *, quick: bool) -> None:
    """Print one model's table."""
    step = training_step(name, quick=quick)
    timed_ms(step, LIVE, Marks())
    names = [option for option in OPTIONS if option != "CUDA alone" or torch.cuda.is_available()]
    found: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as root:
        window(step, {}, Path(root) / "trace.json")  # nobody pays for the process's first recording
        for turn in range(rounds):
            for option in reversed(names) if turn % 2 else names:
                path, light = Path(root) / "trace.json", option.startswith("light")
                found[option].append(window(step, OPTIONS[option], path, light=light))
    print(f"\n{name}, {rounds} rounds: medians, the ratio with minimum and maximum\n")
    print("| recorded | live ms | recorded ms | ratio | added ms a step | stop and export ms | trace kB |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for option in names:
        live, recorded, stop, size = zip(*found[option], strict=True)
        ratios = [more / less for more, less in zip(recorded, live, strict=True)]
        added = statistics.median(more - less for more, less in zip(recorded, live, strict=True))
        times = middle(live, ".2f"), middle(recorded, ".2f"), spread(ratios, ".2f"), f"{added:+.2f}"
        shown = (*times, middle(stop, ".0f"), middle(size, ".0f"))
        print(f"| {option} | {' | '.join(shown)} |")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="windows with each set of options (8)")
    parser.add_argument("--models", default="small,gpt", help="small, gpt")
    parser.add_argument("--quick", action="store_true", help="a smaller GPT")
    args = parser.parse_args(arguments)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}, torch {torch.__version__}")
    for name in args.models.split(","):
        measure(name, args.rounds, quick=args.quick)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
