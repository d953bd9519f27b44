"""Anomalib: a normalizing flow over a ResNet's features, by the package's Engine, with checkpoints; then its test."""

from pathlib import Path

import numpy as np
from anomalib.data import Folder
from anomalib.engine import Engine
from anomalib.models import Fastflow
from digests import print_digest
from lightning import seed_everything
from PIL import Image

SIZE = 64

seed_everything(0)
random = np.random.default_rng(0)
for folder in ("good", "scratched", "masks"):
    Path("parts", folder).mkdir(parents=True)
for index in range(64):
    pixels = random.normal(120, 10, (SIZE, SIZE, 3)).clip(0, 255).astype(np.uint8)
    if index % 8:
        Image.fromarray(pixels).save(f"parts/good/{index:02}.png")
    else:
        mask = np.zeros((SIZE, SIZE), bool)
        mask[index : index + 4, 8:56] = True
        pixels[mask] = 250
        Image.fromarray(pixels).save(f"parts/scratched/{index:02}.png")
        Image.fromarray(mask).save(f"parts/masks/{index:02}.png")

parts = Folder(
    name="parts",
    root="parts",
    normal_dir="good",
    abnormal_dir="scratched",
    mask_dir="masks",
    train_batch_size=4,
    eval_batch_size=8,
    num_workers=0,
    seed=0,
)
model = Fastflow(
    pre_trained=False, flow_steps=2, pre_processor=Fastflow.configure_pre_processor((SIZE, SIZE)), visualizer=False
)
engine = Engine(max_epochs=3, accelerator="cpu", devices=1)
engine.fit(model, datamodule=parts)
engine.test(model, datamodule=parts)
print_digest(model.state_dict())
