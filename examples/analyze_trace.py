"""Record a few steps of a plain PyTorch loop, say what bounds them, and write the reports; no Lightning.

Run it with::

    python examples/analyze_trace.py --out demo_runs/analysis
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.profiler import profile, record_function, schedule

from lightning_forge_profiling.profiler import print_profiler_summary

WARMUP_STEPS = 5
RECORDED_STEPS = 3


def main() -> None:
    """Train a small perceptron whose batches are slow to make, in the training process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo_runs/analysis"), help="default: %(default)s")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # without record_shapes there are no FLOPs, without profile_memory no memory
    steps = schedule(wait=WARMUP_STEPS - 1, warmup=1, active=RECORDED_STEPS, repeat=1)
    with profile(schedule=steps, record_shapes=True, profile_memory=True) as profiler:
        for _ in range(WARMUP_STEPS + RECORDED_STEPS):
            with record_function("get_batch"):  # by this name the analysis knows a loader
                inputs, targets = torch.randn(512, 256, 128).mean(-1), torch.randint(10, (512,))
            loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()

    analysis = print_profiler_summary(profiler, args.out)
    if analysis is not None:
        print(f"verdict    {analysis.verdict}")
        for finding in analysis.findings:
            print(f"finding    {finding.code}, {finding.share_pct:.0f} % of the step")


if __name__ == "__main__":
    main()
