"""NeuralForecast: two models of the same series, with early stopping, each fitted by a Trainer of the package's own."""

import numpy as np
import pandas as pd
from digests import print_digest
from neuralforecast import NeuralForecast
from neuralforecast.models import LSTM, NHITS

SERIES, DAYS, HORIZON = 16, 200, 12

day = np.arange(DAYS)
sales = pd.concat(
    pd.DataFrame(
        {
            "unique_id": f"shop {shop}",
            "ds": pd.date_range("2025-01-01", periods=DAYS),
            "y": 10 + shop + 3 * np.sin(day / 7 + shop) + np.random.default_rng(shop).normal(0, 0.3, DAYS),
        }
    )
    for shop in range(SERIES)
)
settings = {"h": HORIZON, "input_size": 36, "max_steps": 60, "val_check_steps": 20, "early_stop_patience_steps": 2}
models = [
    NHITS(**settings, mlp_units=3 * [[32, 32]], batch_size=8, accelerator="cpu"),
    LSTM(**settings, encoder_hidden_size=16, decoder_hidden_size=16, batch_size=8, accelerator="cpu"),
]
forecasts = NeuralForecast(models=models, freq="D")
forecasts.fit(sales, val_size=HORIZON)
predicted = forecasts.predict()
print_digest({name: predicted[name].to_numpy() for name in ("NHITS", "LSTM")})
