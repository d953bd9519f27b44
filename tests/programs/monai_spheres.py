"""MONAI: a 3D U-Net finds spheres in volumes, in crops that its transforms draw; validation is by sliding windows."""

import lightning as L
import numpy as np
import torch
from digests import print_digest
from monai.data import CacheDataset, DataLoader, create_test_image_3d, decollate_batch
from monai.inferers import sliding_window_inference
from monai.losses import DiceLoss
from monai.metrics import DiceMetric
from monai.networks.nets import UNet
from monai.transforms import (
    AsDiscrete,
    Compose,
    EnsureChannelFirstd,
    RandCropByPosNegLabeld,
    RandRotate90d,
    ScaleIntensityd,
)
from monai.utils import set_determinism

SIDE, CROP = 40, (32, 32, 32)


class Spheres(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = UNet(spatial_dims=3, in_channels=1, out_channels=1, channels=(8, 16, 32), strides=(2, 2))
        self.loss = DiceLoss(sigmoid=True)
        self.dice = DiceMetric()
        self.discrete = AsDiscrete(threshold=0)

    def training_step(self, batch, _index):
        loss = self.loss(self.net(batch["image"]), batch["label"])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _index):
        outputs = sliding_window_inference(batch["image"], CROP, 4, self.net)
        self.dice([self.discrete(volume) for volume in decollate_batch(outputs)], decollate_batch(batch["label"]))

    def on_validation_epoch_end(self):
        self.log("val_dice", self.dice.aggregate().item(), prog_bar=True)
        self.dice.reset()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


def volumes(count):
    state = np.random.RandomState(0)
    pairs = (create_test_image_3d(SIDE, SIDE, SIDE, num_objs=4, rad_max=10, random_state=state) for _ in range(count))
    return [{"image": image, "label": (label > 0).astype("float32")} for image, label in pairs]


keys = ["image", "label"]
loading = [EnsureChannelFirstd(keys, channel_dim="no_channel"), ScaleIntensityd(["image"])]
cropping = [RandCropByPosNegLabeld(keys, "label", CROP, num_samples=2), RandRotate90d(keys, prob=0.5)]

L.seed_everything(0)
set_determinism(0)
data = volumes(28)
training = CacheDataset(data[:24], Compose(loading + cropping), progress=False)
validation = CacheDataset(data[24:], Compose(loading), progress=False)
model = Spheres()
trainer = L.Trainer(max_epochs=2, accelerator="cpu", log_every_n_steps=4)
trainer.fit(model, DataLoader(training, batch_size=2, shuffle=True), DataLoader(validation, batch_size=1))
print_digest(model.state_dict())
