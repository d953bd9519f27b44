"""Train with two CPU processes.

STRATEGY, the folder, and any of `plain`, `rank0`, `fails=RANK`, `file`, `stopped`, `validates`,
`profiled` for rank 1 that PyTorch's profiler records already.
"""

import logging
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PyTorchProfiler

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from tests.models import Classifier, loader, quiet_trainer


def stop_child():
    """Stop the process that will finish this one's trace, as a machine without a free processor would."""
    for listing in Path("/proc/self/task").glob("*/children"):
        for pid in listing.read_text().split():
            if b"lightning_forge_profiling.finish" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(int(pid), signal.SIGSTOP)


class FailsOnOneRank(Classifier):
    """Raises in its step 4 on the given rank."""

    def __init__(self, rank, *, stopped):
        super().__init__()
        self.rank, self.stopped = rank, stopped

    def training_step(self, batch):
        if self.seen == 4 and self.stopped:
            stop_child()
        if self.seen == 4 and self.global_rank == self.rank:
            raise RuntimeError("mine")
        return super().training_step(batch)


class ValidatesSlowly(Classifier):
    """Validates for longer on rank 1."""

    def validation_step(self, batch):
        time.sleep(0.4 if self.global_rank == 1 else 0.01)


def main(strategy, folder, *options):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    chosen = dict(option.partition("=")[::2] for option in options)
    forge = ForgeProfilerCallback(
        2,
        4 if "stopped" in chosen else 6,
        ranks=[0] if "rank0" in chosen else "all",
        trace_dir="/dev/null" if "file" in chosen else None,
    )
    if "profiled" in chosen:
        forge = ForgeProfilerCallback()
    recorded = "profiled" in chosen and os.environ.get("LOCAL_RANK") == "1"
    trainer = quiet_trainer(
        *([] if "plain" in chosen else [forge, ThroughputCallback(warmup_steps=1)]),
        devices=2,
        strategy=strategy,
        logger=CSVLogger(folder, name="csv"),
        default_root_dir=folder,
        log_every_n_steps=1,
        profiler=PyTorchProfiler(dirpath=folder, filename="theirs") if recorded else None,
    )
    if "validates" in chosen:
        trainer.fit(ValidatesSlowly(), loader(80), loader(16))
        return
    trainer.fit(FailsOnOneRank(int(chosen.get("fails", -1)), stopped="stopped" in chosen), loader(80))
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
