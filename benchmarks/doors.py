"""The same model through each door: do the callbacks, `ForgeProfiler` and Hugging Face's Trainer see the same step?

    python -m benchmarks.doors --rounds 10

Fresh processes in turns; each line has the median over the rounds of a region's mean, relative to the callbacks' run of
the same round, and the quartiles.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

DOORS = ("callbacks", "profiler", "hugging_face", "callbacks again")
REGIONS = ("data", "forward", "backward", "optimizer")
STEPS, BATCH = 120, 64


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Each row is waited for."""

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.0001)
        return {"x": torch.full((512,), index / len(self))}


class Model(nn.Module):
    """Some layers, whose products take most of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss, as Hugging Face's models give it."""
        return {"loss": F.mse_loss(self.layers(x), x)}


def lightning(door: str, folder: str) -> Any:
    """Train under the callbacks, or with the profiler."""
    import lightning as L  # noqa: PLC0415  (a process of Hugging Face's does without it)

    from lightning_forge_profiling import ForgeProfiler, ThroughputCallback  # noqa: PLC0415

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), fused=True)

    ours = ForgeProfiler(enabled=True, start_step=10**6) if door == "profiler" else ThroughputCallback(overhead=None)
    if isinstance(ours, ForgeProfiler):
        ours.callbacks = (ours.callbacks[0], ThroughputCallback(overhead=None))
    given = {"profiler": ours} if door == "profiler" else {"callbacks": [ours]}
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, **given,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(Rows(), BATCH))
    return ours.analysis()


def hugging_face(folder: str) -> Any:
    """Train with Hugging Face's Trainer."""
    from transformers import Trainer, TrainingArguments  # noqa: PLC0415

    from lightning_forge_profiling import HuggingFaceCallback, ThroughputCallback  # noqa: PLC0415

    ours = ThroughputCallback(overhead=None)
    arguments = TrainingArguments(
        folder, report_to=[], per_device_train_batch_size=BATCH, num_train_epochs=1, use_cpu=True, disable_tqdm=True,
        save_strategy="no", optim="adamw_torch_fused", max_grad_norm=0.0, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(Model(), arguments, train_dataset=Rows(), callbacks=[HuggingFaceCallback(ours)])
    trainer.train()
    return ours.analysis()


def measured(door: str) -> dict[str, float]:
    """The means of one run in a process of its own, in milliseconds."""
    command = [sys.executable, "-m", "benchmarks.doors", "--door", door]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Compare the doors, or train through one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--door", choices=DOORS)
    args = parser.parse_args()
    if args.door:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            analysis = hugging_face(folder) if args.door == "hugging_face" else lightning(args.door, folder)
        timing = analysis.run.timing
        means = {name: timing.regions[name].host_ms for name in REGIONS if name in timing.regions}
        print(json.dumps({"step": timing.step_ms.mean, **means}))
        return
    runs = [{door: measured(door) for door in DOORS} for _ in range(args.rounds)]
    for name in ("step", *REGIONS):
        print(f"{name:10} {statistics.median(run['callbacks'][name] for run in runs):6.2f} ms", end="")
        for door in DOORS[1:]:
            ratios = [run[door][name] / run["callbacks"][name] for run in runs]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"   {door} {middle:.3f} ({low:.3f} to {high:.3f})", end="")
        print()


if __name__ == "__main__":
    main()
