"""Kornia: batches are augmented after their transfer, in the hook of the LightningModule that is meant for this."""

import kornia.augmentation as K
import lightning as L
import torch
from digests import print_digest
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SIZE, CLASSES = 32, 4


class Augmentation(nn.Module):
    def __init__(self):
        super().__init__()
        self.transforms = nn.Sequential(
            K.RandomHorizontalFlip(p=0.5),
            K.RandomAffine(degrees=15, translate=(0.1, 0.1), p=0.7),
            K.ColorJiggle(0.2, 0.2, 0.2, 0.1, p=0.7),
            K.RandomGaussianBlur((3, 3), (0.1, 2.0), p=0.3),
        )

    @torch.no_grad()
    def forward(self, images):
        return self.transforms(images)


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.augmentation = Augmentation()
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES),
        )  # fmt: skip

    def on_after_batch_transfer(self, batch, _dataloader_index):
        images, labels = batch
        return (self.augmentation(images) if self.trainer.training else images), labels

    def training_step(self, batch, _index):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch, _index):
        images, labels = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(images), labels), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def examples(count):
    labels = torch.randint(CLASSES, (count,))
    return TensorDataset((torch.rand(count, 3, SIZE, SIZE) + labels.view(-1, 1, 1, 1) / CLASSES) / 2, labels)


L.seed_everything(0)
model = Classifier()
trainer = L.Trainer(max_epochs=2, accelerator="cpu", log_every_n_steps=10)
trainer.fit(model, DataLoader(examples(512), batch_size=16, shuffle=True), DataLoader(examples(64), batch_size=16))
print_digest(model.state_dict())
