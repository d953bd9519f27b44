"""What recording costs, by what is recorded.

Each set of options trains in fresh processes, in turns, with a 12-step window. Compared are the medians of the steps
in the window, but for the first, and of the settled ones before it; the stall is that at the window's end. The host
limits both models. `with_flops` makes PyTorch record shapes as well. Analysis, TensorBoard's copy and checkpoints are
off.

    python -m benchmarks.recording
    python -m benchmarks.recording --models small --options plain,all --turns 1
    python -m benchmarks.recording --quick    # few steps of a smaller GPT, for a machine without a GPU
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from benchmarks import fresh
from benchmarks.workloads import GPT, SmallKernels, random_tokens, trainer
from lightning_forge_profiling import ForgeProfilerCallback

WINDOW = 12
COLD = {"small": 50, "gpt-host": 15}
LIVE = {"small": 200, "gpt-host": 40}
QUICK_COLD, QUICK_LIVE = 5, 15

PLAIN: dict[str, Any] = {"record_shapes": False, "profile_memory": False, "with_flops": False, "with_stack": False}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("cpu+cuda", {}),
    "shapes": ("record_shapes", {"record_shapes": True}),
    "memory": ("profile_memory", {"profile_memory": True}),
    "flops": ("with_flops", {"with_flops": True}),
    "shapes+memory": ("record_shapes, profile_memory", {"record_shapes": True, "profile_memory": True}),
    "shapes+flops": ("record_shapes, with_flops", {"record_shapes": True, "with_flops": True}),
    "all": ("all three", {"record_shapes": True, "profile_memory": True, "with_flops": True}),
    "cuda": ("cuda only", {"activities": ["cuda"]}),
    "stack": ("with_stack", {"with_stack": True}),
}
"""By key, the name in the table and what differs from `PLAIN`."""


def subject(name: str, steps: int, *, quick: bool) -> tuple[L.LightningModule, DataLoader[Any], str]:
    """The model, its batches and the Trainer's precision."""
    if name == "small":
        return SmallKernels(), DataLoader(torch.randn(steps + 10, 1, 64), batch_size=None), "32-true"
    if quick:
        batches = random_tokens(steps + 10, batch_size=2, length=64, vocabulary=256)
        return GPT(layers=2, width=128, length=64, vocabulary=256), batches, "32-true"
    batches = random_tokens(steps + 10, batch_size=4, length=512, vocabulary=8192)
    return fresh.on_device(lambda: GPT(12, 768, 512, 8192)), batches, "bf16-mixed"


def measure(name: str, key: str, folder: str, *, quick: bool) -> None:
    """Train with one set of options, and report."""
    cold, live = (QUICK_COLD, QUICK_LIVE) if quick else (COLD[name], LIVE[name])
    first = cold + live
    ends = fresh.StepEnds()
    chosen = {**PLAIN, **OPTIONS[key][1]}
    forge = ForgeProfilerCallback(first, first + WINDOW, trace_dir=folder, analyze=False, tensorboard=False, **chosen)
    steps = first + WINDOW + 2
    module, batches, precision = subject(name, steps, quick=quick)
    run = trainer(folder, steps, callbacks=[ends, forge], precision=precision, enable_checkpointing=False)
    run.fit(module, batches)
    report = forge.trace_report()
    if report is None or report.path is None:
        sys.exit(f"no trace: {report}")
    fresh.answer(
        live_ms=ends.median_ms(cold, first - 1),  # the last is the profiler's warm-up
        recorded_ms=ends.median_ms(first + 1, first + WINDOW),  # the first holds the start of the recording
        stall_ms=report.stall_ms,
        kilobytes=report.path.stat().st_size / 1e3,
    )


def row(outcomes: Sequence[fresh.Outcome]) -> list[str]:
    """The cells of a set of options."""
    found = fresh.results(outcomes)
    return [
        fresh.middle([result["live_ms"] for result in found]),
        fresh.middle([result["recorded_ms"] for result in found]),
        fresh.spread([result["recorded_ms"] / result["live_ms"] for result in found], ".3f"),
        fresh.middle([(result["recorded_ms"] - result["live_ms"]) * 1e3 for result in found], "+.0f"),
        fresh.middle([result["stall_ms"] for result in found], ".0f"),
        fresh.middle([result["kilobytes"] for result in found], ".0f"),
    ]


def compare(model: str, keys: Sequence[str], folder: str, args: argparse.Namespace) -> bool:
    """Record one model with all sets of options, print the table and say whether all ended well."""
    if "cuda" in keys and not torch.cuda.is_available():
        print(f"{OPTIONS['cuda'][0]}: skipped, there is no GPU")
        keys = [key for key in keys if key != "cuda"]
    quick = ["--quick"] if args.quick else []
    children = {
        OPTIONS[key][0]: fresh.Child(
            fresh.module("benchmarks.recording", "--child", model, key, "--folder", folder, *quick)
        )
        for key in keys
    }
    outcomes = fresh.in_turns(children, args.turns)
    heads = (model, "live ms", "recorded ms", "ratio", "added µs per step", "stall ms", "trace kB")
    rows = {name: row(turns) for name, turns in outcomes.items()}
    fresh.print_table(f"{model}: {args.turns} turns, medians (min to max)", heads, rows, outcomes)
    return not fresh.failed(outcomes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table for each model; 1 where a child ended badly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="how often each records (3)")
    parser.add_argument("--models", type=fresh.keys(LIVE), default=list(LIVE), help=", ".join(LIVE))
    parser.add_argument("--options", type=fresh.keys(OPTIONS), default=list(OPTIONS), help=", ".join(OPTIONS))
    parser.add_argument("--quick", action="store_true", help="few steps of a smaller GPT")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        measure(*args.child, args.folder, quick=args.quick)
        return 0
    well = True
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            well &= compare(model, args.options, folder, args)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
