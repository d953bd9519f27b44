"""Train with a record: FOLDER, and any of `steps=N`, `ranks=N`, `largest=BYTES` for a file, `plain` for no record."""

import logging
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import lightning as L

from lightning_forge_profiling import ThroughputCallback
from tests.models import Classifier, loader, quiet_trainer


def main(folder, *options):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    chosen = dict(option.partition("=")[::2] for option in options)
    ranks = int(chosen.get("ranks", 1))
    L.seed_everything(0)
    if "largest" in chosen:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(chosen["largest"]), hard))
    trainer = quiet_trainer(
        ThroughputCallback(warmup_steps=1, record="plain" not in chosen),
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        max_epochs=-1,
        max_steps=int(chosen.get("steps", -1)),
        default_root_dir=folder,
        log_every_n_steps=1,
    )
    model = Classifier()
    trainer.fit(model, loader(400))
    print("weights", *(parameter.double().sum().item().hex() for parameter in model.parameters()))


if __name__ == "__main__":
    main(*sys.argv[1:])
