"""PyG: graphs are classified by a GIN; its data module makes one large graph of those of a batch."""

import lightning as L
import torch
from digests import print_digest
from torch.nn import functional
from torch_geometric.data.lightning import LightningDataset
from torch_geometric.datasets import FakeDataset
from torch_geometric.nn import GIN, MLP, global_add_pool
from torchmetrics import Accuracy


class Classifier(L.LightningModule):
    def __init__(self, features, classes):
        super().__init__()
        self.gnn = GIN(features, 32, num_layers=3, dropout=0.2, jk="cat")
        self.head = MLP([32, 32, classes], norm="batch_norm", dropout=0.2)
        self.accuracy = Accuracy("multiclass", num_classes=classes)

    def forward(self, data):
        return self.head(global_add_pool(self.gnn(data.x, data.edge_index), data.batch))

    def training_step(self, data, _index):
        return functional.cross_entropy(self(data), data.y)

    def validation_step(self, data, _index):
        self.accuracy(self(data), data.y)
        self.log("val_accuracy", self.accuracy, prog_bar=True, batch_size=data.num_graphs)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


L.seed_everything(0)
graphs = FakeDataset(num_graphs=320, avg_num_nodes=40, avg_degree=6, num_channels=16, num_classes=4, task="graph")
data = LightningDataset(graphs[:256], graphs[256:], batch_size=16)
model = Classifier(graphs.num_features, graphs.num_classes)
trainer = L.Trainer(max_epochs=4, accelerator="cpu", log_every_n_steps=5)
trainer.fit(model, data)
print_digest(model.state_dict())
