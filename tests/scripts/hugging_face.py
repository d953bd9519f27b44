"""An unchanged script: a tiny model under Hugging Face's Trainer; arguments are its settings as `name=value`."""

import json
import sys
import time

import torch
from transformers import Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(0.002)
        return {"x": torch.ones(16) * index / self.count}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def forward(self, x):
        return {"loss": self.layers(x).square().mean()}


def train(**settings):
    torch.manual_seed(1)
    model = Model()
    arguments = TrainingArguments(
        **{"output_dir": "out", "report_to": [], "per_device_train_batch_size": 4, "max_steps": 40, "use_cpu": True}
        | {"disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
        | settings
    )
    trainer = Trainer(model, arguments, train_dataset=Rows(200), eval_dataset=Rows(16))
    trainer.train()
    return model


if __name__ == "__main__":
    settings = {name: json.loads(value) for name, _, value in (each.partition("=") for each in sys.argv[1:])}
    weights = torch.cat([each.detach().flatten() for each in train(**settings).parameters()])
    print("WEIGHTS", weights.double().sum().item())
