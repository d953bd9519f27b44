"""Train on the CPU until rank 0 has heard all ranks, or so many steps have gone by.

The folder, then NAME or NAME=VALUE: `strategy`, `nodes`, `devices` (of a node); `apart` for a folder of its own for
each rank; `dies` for rank 1 that fails in its first life; `signal` to the process `store` once all are heard, after
which rank 0 has to hear all of them again.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import lightning as L

from lightning_forge_profiling import ThroughputCallback
from lightning_forge_profiling.names import RANKS_JSON
from tests.models import Classifier, loader, quiet_trainer

STEP_S = 0.02
MORE_STEPS = 5
MOST_STEPS = 6000  # two minutes: something does not work


class EndsOnceAllAreHeard(L.Callback):
    """Rank 0 looks into the record as a user does, and all ranks stop together."""

    def __init__(self, folder, signalled):
        self.folder, self.signalled = folder, signalled
        self.before = 0

    def least(self, world_size):
        """The fewest steps of a rank by the newest record; 0 while one is missing."""
        files = sorted(self.folder.rglob(RANKS_JSON), key=lambda path: path.stat().st_mtime)
        heard = json.loads(files[-1].read_text()) if files else []
        return min((one["pulse"]["step"] for one in heard), default=0) if len(heard) == world_size else 0

    def heard(self, trainer):
        """Whether rank 0 has now all ranks on record, also after the signal to the store."""
        if self.least(trainer.world_size) < self.before + MORE_STEPS:
            return False
        if self.signalled:
            os.kill(*self.signalled)
            self.signalled, self.before = (), trainer.global_step
            return False
        return True

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        time.sleep(STEP_S)
        if batch_idx % 10 == 9:
            over = trainer.is_global_zero and (self.heard(trainer) or batch_idx > MOST_STEPS)
            trainer.should_stop = trainer.strategy.reduce_boolean_decision(over, all=False)


class DiesOnce(L.Callback):
    """Rank 1 fails in its step 5, unless it was started anew."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 5 and trainer.global_rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise RuntimeError("dies once")


def main(folder, *options):
    chosen = dict(option.partition("=")[::2] for option in options)
    own = Path(folder, os.environ["RANK"]) if "apart" in chosen else Path(folder)
    own.mkdir(exist_ok=True)
    signalled = (int(chosen["store"]), signal.Signals[chosen["signal"]]) if "signal" in chosen else ()
    trainer = quiet_trainer(
        ThroughputCallback(warmup_steps=1),
        EndsOnceAllAreHeard(own, signalled),
        *([DiesOnce()] if "dies" in chosen else []),
        strategy=chosen.get("strategy", "ddp"),
        devices=int(chosen.get("devices", 1)),
        num_nodes=int(chosen.get("nodes", 1)),
        default_root_dir=own,
    )
    trainer.fit(Classifier(), loader(1 << 16))
    print(f"rank {trainer.global_rank} is done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
