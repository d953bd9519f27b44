"""What a further fit of the same module takes longer under `forge-profiling run`, as in cross-validation or a sweep.

python -m benchmarks.further_fits
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).parents[1]


class Small(L.LightningModule):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: Sequence[torch.Tensor]) -> torch.Tensor:
        """The mean of the squares."""
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters())


def fits(count: int) -> list[float]:
    """Milliseconds of each of so many fits of 25 steps."""
    torch.set_num_threads(1)
    data = DataLoader(TensorDataset(torch.randn(400, 64)), batch_size=16)
    took = []
    for _ in range(count):
        began = perf_counter()
        trainer = L.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Small(), data)
        took.append(1e3 * (perf_counter() - began))
    return took


def median_ms(*command: str, count: int) -> float:
    """The median of the fits after the second in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *command, str(Path(__file__)), "--child", "--fits", str(count)],
            cwd=folder,
            env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        )
    return median(json.loads(done.stdout.splitlines()[-1])[2:])


def main() -> None:
    """Print the difference, in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7, help="pairs of processes")
    parser.add_argument("--fits", type=int, default=12, help="fits in each")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(fits(args.fits)))
        return
    more = []
    for _ in range(args.pairs):
        plain = median_ms(count=args.fits)
        under_run = median_ms("-m", "lightning_forge_profiling", "run", count=args.fits)
        more.append(under_run - plain)
        print(f"{plain:.1f} ms plain, {under_run:.1f} ms under run")
    low, _, high = quantiles(more, n=4)
    print(f"a further fit takes {median(more):+.1f} ms (quartiles {low:+.1f} to {high:+.1f})")


if __name__ == "__main__":
    main()
