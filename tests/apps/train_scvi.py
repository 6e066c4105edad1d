"""scvi-tools' Stereoscope learns cell types by a sum as loss; it divides the data itself where it finds "ddp"."""

import os
import sys

import anndata
import numpy
import scvi
import torch
from scvi.external import RNAStereoscope

kind, results = sys.argv[1:]
options = {}
if kind != "alone":
    from ddp_callbacks.lightning import DDPCallback

    options = {"strategy": "callbacks", "callbacks": [DDPCallback(reduction="sum")]}

torch.set_default_dtype(torch.float64)  # of the metrics' states
scvi.settings.seed = 1
numbers = numpy.random.default_rng(1)
types = numbers.integers(0, 3, 93)
counts = numbers.poisson(numbers.gamma(2.0, 2.0, (3, 20))[types])
cells = anndata.AnnData(counts.astype("float32"), obs={"type": [f"type {each}" for each in types]})
RNAStereoscope.setup_anndata(cells, labels_key="type")
model = RNAStereoscope(cells)
model.train(
    max_epochs=5,
    batch_size=16,
    train_size=0.8,
    check_val_every_n_epoch=1,
    # for the Trainer
    accelerator="cpu",
    precision="64-true",
    enable_progress_bar=False,
    **options,
)
history = {name: frame[name].astype(float).tolist() for name, frame in model.history.items()}
result = {
    "history": {name: values for name, values in history.items() if not name.endswith("loss")},  # means of sums
    "parameters": model.module.state_dict(),
}
torch.save(result, f"{results}.{os.environ.get('RANK', '0')}")
