"""A plain PyTorch loop for the CPU; its argument says what happens in it, or after it."""

import os
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

import lightning_forge_profiling as forge


class Points(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        time.sleep(0.001)
        return torch.ones(8) * i


def main(does):
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for number, batch in enumerate(DataLoader(Points(), batch_size=4)):
        with forge.step():
            model(batch).sum().backward()
            if does == "fail" and number == 20:
                raise ValueError("no such batch")
            optimizer.step()
    if does == "fail later":
        raise ValueError("no such file")
    if does == "leave":
        os._exit(3)
    sys.stdout.write(f"weights {[weight.sum().item() for weight in model.parameters()]}\n")


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    main(sys.argv[1])
