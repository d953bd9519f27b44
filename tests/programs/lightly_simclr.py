"""Lightly: SimCLR on two views of each image; its transforms are the work of the loader."""

import lightning as L
import torch
import torchvision
from digests import print_digest
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from lightly.transforms import SimCLRTransform
from torch.utils.data import DataLoader

SIZE = 32


class SimCLR(L.LightningModule):
    def __init__(self):
        super().__init__()
        resnet = torchvision.models.resnet18()
        self.backbone = torch.nn.Sequential(*list(resnet.children())[:-1])
        self.projection_head = SimCLRProjectionHead(512, 256, 64)
        self.criterion = NTXentLoss()

    def forward(self, images):
        return self.projection_head(self.backbone(images).flatten(start_dim=1))

    def training_step(self, batch, _index):
        (first, second), _labels, *_ = batch
        loss = self.criterion(self(first), self(second))
        self.log("train_loss_ssl", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.06, momentum=0.9, weight_decay=5e-4)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2)]


L.seed_everything(0)
images = torchvision.datasets.FakeData(128, (3, SIZE, SIZE), transform=SimCLRTransform(input_size=SIZE))
model = SimCLR()
trainer = L.Trainer(max_epochs=2, accelerator="cpu", log_every_n_steps=8)
trainer.fit(model, DataLoader(images, batch_size=8, shuffle=True, drop_last=True))
print_digest(model.state_dict())
