"""Train with a slow data loader, read the verdict, apply its fix, compare the gain with the prediction; then `try` it.

Run it with ``make demo``, or directly::

    python examples/demo.py --steps 300 --out demo_runs
"""

import argparse
import logging
import shutil
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_forge_profiling import Analysis, ForgeProfilerCallback, ThroughputCallback
from lightning_forge_profiling.result_types import Finding

BATCH_SIZE = 8
TRY_WORKERS = "try_num_workers"  # in the evidence of a finding


class Photos(Dataset[tuple[Tensor, int]]):
    """Random pictures. The planted problem: each takes a while to arrive."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(0.002)  # a small file from a disk on the network
        return torch.rand(3, 32, 32), index % 10


class Classifier(L.LightningModule):
    """A small convolutional network. Nothing in it knows that it is being profiled."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(512, 10),
        )

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        photos, labels = batch
        loss = F.cross_entropy(self.network(photos), labels)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@dataclass
class Run:
    """A training: its folder, and what the callbacks found."""

    folder: str
    analysis: Analysis

    @property
    def step_ms(self) -> float:
        """The mean step."""
        return self.analysis.run.timing.step_ms.mean

    @property
    def data_ms(self) -> float:
        """How long the mean step waits for its batch."""
        return self.analysis.run.timing.regions["data"].device_ms


def train(name: str, num_workers: int, args: argparse.Namespace) -> Run:
    """Train for some steps."""
    L.seed_everything(0, verbose=False)
    throughput = ThroughputCallback()
    trainer = L.Trainer(
        max_epochs=1,
        accelerator=args.accelerator,
        devices=1,
        logger=TensorBoardLogger(args.out, name=name),
        enable_model_summary=False,
        callbacks=[ForgeProfilerCallback(start_step=5, end_step=8), throughput],
    )
    photos = Photos(args.steps * BATCH_SIZE)
    trainer.fit(
        Classifier(), DataLoader(photos, BATCH_SIZE, num_workers=num_workers, persistent_workers=num_workers > 0)
    )
    return Run(trainer.log_dir, throughput.analysis())


def forge_profiling(*arguments: str) -> None:
    """Show a command, and run it."""
    print("$ forge-profiling", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "lightning_forge_profiling", *arguments], check=True)


def outcome(finding: Finding, before: Run, after: Run) -> str:
    """The predicted gain beside the measured one."""
    predicted_ms, saved_ms = finding.saves.ms_per_step, round(before.step_ms - after.step_ms, 1)
    low_ms, high_ms = (round(predicted_ms * pct / finding.share_pct, 1) for pct in (finding.low_pct, finding.high_pct))
    apart = "within that"
    if saved_ms > high_ms:
        apart = f"{saved_ms - high_ms:.1f} ms more"
    elif saved_ms < low_ms:
        apart = f"{low_ms - saved_ms:.1f} ms less"
    if any(run.analysis.verdict.startswith("cpu-") for run in (before, after)):
        apart += ", on a busy machine"
    return (
        f"predicted: {'at most ' if finding.saves.at_most else ''}{predicted_ms:.1f} ms saved per step "
        f"(between {low_ms:.1f} and {high_ms:.1f}); measured: {saved_ms:.1f} ms, {apart}\n"
        f"A step took {before.step_ms:.1f} ms, {before.data_ms:.1f} of them waiting for data; "
        f"now {after.step_ms:.1f} ms, {after.data_ms:.1f} of them waiting."
    )


def main() -> None:
    """Train twice, as planted and as the verdict advises, and then let a command do that."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="of each of the two runs (default: %(default)s)")
    parser.add_argument("--accelerator", default="auto", help="auto (default), cpu, gpu, mps")
    parser.add_argument("--out", type=Path, default=Path("demo_runs"), help="default: %(default)s")
    args = parser.parse_args()
    logging.disable(logging.INFO)  # Lightning's notes, so that the tables stand out
    warnings.simplefilter("ignore")  # PyTorch warns of more workers than cores; these mostly wait
    torch.set_num_threads(1)  # a busy machine then disturbs the figures less

    print("1. Train with a slow data loader, without workers\n", flush=True)
    before = train("before", 0, args)
    verdict, text = before.analysis.verdict, before.analysis.verdict_text
    finding = next((found for found in before.analysis.findings if found.code == "input-bound"), None)
    if finding is None or finding.low_pct is None or TRY_WORKERS not in finding.evidence:
        sys.exit(f"No prediction: it takes more --steps, or a machine that is less busy. {text}")
    if verdict != finding.code:
        print(f"\nThe machine is busy, so {verdict} comes before {finding.code}, and all figures are unreliable.")
    workers = finding.evidence[TRY_WORKERS]

    print(f"\n2. Apply the fix of {finding.code}: num_workers={workers}, persistent_workers=True\n", flush=True)
    after = train("after", workers, args)

    print("\n3. Compare\n")
    forge_profiling("compare", before.folder, after.folder)
    print(f"\n{outcome(finding, before, after)}")

    print("\n4. The same by one command, which starts this script again and changes it from outside\n", flush=True)
    options = ("--steps", str(args.steps), "--accelerator", args.accelerator)
    forge_profiling("try", "--yes", "--budget", "1m", "--only", "workers", __file__, *options)

    print("\nWhere to look:")
    if shutil.which("forge-profiling") is None:
        print(f"  source {sys.prefix}/bin/activate")
    print(f"  the report, in the browser:  forge-profiling view {before.folder}")
    print(f"  the trace, in Perfetto:      forge-profiling view --perfetto {before.folder}")
    print(f"  the metrics over the steps:  tensorboard --logdir {args.out}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
