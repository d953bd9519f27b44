"""Train with a scheduled torch.profiler of the user's own beside ours: START and END of our window."""

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import lightning as L
from torch.profiler import ProfilerActivity, profile, schedule

from lightning_forge_profiling import ForgeProfilerCallback
from tests.models import Classifier, loader, quiet_trainer


class TheirProfiler(L.Callback):
    """As in PyTorch's tutorial: waits in step 0, warms up in steps 1 to 3, records steps 4 and 5."""

    def on_train_start(self, *_):
        self.profiler = profile(
            activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=3, active=2, repeat=1)
        )
        self.profiler.start()

    def on_train_batch_end(self, *_):
        self.profiler.step()

    def on_train_end(self, *_):
        self.profiler.stop()


def main(start, end):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    ours, theirs = ForgeProfilerCallback(int(start), int(end)), TheirProfiler()
    trainer = quiet_trainer(ours, theirs)
    trainer.fit(Classifier(), loader(64))
    recorded = sum(event.count for event in theirs.profiler.key_averages() if event.key == "aten::linear")
    print(f"theirs recorded {recorded} linear layers, ours: {ours.trace_report().status}")


if __name__ == "__main__":
    main(*sys.argv[1:])
