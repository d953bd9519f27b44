"""Train with `pytorch_lightning`, imported before or after our package or after `lightning`, as the argument says."""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

ORDERS = {
    "before": ("pytorch_lightning", "lightning_forge_profiling"),
    "after": ("lightning_forge_profiling", "pytorch_lightning"),
    "lightning-first": ("lightning.pytorch", "lightning_forge_profiling", "pytorch_lightning"),
}


def main(order, alone=""):
    for name in ORDERS[order]:
        module = importlib.import_module(name)
        if name == "lightning_forge_profiling":
            callbacks = [module.ForgeProfilerCallback(1, 3), module.ThroughputCallback(warmup_steps=1)]
    if alone:
        callbacks = callbacks[0]
    pl = sys.modules["pytorch_lightning"]
    from pytorch_lightning.demos.boring_classes import BoringModel  # noqa: PLC0415

    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=6,
        enable_progress_bar=False,
        logger=False,
        callbacks=callbacks,
        limit_val_batches=1,
    )
    trainer.fit(BoringModel())


if __name__ == "__main__":
    main(*sys.argv[1:])
