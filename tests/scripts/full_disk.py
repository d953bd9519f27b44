"""Train with a window whose trace may not fit: FOLDER, and the largest size of a file (0: any)."""

import resource
import sys
from pathlib import Path

import lightning as L

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning_forge_profiling import ForgeProfilerCallback
from tests.models import Classifier, loader, quiet_trainer


def main(folder, largest):
    L.seed_everything(0)
    if int(largest):
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest), hard))
    trainer = quiet_trainer(ForgeProfilerCallback(2, 12, trace_dir=folder))
    model = Classifier()
    trainer.fit(model, loader(64))
    print("weights", *(parameter.double().sum().item().hex() for parameter in model.parameters()))


if __name__ == "__main__":
    main(*sys.argv[1:])
