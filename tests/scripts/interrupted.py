"""Train until something from outside ends it: WITH or WITHOUT the callbacks, the step to announce, the folder."""

import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from tests.models import Classifier, loader, quiet_trainer


class Announces(Classifier):
    """Says when it is in a step, and waits there for what comes."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def training_step(self, batch):
        if self.seen == self.at:
            print("here", flush=True)
            while not self.trainer.received_sigterm:  # SIGINT raises out of it, and SIGKILL ends a test that fails
                time.sleep(0.01)
        return super().training_step(batch)


def main(which, at, folder):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    callbacks = [ForgeProfilerCallback(2, 5, trace_dir=folder), ThroughputCallback()] if which == "with" else []
    trainer = quiet_trainer(*callbacks)
    trainer.fit(Announces(int(at)), loader(64))
    print("went on")


if __name__ == "__main__":
    main(*sys.argv[1:])
