"""Find what bounds a plain PyTorch loop: mark its steps, and read the table at the end; no Trainer.

Run it with::

    python examples/plain_loop.py --load-ms 2
"""

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lightning_forge_profiling as forge


class Samples(Dataset[torch.Tensor]):
    """Random samples that take a while to load."""

    def __init__(self, count: int, load_ms: float) -> None:
        self.count, self.load_ms = count, load_ms

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.load_ms / 1e3)
        return torch.full((256,), index / self.count)


def main() -> None:
    """Train a small autoencoder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--load-ms", type=float, default=2.0, help="for one of 8 samples; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("demo_runs/loop"), help="default: %(default)s")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Samples(8 * args.steps, args.load_ms), batch_size=8)

    with forge.profile(forge.ForgeProfilerCallback(start_step=5, end_step=8), log_dir=args.out):
        for samples in loader:
            with forge.step():
                with forge.region("transfer"):
                    inputs = samples.to(device, non_blocking=True)
                loss = nn.functional.mse_loss(model(inputs), inputs)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
