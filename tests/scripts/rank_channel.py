"""Train on the CPU until rank 0 has heard all ranks, or enough steps have gone by.

The folder, then NAME=VALUE: `strategy`, `nodes`, `devices` (of a node), `steps` after which it is over in any case; and
`apart` for a folder of its own for each rank, `dies` for rank 1 that raises in its first life, `store` for a signal to the
process of the store: `kill` or `stop` after it has answered, `hung` before.
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import lightning as L

from lightning_forge_profiling import ThroughputCallback
from lightning_forge_profiling.names import RANKS_JSON
from tests.models import Classifier, loader, quiet_trainer

STEP_S = 0.02


class EndsOnceAllAreHeard(L.Callback):
    """Rank 0 looks into the record as a user does, and all ranks stop together."""

    def __init__(self, folder, most_steps):
        self.folder, self.most_steps, self.seen = folder, most_steps, {}

    def heard(self):
        """The steps of the ranks by the newest record."""
        files = sorted(self.folder.rglob(RANKS_JSON), key=lambda path: path.stat().st_mtime)
        heard = json.loads(files[-1].read_text()) if files else []
        return {one["pulse"]["rank"]: one["pulse"]["step"] for one in heard}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        time.sleep(STEP_S)
        if batch_idx % 10 == 9:
            over = 0 < self.most_steps <= batch_idx + 1
            if trainer.is_global_zero and not self.most_steps:
                heard = self.heard()
                over = len(heard) == trainer.world_size and min(heard.values()) >= 10
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
    trainer = quiet_trainer(
        ThroughputCallback(warmup_steps=1),
        EndsOnceAllAreHeard(own, int(chosen.get("steps", 0))),
        *([DiesOnce()] if "dies" in chosen else []),
        strategy=chosen.get("strategy", "ddp"),
        devices=int(chosen.get("devices", 1)),
        num_nodes=int(chosen.get("nodes", 1)),
        default_root_dir=own,
        max_epochs=1,
    )
    trainer.fit(Classifier(), loader(1 << 16))
    print("done", trainer.global_rank, trainer.global_step)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
