"""chemprop's message passing network learns two properties of molecules, of which a third is not known."""

import sys

import numpy
import torch
from chemprop import data, featurizers, models, nn
from lightning import pytorch as pl

kind, results = sys.argv[1:]
strategy = "auto"
if kind != "alone":
    from ddp_callbacks.lightning import CallbackStrategy

    options = {
        "weighted": {"weight": lambda batch: batch.Y.isfinite().sum()},
        "verified": {"verify": "first_batch"},
    }
    strategy = CallbackStrategy(**options[kind])


class Double(pl.plugins.DoublePrecision):
    """Lightning's, for chemprop's graphs, too, which its collate function makes of float32."""

    def convert_input(self, batch):
        batch.bmg.V, batch.bmg.E = batch.bmg.V.double(), batch.bmg.E.double()
        return super().convert_input(batch)


class History(pl.Callback):
    def __init__(self):
        self.values = []

    def on_train_epoch_end(self, trainer, *_):
        self.values.append(float(trainer.callback_metrics["train_loss_step"]))

    def on_validation_epoch_end(self, trainer, *_):
        if not trainer.sanity_checking:
            self.values.append({name: float(value) for name, value in trainer.callback_metrics.items()})


torch.set_default_dtype(torch.float64)  # of the metrics' states, which are the loss
pl.seed_everything(1)
numbers = numpy.random.default_rng(1)
ends = ("", "O", "N", "Cl", "C(=O)O", "c1ccccc1")
smiles = ["C" * length + end for length in range(1, 13) for end in ends]
targets = numpy.array([[len(each), each.count("C")] for each in smiles]) / 10
targets += numbers.normal(0, 0.1, targets.shape)
targets[numbers.random(targets.shape) < 0.3] = numpy.nan
points = [data.MoleculeDatapoint.from_smi(*each) for each in zip(smiles, targets, strict=True)]
featurizer = featurizers.SimpleMoleculeMolGraphFeaturizer()
parts = points[:50], points[50:61], points[61:]
train, validation, test = (data.MoleculeDataset(part, featurizer) for part in parts)
scaler = train.normalize_targets()
validation.normalize_targets(scaler)

ffn = nn.RegressionFFN(2, 32, 32, output_transform=nn.UnscaleTransform.from_standard_scaler(scaler))
metrics = [nn.metrics.RMSE(), nn.metrics.MAE()]
model = models.MPNN(nn.BondMessagePassing(d_h=32), nn.MeanAggregation(), ffn, metrics=metrics)
history = History()
trainer = pl.Trainer(
    accelerator="cpu",
    strategy=strategy,
    plugins=[Double()],
    max_epochs=4,
    logger=False,
    callbacks=[history],
)
trainer.fit(model, data.build_dataloader(train, 8, seed=3), data.build_dataloader(validation, 4, shuffle=False))
loader = data.build_dataloader(test, 4, shuffle=False)
result = {
    "test": trainer.test(model, loader, verbose=False),
    "predictions": trainer.predict(model, loader),
    "history": history.values,
    "parameters": model.state_dict(),
}
torch.save(result, f"{results}.{trainer.global_rank}")
