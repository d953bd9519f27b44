"""Two CPU processes whose traces go to a remote folder: `bucket://`, which is FOLDER/bucket."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import fsspec
from fsspec.implementations.local import LocalFileSystem

from lightning_forge_profiling import ForgeProfilerCallback, ThroughputCallback
from tests.models import Classifier, loader, quiet_trainer


class Bucket(LocalFileSystem):
    """A place that both processes can reach."""

    protocol = "bucket"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).replace("bucket://", f"{os.environ['BUCKET']}/"))


def main(folder):
    os.environ["BUCKET"] = f"{folder}/bucket"
    fsspec.register_implementation("bucket", Bucket)
    trainer = quiet_trainer(
        ForgeProfilerCallback(2, 4, trace_dir="bucket://traces"),
        ThroughputCallback(warmup_steps=1),
        devices=2,
        strategy="ddp",
        default_root_dir=folder,
    )
    trainer.fit(Classifier(), loader(80))


if __name__ == "__main__":
    main(*sys.argv[1:])
