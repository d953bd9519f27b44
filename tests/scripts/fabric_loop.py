"""A Fabric loop for the CPU; its arguments say whether it calls hooks, or `step`, and on how many ranks it runs."""

import subprocess
import sys
from contextlib import nullcontext

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

import lightning_forge_profiling as forge


def main(*does):
    if "child" in does:
        subprocess.run([sys.executable, "-c", ""], check=True)
    strategy = "ddp" if "two" in does else "ddp_fork" if "forked" in does else "auto"
    callbacks = [forge.profile(forge.ForgeProfilerCallback(start_step=5, end_step=8))] if "given" in does else []
    fabric = Fabric(accelerator="cpu", devices=1 if strategy == "auto" else 2, strategy=strategy, callbacks=callbacks)
    fabric.launch(train, *does)


def train(fabric, *does):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(96, 8)), batch_size=4))
    for number, batch in enumerate(loader):
        if "hooks" in does:
            fabric.call("on_train_batch_start", batch=batch, batch_idx=number)
        with forge.step() if "step" in does else nullcontext():
            fabric.backward(model(batch[0]).sum())
            optimizer.step()
        if "hooks" in does:
            fabric.call("on_train_batch_end", None, batch, number)
    sys.stdout.write("trained\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
