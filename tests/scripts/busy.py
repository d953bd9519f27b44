"""Trains a healthy model for some seconds and prints the verdict and the findings' codes as JSON."""

import json
import sys

import torch
from torch.nn import functional as F

from lightning_forge_profiling import ThroughputCallback
from tests.models import Classifier, quiet_trainer

STARTED = 100
"""The step that says that training is under way."""


class Wide(Classifier):
    """Its step is computation, some milliseconds."""

    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Sequential(torch.nn.Linear(8, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024))
        self.head = torch.nn.Linear(1024, 2)

    def training_step(self, batch, index):
        if index == STARTED:
            sys.stdout.write("training\n")
            sys.stdout.flush()
        inputs, labels = batch
        return F.cross_entropy(self.head(self.wide(inputs)), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def batches(steps):
    batch = torch.rand(128, 8), torch.randint(0, 2, (128,))
    return torch.utils.data.DataLoader([batch] * steps, batch_size=None)


if __name__ == "__main__":
    torch.set_num_threads(1)
    callback = ThroughputCallback(record=False)
    quiet_trainer(callback, max_epochs=1, logger=False).fit(Wide(), batches(int(sys.argv[1])))
    analysis = callback.analysis()
    cpu = analysis.run.machine.cpu
    sys.stdout.write(
        json.dumps(
            {
                "verdict": analysis.verdict,
                "text": analysis.verdict_text,
                "note": analysis.findings_note,
                "findings": {found.code: found.share_pct for found in analysis.findings},
                "evidence": dict(analysis.findings[0].evidence) if analysis.findings else {},
                "waits_pct": cpu and cpu.waits_pct,
                "step_ms": analysis.run.timing.step_ms.mean,
            }
        )
        + "\n"
    )
