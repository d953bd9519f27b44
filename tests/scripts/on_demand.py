"""Train until there is a file `stop`. The folder, how many processes, arguments of ForgeProfilerCallback as JSON or
`none`, those of ThroughputCallback, and a step from which on `forward` takes 30 ms instead of 10; 0 for neither.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import lightning as L
from lightning.pytorch.loggers import CSVLogger

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from tests.models import Classifier, loader, quiet_trainer

FOLDER, RANKS, PROFILER, THROUGHPUT, SLOW_FROM = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]


class Stops(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step % 50 == 0 and (FOLDER / "stop").exists():
            trainer.should_stop = True


class Slows(Classifier):
    def training_step(self, batch):
        self.seen_steps = getattr(self, "seen_steps", 0) + 1
        if int(SLOW_FROM):
            time.sleep(0.01 if self.seen_steps <= int(SLOW_FROM) else 0.03)
        return super().training_step(batch)


if __name__ == "__main__":
    callbacks = [ThroughputCallback(**json.loads(THROUGHPUT)), Stops()]
    if PROFILER != "none":
        callbacks.append(ForgeProfilerCallback(**json.loads(PROFILER)))
    trainer = quiet_trainer(
        *callbacks,
        devices=RANKS,
        strategy="ddp" if RANKS > 1 else "auto",
        max_epochs=-1,
        max_steps=1_000_000,
        limit_val_batches=0,
        logger=CSVLogger(FOLDER),
        default_root_dir=FOLDER,
    )
    trainer.fit(Slows(), loader(4096 * RANKS))
