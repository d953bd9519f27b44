"""Darts: an N-BEATS model of a time series, fitted again at three points in time, by Trainers without logger."""

import numpy as np
from darts import TimeSeries
from darts.models import NBEATSModel
from digests import print_digest

time = np.arange(400)
noise = np.random.default_rng(0).normal(0, 0.1, len(time))
series = TimeSeries.from_values((np.sin(time / 6) + time / 400 + noise).astype(np.float32))

model = NBEATSModel(
    input_chunk_length=24,
    output_chunk_length=6,
    num_stacks=2,
    num_blocks=1,
    layer_widths=32,
    n_epochs=2,
    random_state=0,
    pl_trainer_kwargs={"accelerator": "cpu"},
)
forecast = model.historical_forecasts(series, start=0.85, forecast_horizon=6, stride=20, retrain=True)
print_digest({"forecast": forecast.values()})
