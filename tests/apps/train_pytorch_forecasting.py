"""pytorch-forecasting's Temporal Fusion Transformer learns six series; its loss is a mean over steps, not samples."""

import sys

import numpy
import pandas
import torch
from lightning import pytorch as pl
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data import GroupNormalizer

kind, results = sys.argv[1:]
strategy, name = "auto", "auto"
if kind != "alone":
    from ddp_callbacks.lightning import CallbackStrategy

    options = {
        "weighted": {"weight": lambda batch: batch[0]["decoder_lengths"].sum()},
        "verified": {"verify": "first_batch"},
    }
    strategy, name = CallbackStrategy(**options[kind]), "ddp_callbacks"


class History(pl.Callback):
    def __init__(self):
        self.values = []

    def on_train_epoch_end(self, trainer, *_):
        self.values.append(float(trainer.callback_metrics["train_loss_step"]))

    def on_validation_epoch_end(self, trainer, *_):
        if not trainer.sanity_checking:
            self.values.append({name: float(value) for name, value in trainer.callback_metrics.items()})


pl.seed_everything(1)
numbers = numpy.random.default_rng(1)
steps = numpy.arange(30)
series = [numpy.sin(steps / 3 + n) + 2 + numbers.normal(0, 0.1, 30) for n in range(6)]
frame = pandas.concat(
    [pandas.DataFrame({"series": str(n), "step": steps, "value": values}) for n, values in enumerate(series)],
    ignore_index=True,
)
training = TimeSeriesDataSet(
    frame[frame["step"] < 24],
    time_idx="step",
    target="value",
    group_ids=["series"],
    min_encoder_length=4,
    max_encoder_length=8,
    min_prediction_length=1,
    max_prediction_length=6,
    static_categoricals=["series"],
    time_varying_known_reals=["step"],
    time_varying_unknown_reals=["value"],
    target_normalizer=GroupNormalizer(groups=["series"]),
    add_relative_time_idx=True,
    add_encoder_length=True,
)
validation = TimeSeriesDataSet.from_dataset(training, frame, predict=True, stop_randomization=True)
loaders = training.to_dataloader(train=True, batch_size=32), validation.to_dataloader(train=False, batch_size=4)
model = TemporalFusionTransformer.from_dataset(
    training,
    learning_rate=0.01,
    hidden_size=8,
    attention_head_size=2,
    dropout=0.0,
    hidden_continuous_size=4,
    log_interval=0,
    optimizer="adam",
)
history = History()
trainer = pl.Trainer(
    accelerator="cpu",
    strategy=strategy,
    precision="64-true",
    max_epochs=2,
    gradient_clip_val=0.1,
    logger=False,
    enable_checkpointing=False,
    callbacks=[history, pl.callbacks.EarlyStopping("val_loss")],
)
trainer.fit(model, *loaders)

for_predict = {"accelerator": "cpu", "strategy": name, "precision": "64-true", "logger": False}
own = model.predict(loaders[1], return_index=True, trainer_kwargs=for_predict)
whole = model.predict(loaders[1], trainer_kwargs={**for_predict, "use_distributed_sampler": False})
result = {
    "predictions": whole,
    "by series": dict(zip(own.index["series"].tolist(), own.output, strict=True)),
    "history": history.values,
    "parameters": model.state_dict(),
}
torch.save(result, f"{results}.{trainer.global_rank}")
