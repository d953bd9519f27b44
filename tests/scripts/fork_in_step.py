"""Forks in a step a process that leaves by `sys.exit`, and prints how that ended.

The arguments say what the step is of, and which it is.
"""

import os
import signal
import sys

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_forge_profiling as forge
from lightning_forge_profiling.profiler import ProfilingConfig, build_profiler


def fork():
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # where it would never end
        sys.exit(3)
    print("ended with", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


class Forks(L.LightningModule):
    def __init__(self, at):
        super().__init__()
        self.at, self.layer = at, torch.nn.Linear(8, 1)

    def training_step(self, batch, number):
        if number == self.at:
            fork()
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(at):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    data = DataLoader(TensorDataset(torch.ones(96, 8)), batch_size=4)
    L.Trainer(max_epochs=1, accelerator="cpu", devices=1, **quiet).fit(Forks(at), data)


def main(what, at):
    if what == "fit":
        fit(at)
    elif what == "further":
        fit(-1)
        fit(at)
    elif what == "loop":
        for step in range(24):
            with forge.step():
                torch.ones(4).sum()
                if step == at:
                    fork()
    else:
        with build_profiler(ProfilingConfig(enable=True, start_step=5, end_step=8)) as profiler:
            for step in range(10):
                torch.ones(4).sum()
                if step == at:
                    fork()
                profiler.step()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
