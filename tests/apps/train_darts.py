"""darts' N-BEATS learns three series; it makes a Trainer for each call."""

import os
import sys

import numpy
import pytorch_lightning as pl
import torch
from darts import TimeSeries
from darts.models import NBEATSModel

kind, results = sys.argv[1:]
strategy = "auto"
if kind != "alone":
    import ddp_callbacks.pytorch_lightning  # noqa: F401

    strategy = "callbacks"


class History(pl.Callback):
    def __init__(self):
        self.values = []

    def on_validation_epoch_end(self, trainer, *_):
        if not trainer.sanity_checking:
            self.values.append({name: float(value) for name, value in trainer.callback_metrics.items()})


numbers = numpy.random.default_rng(1)
steps = numpy.arange(40)
values = [numpy.sin(steps / 3 + n) + numbers.normal(0, 0.1, 40) for n in range(3)]
series = [TimeSeries.from_values(each) for each in values]  # float64, which darts gives its Trainer as precision
history = History()
options = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
model = NBEATSModel(
    input_chunk_length=10,
    output_chunk_length=4,
    num_stacks=2,
    num_blocks=1,
    num_layers=2,
    layer_widths=16,
    batch_size=8,
    n_epochs=3,
    random_state=1,
    pl_trainer_kwargs={"accelerator": "cpu", "strategy": strategy, "callbacks": [history], **options},
)
model.fit([each[:31] for each in series], val_series=[each[20:] for each in series])
forecasts = model.predict(6, series=[each[:31] for each in series], batch_size=2)
result = {
    "predictions": [torch.from_numpy(each.values().copy()) for each in forecasts],
    "history": history.values,
    "parameters": model.model.state_dict(),
}
torch.save(result, f"{results}.{os.environ.get('RANK', '0')}")
