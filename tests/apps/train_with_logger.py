"""A small module whose values go to an experiment tracker: wandb offline, or MLflow in a folder."""

import os
import sys
from pathlib import Path

import torch
from lightning import pytorch as pl
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

tracker, kind, results = sys.argv[1:]
strategy = "auto"
if kind != "alone":
    import ddp_callbacks.lightning  # noqa: F401

    strategy = "ddp_callbacks"
folder = Path(f"{results}-{tracker}")


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()

    def loss(self, batch):
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.log("norm", torch.stack([p.grad.norm() for p in self.parameters()]).norm())

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


def data(samples):
    inputs = torch.randn(samples, 4, dtype=torch.float64)
    return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))


def of_wandb(logger):
    """What stays of a run in the summary."""
    return {name: float(value) for name, value in dict(logger.experiment.summary).items() if name[0] != "_"}


def of_mlflow(logger):
    """Every value of each metric, in the order of the steps."""
    client, run = logger.experiment, logger.run_id
    names = sorted(client.get_run(run).data.metrics)
    return {name: [[each.step, each.value] for each in client.get_metric_history(run, name)] for name in names}


pl.seed_everything(1)
module, train, validation = Net(), data(53), data(13)
if tracker == "wandb":
    folder.mkdir(exist_ok=True)
    logger, read = WandbLogger(project="numbers", save_dir=folder, offline=True), of_wandb
else:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # newer versions advise a database
    logger, read = MLFlowLogger("numbers", tracking_uri=f"file:{folder}"), of_mlflow
options = {"max_epochs": 3, "log_every_n_steps": 2, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = pl.Trainer(accelerator="cpu", strategy=strategy, logger=logger, **options)
loaders = (torch.utils.data.DataLoader(part, 8) for part in (train, validation))
trainer.fit(module, *loaders)
result = {"parameters": sum(float(p.sum()) for p in module.parameters())}
if trainer.is_global_zero:
    result["values"] = read(logger)
torch.save(result, f"{results}.{trainer.global_rank}")
