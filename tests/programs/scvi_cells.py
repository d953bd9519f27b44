"""scvi-tools: a variational autoencoder of gene counts; what it learned is kept with the model as `history`."""

import anndata
import numpy as np
import scvi
from digests import print_digest

CELLS, GENES = 1_000, 80

scvi.settings.seed = 0
rng = np.random.default_rng(0)
batch = rng.integers(0, 2, CELLS)
rates = rng.gamma(2.0, 1.0, (4, GENES))[rng.integers(0, 4, CELLS)] * (1 + batch[:, None])
cells = anndata.AnnData(rng.poisson(rates).astype(np.float32), obs={"batch": batch.astype(str)})

scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
model = scvi.model.SCVI(cells, n_latent=5, n_hidden=32)
model.train(max_epochs=4, batch_size=64, accelerator="cpu")

print("history", {name: values.to_numpy().ravel().tolist() for name, values in model.history.items()})
print_digest({"latent": model.get_latent_representation(), **model.module.state_dict()})
