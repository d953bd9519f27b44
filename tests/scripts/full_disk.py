"""Train with a window whose trace does not fit: FOLDER, the largest size of a file (0: any), a file to fill up with."""

import contextlib
import resource
import sys
from pathlib import Path

import lightning as L

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from lightning_forge_profiling import ForgeProfilerCallback  # noqa: E402
from tests.models import Classifier, loader  # noqa: E402


class Fill(L.Callback):
    """Leaves room on the disk for the raw trace that is there, and for nothing more."""

    def __init__(self, filler):
        self.filler = filler

    def on_train_batch_end(self, *_):
        raw = next(self.filler.parent.rglob(".rank0.raw.json"), None)
        if raw is not None and raw.stat().st_size and not self.filler.exists():
            with self.filler.open("wb", buffering=0) as file:
                for size in (1 << 18, 1 << 12, 1):
                    with contextlib.suppress(OSError):
                        while file.write(bytes(size)) == size:
                            pass


def main(folder, largest, *filler):
    L.seed_everything(0)
    if int(largest):
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest), hard))
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[ForgeProfilerCallback(2, 4, trace_dir=folder), *(Fill(Path(name)) for name in filler)],
    )
    model = Classifier()
    trainer.fit(model, loader())
    print("weights", *(parameter.double().sum().item().hex() for parameter in model.parameters()))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
