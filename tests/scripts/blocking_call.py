"""A training script on the CPU whose `training_step` waits in one function, and whose batches are made in another."""

import sys
import time

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate


def call_reward_server():
    time.sleep(0.02)


def score(loss):
    call_reward_server()
    return loss.detach()


def make_batch(samples):
    time.sleep(0.005)
    return default_collate(samples)


class Policy(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))

    def training_step(self, batch, _):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("score", score(loss))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def main():
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(512, 32), torch.randint(0, 2, (512,)))
    trainer = L.Trainer(
        max_steps=int(sys.argv[1]), accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Policy(), DataLoader(data, batch_size=8, collate_fn=make_batch))


if __name__ == "__main__":
    main()
