"""pytorch-forecasting: a Temporal Fusion Transformer, with validation, early stopping and a logger."""

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from digests import print_digest
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet

SHOPS, DAYS, HORIZON = 8, 60, 5

pl.seed_everything(0)
day = np.tile(np.arange(DAYS), SHOPS)
shop = np.repeat(np.arange(SHOPS), DAYS)
sold = 10 + shop + 3 * np.sin(day / 3) + np.random.default_rng(0).normal(0, 0.5, len(day))
sales = pd.DataFrame({"day": day, "shop": shop.astype(str), "sold": sold})

training = TimeSeriesDataSet(
    sales[sales.day < DAYS - HORIZON],
    time_idx="day",
    target="sold",
    group_ids=["shop"],
    static_categoricals=["shop"],
    time_varying_known_reals=["day"],
    time_varying_unknown_reals=["sold"],
    max_encoder_length=15,
    max_prediction_length=HORIZON,
)
validation = TimeSeriesDataSet.from_dataset(training, sales, predict=True, stop_randomization=True)
model = TemporalFusionTransformer.from_dataset(
    training, hidden_size=8, attention_head_size=1, hidden_continuous_size=4, loss=QuantileLoss(), learning_rate=0.01
)
trainer = pl.Trainer(
    max_epochs=2,
    accelerator="cpu",
    gradient_clip_val=0.1,
    logger=CSVLogger("logs"),
    callbacks=[EarlyStopping("val_loss"), LearningRateMonitor()],
)
trainer.fit(
    model,
    train_dataloaders=training.to_dataloader(train=True, batch_size=16),
    val_dataloaders=validation.to_dataloader(train=False, batch_size=16),
)
print_digest(model.state_dict())
