"""neuralforecast's NHITS learns ten weekly series; it makes two Trainers itself, with a progress bar."""

import os
import sys

import numpy
import pandas
import pytorch_lightning as pl
import torch
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS

kind, results = sys.argv[1:]
strategy = "auto"
if kind != "alone":
    import ddp_callbacks.pytorch_lightning  # noqa: F401

    strategy = "ddp_callbacks"


class History(pl.Callback):
    def __init__(self):
        self.values = []

    def on_train_epoch_end(self, trainer, *_):
        self.values.append(float(trainer.callback_metrics["train_loss_step"]))

    def on_validation_end(self, trainer, *_):
        self.values.append(float(trainer.callback_metrics["valid_loss"]))


numbers = numpy.random.default_rng(1)
days = pandas.date_range("2024-01-01", periods=64, freq="D")
weeks = numpy.arange(64) * 2 * numpy.pi / 7
series = {f"series {n}": numpy.sin(weeks + n) + numbers.normal(0, 0.1, 64) for n in range(10)}
frame = pandas.concat([pandas.DataFrame({"unique_id": name, "ds": days, "y": y}) for name, y in series.items()])

history = History()
model = NHITS(
    h=7,
    input_size=14,
    max_steps=20,
    batch_size=4,
    windows_batch_size=None,  # all windows of a batch: which ones are drawn depends on how many there are
    val_check_steps=5,
    early_stop_patience_steps=3,
    mlp_units=3 * [[16, 16]],
    # for the Trainers
    accelerator="cpu",
    devices=1,
    strategy=strategy,
    precision="64-true",
    logger=False,
    callbacks=[history],
)
forecasts = NeuralForecast(models=[model], freq="D")
forecasts.fit(frame, val_size=7)
forecasts.save(f"{results}-saved")  # it leaves that to rank 0
forecast = forecasts.predict()["NHITS"]
loaded = NeuralForecast.load(f"{results}-saved")  # rank 0 has taken part in the prediction, so it has saved
result = {
    "predictions": torch.from_numpy(forecast.to_numpy().copy()),
    "history": history.values,
    "parameters": forecasts.models[0].state_dict(),
    "saved": loaded.models[0].state_dict(),
    "its own validation losses": [loss for _, loss in forecasts.models[0].valid_trajectories],
}
torch.save(result, f"{results}.{os.environ.get('RANK', '0')}")
