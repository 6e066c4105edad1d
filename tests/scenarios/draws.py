"""Models with dropout, whose samples draw: with a Trainer, a loop of Fabric and a Trial, by the option `randomness`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torchbearer
from fabric_loops import fabric
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial
from trainers import Net, data, quiet, trainer

from ddp_callbacks.lightning import CallbackFabricStrategy, CallbackStrategy
from ddp_callbacks.torchbearer import DDPCallback

Rows = dict[str, torch.Tensor]


class Noisy(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + torch.rand_like(x), y


class Drops(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.dropout(x, 0.5, self.training))


def loaders(workers: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    train, other = (Noisy(*data(*which).tensors) for which in ((29,), (13, 9)))
    return DataLoader(train, 8, shuffle=True, num_workers=workers), DataLoader(other, 5, num_workers=workers)


def with_trainer(workers: int, **options: Any) -> Rows:
    train, other = loaders(workers)
    with quiet():
        made, module = trainer(CallbackStrategy(**options) if options else "auto", devices=1), Drops()
        made.fit(module, train, other)
        losses = {"loss": made.callback_metrics["val_loss"]}
        predicted: Any = made.predict(module, other)
    return {**module.state_dict(), **losses, "predicted": torch.cat(predicted)}


def with_fabric(workers: int, **options: Any) -> Rows:
    with quiet():
        made = fabric(CallbackFabricStrategy(**options) if options else "auto")
        module = Drops()
        model, optimizer = made.setup(module, torch.optim.SGD(module.parameters(), 0.1))
        batches = made.setup_dataloaders(loaders(workers)[0])
        for _ in range(2):
            for x, y in batches:
                optimizer.zero_grad()
                made.backward(F.cross_entropy(model(x), y))
                optimizer.step()
    return module.state_dict()


def with_trial(workers: int, **options: Any) -> Rows:
    torch.manual_seed(7)
    train, other = loaders(workers)
    net = nn.Sequential(nn.Dropout(), *Net().layers)
    added = [DDPCallback(**options)] if options else []
    trial = Trial(net, torch.optim.SGD(net.parameters(), 0.1), nn.CrossEntropyLoss(), ["loss"], added, verbose=0)
    trial.with_generators(train, other, other).to("cpu", torch.float64).run(2)
    loss = torch.tensor(trial.evaluate(data_key=torchbearer.VALIDATION_DATA)["val_loss"])
    return {**net.state_dict(), "loss": loss, "predicted": trial.predict()}


HOSTS: dict[str, Callable[..., Rows]] = {"Trainer": with_trainer, "Fabric": with_fabric, "Trial": with_trial}


def draw_all(randomness: str, workers: int) -> dict[str, Rows]:
    """What each host leaves; without ``randomness``, without us."""
    options = {"randomness": randomness} if randomness else {}
    return {host: run(workers, **options) for host, run in HOSTS.items()}
