"""One rank of two hosts with two CPU processes each, of which rank 2 takes 100 ms longer in forward.

The folder, and `unheard` for a run without a record, `killed` for ranks that are killed once two windows are recorded.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning.pytorch.loggers import CSVLogger

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from tests.models import Classifier, loader, quiet_trainer

SLOW_S, STEPS = 0.1, 70


class Slow(Classifier):
    """Sleeps in forward on one rank, and may be killed in its last steps."""

    def training_step(self, batch):
        if self.global_rank == 2:
            time.sleep(SLOW_S)
        if self.seen == STEPS - 5 and "killed" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch)


def main(folder, *options):
    trainer = quiet_trainer(
        ForgeProfilerCallback(20, 24, every=30),
        ThroughputCallback(record="unheard" not in options),
        devices=2,
        num_nodes=2,
        strategy="ddp",
        logger=CSVLogger(folder, name="csv"),
        default_root_dir=folder,
        log_every_n_steps=10,
    )
    trainer.fit(Slow(), loader(STEPS * 4 * 4))


if __name__ == "__main__":
    main(*sys.argv[1:])
