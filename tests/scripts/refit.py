"""Fit in this process, then with the same callbacks in two spawned ones, then here again."""

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from tests.models import Classifier, loader, quiet_trainer


def fit(folder, callbacks, **options):
    trainer = quiet_trainer(*callbacks, default_root_dir=folder, **options)
    trainer.fit(Classifier(), loader(80))


def main(folder):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    callbacks = [ForgeProfilerCallback(2, 4, tensorboard=False), ThroughputCallback(1, flops_per_batch=1e6)]
    fit(folder / "first", callbacks, devices=1)
    first = callbacks[0].trace_report().status
    fit(folder / "spawned", callbacks, devices=2, strategy="ddp_spawn")
    fit(folder / "second", callbacks, devices=1)
    print(f"first: {first}, second: {callbacks[0].trace_report().status}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
