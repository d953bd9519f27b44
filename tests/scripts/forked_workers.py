"""Four fits with forked workers, which collect what the fits before them have left. Prints each fit's steps."""

import gc
import sys

import torch

from benchmarks.workloads import SmallKernels, trainer
from lightning_forge_profiling import ThroughputCallback


class Collects(torch.utils.data.Dataset):
    """Collects garbage for each sample."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        gc.collect()
        return torch.ones(64, 64)


def main(folder):
    """Fit."""
    gc.disable()
    for _ in range(4):
        ours = ThroughputCallback(warmup_steps=2)
        loader = torch.utils.data.DataLoader(Collects(), num_workers=2, multiprocessing_context="fork")
        trainer(folder, 16, callbacks=[ours]).fit(SmallKernels(), loader)
        print(f"steps: {ours.analysis().run.timing.all_steps}")


if __name__ == "__main__":
    main(sys.argv[1])
