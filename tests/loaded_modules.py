"""Samples that say what their worker has imported; this file imports none of the package itself."""

import sys

import torch
from torch.utils.data import Dataset, get_worker_info


class LoadedModules(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        worker, sampled = get_worker_info(), "lightning_forge_profiling.run.worker_stacks" in sys.modules
        assert worker is not None
        return torch.tensor([float(worker.id), float(sampled)])
