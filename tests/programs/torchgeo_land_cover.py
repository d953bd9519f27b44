"""TorchGeo: the segmentation task on random patches of a scene and its land cover, both of which are GeoTIFFs."""

from pathlib import Path

import lightning as L
import numpy as np
import rasterio
from digests import print_digest
from rasterio.transform import from_origin
from torch.utils.data import DataLoader
from torchgeo.datasets import RasterDataset, stack_samples
from torchgeo.samplers import GridGeoSampler, RandomGeoSampler
from torchgeo.trainers import SemanticSegmentationTask

SIDE, PATCH = 128, 32


class LandCover(RasterDataset):
    filename_glob = "cover.tif"
    is_image = False


class Scene(RasterDataset):
    filename_glob = "scene.tif"


def write(path, bands):
    place = {"crs": "EPSG:32633", "transform": from_origin(500_000, 5_000_000, 10, 10)}
    size = {"height": SIDE, "width": SIDE, "count": len(bands), "dtype": bands.dtype}
    with rasterio.open(path, "w", driver="GTiff", **place, **size) as tif:
        tif.write(bands)


L.seed_everything(0)
cover = np.kron(np.random.default_rng(0).integers(0, 3, (16, 16)), np.ones((8, 8))).astype(np.uint8)
bands = np.random.default_rng(1).normal(0, 0.3, (4, SIDE, SIDE)) + cover
Path("scenes").mkdir()
write("scenes/cover.tif", cover[None])
write("scenes/scene.tif", bands.astype(np.float32))

scenes = Scene("scenes") & LandCover("scenes")
training = RandomGeoSampler(scenes, size=PATCH, length=48)
validation = GridGeoSampler(scenes, size=PATCH, stride=PATCH)
task = SemanticSegmentationTask(model="unet", backbone="resnet18", in_channels=4, num_classes=3, lr=1e-3)
trainer = L.Trainer(max_epochs=2, accelerator="cpu", log_every_n_steps=4)
trainer.fit(
    task,
    DataLoader(scenes, sampler=training, batch_size=4, collate_fn=stack_samples),
    DataLoader(scenes, sampler=validation, batch_size=4, collate_fn=stack_samples),
)
print_digest(task.state_dict())
