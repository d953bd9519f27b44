"""Optuna: a Trainer for each trial, without logger, checkpoints and progress bar; one trial is pruned in its fit."""

import lightning as L
import optuna
import torch
from digests import print_digest
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

TRIALS = 4


class Regression(L.LightningModule):
    def __init__(self, width, rate):
        super().__init__()
        self.rate = rate
        self.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))

    def training_step(self, batch, _index):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        if not loss.isfinite():
            raise optuna.TrialPruned
        return loss

    def validation_step(self, batch, _index):
        inputs, targets = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(inputs), targets))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def objective(trial):
    L.seed_everything(trial.number)
    inputs = torch.randn(480, 8)
    data = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    rate = 1e6 if trial.number == 1 else trial.suggest_float("rate", 1e-4, 1e-2, log=True)
    model = Regression(trial.suggest_int("width", 8, 64), rate)
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(model, DataLoader(data, batch_size=16, shuffle=True), DataLoader(data, batch_size=96))
    weights.update({f"{trial.number} {name}": values for name, values in model.state_dict().items()})
    return trainer.callback_metrics["val_loss"].item()


weights = {}
study = optuna.create_study(study_name="widths", sampler=optuna.samplers.TPESampler(seed=0))
study.optimize(objective, n_trials=TRIALS)
print("trials", [(trial.state.name, trial.value) for trial in study.trials], "best", study.best_trial.number)
print_digest(weights)
