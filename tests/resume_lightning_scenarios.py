"""Fits that are cut at any moment and go on: each scenario builds everything from fixed seeds, as a user's script does.

``SCENARIOS[name](cut, path, random=True)`` runs until moment ``cut`` (``None``: to the end) with ``Resume(path)``, so a
call with the same path goes on. It returns what must not depend on cuts, nor on the number of processes, the same on
every rank. ``random=False`` leaves out what differs between ranks by design: dropout and augmentation.
``joined(first, second)`` puts the results of both halves together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from lightning_scenarios import FEATURES, Record, quiet
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from ddp_callbacks import DiLoCo, LocalSGD
from ddp_callbacks.comm.collectives import all_gather_json
from ddp_callbacks.errors import Preempted
from ddp_callbacks.lightning import CallbackStrategy, Resume

Scenario = Callable[..., dict[str, Any]]
SCENARIOS: dict[str, Scenario] = {}
CLASSES = 3


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


class Cut(pl.Callback):
    """Counts the moments of a fit, and asks all processes to stop at one of them."""

    def __init__(self, resume: Any, cut: int | None) -> None:
        self.resume, self.cut, self.moments = resume, cut, 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        preemption = self.resume.preemption
        ask = preemption.is_requested

        def count() -> bool:
            self.moments += 1
            if self.moments != self.cut:
                return bool(ask())
            preemption.request("the scenario")
            while not ask():  # until all ranks have heard of it
                pass
            return True

        preemption.is_requested = count


class Samples(pl.Callback):
    """The numbers of the samples of each batch on this rank."""

    def __init__(self) -> None:
        self.seen: list[list[Any]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._add(trainer, f"train {trainer.current_epoch} {batch_idx}", batch)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if not trainer.sanity_checking:
            self._add(trainer, f"validate {dataloader_idx} {batch_idx}", batch)

    def _add(self, trainer: Any, name: str, batch: Any) -> None:
        run, batch = trainer.strategy._run, batch["a"] if isinstance(batch, dict) else batch
        is_padding = batch is None or (run is not None and run.batches.is_padding)
        self.seen.append([name, [] if is_padding else batch[0].tolist()])

    def of_all(self) -> list[list[Any]]:
        """Of all ranks, in their order. A collective."""
        if not dist.is_initialized():
            return self.seen
        by_rank = all_gather_json(self.seen, "the samples")
        return [[parts[0][0], [number for _, part in parts for number in part]] for parts in zip(*by_rank, strict=True)]


def run(
    cut: int | None,
    path: str,
    module: pl.LightningModule,
    loaders: tuple[Any, ...],
    strategy: Any = None,
    **options: Any,
) -> dict[str, Any]:
    resume = Resume(path, every=options.pop("every", None))
    counter, samples, record = Cut(resume, cut), Samples(), Record()
    defaults: dict[str, Any] = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 1,
        "callbacks": [],
    }
    options = defaults | options
    options["callbacks"] = [resume, counter, samples, *options["callbacks"]]
    is_cut = False
    with quiet():
        trainer = pl.Trainer(strategy=strategy or "ddp_callbacks", logger=record, **options)
        try:
            trainer.fit(module, *loaders)
        except Preempted:
            is_cut = True
    return {
        "is_cut": is_cut,
        "moments": counter.moments,
        "logged": record.lines,
        "samples": samples.of_all(),
        "callback_metrics": dict(sorted(trainer.callback_metrics.items())),
        "parameters": {name: value.detach().clone() for name, value in module.state_dict().items()},
        "global_step": trainer.global_step,
        "epochs": trainer.current_epoch,
        "callbacks": [_state_of(callback) for callback in trainer.callbacks],
        "draw": torch.rand(2).tolist(),
    }


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """What the two halves of a fit make."""
    if not first["is_cut"]:
        return first
    whole = {**second}
    for name in ("logged", "samples"):
        whole[name] = first[name] + second[name]
    return whole


def comparable(result: dict[str, Any]) -> dict[str, Any]:
    """A result without what tells whether it was cut."""
    return {name: value for name, value in result.items() if name not in ("is_cut", "moments")}


def _state_of(callback: Any) -> dict[str, Any]:
    if isinstance(callback, EarlyStopping):
        return {"wait": callback.wait_count, "best": float(callback.best_score), "stopped": callback.stopped_epoch}
    if isinstance(callback, ModelCheckpoint):
        best = sorted((Path(name).name, float(score)) for name, score in callback.best_k_models.items())
        return {"best": [list(each) for each in best], "path": Path(callback.best_model_path).name}
    return {}


# --- data and modules -------------------------------------------------------------------------------------------------


class Data(Dataset[Any]):
    """Samples with their numbers; ``noise`` is drawn when one is loaded."""

    def __init__(self, samples: int, seed: int = 0, noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(samples, FEATURES, dtype=torch.float64, generator=generator)
        self.y = torch.randint(0, CLASSES, (samples,), generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        x = self.x[index]
        if self.noise:
            x = x + self.noise * torch.randn(FEATURES, dtype=torch.float64)
        return index, x, self.y[index]


class Stream(IterableDataset[Any]):
    def __init__(self, samples: int, seed: int = 0) -> None:
        self.data = Data(samples, seed)

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.data))
        return (self.data[int(index)] for index in order)


class Classifier(pl.LightningModule):
    """Logs means and sums of steps and epochs, and torchmetrics."""

    def __init__(self, dropout: float = 0.0, optimizer: Any = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, CLASSES))
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        self.error = torchmetrics.MeanSquaredError()
        self.validation_accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        self.optimizer = optimizer
        self.double()
        self.error.set_dtype(torch.float64)

    def loss(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        _, x, y = batch
        scores = self.layers(x)
        return F.cross_entropy(scores, y), scores

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss, scores = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log(
            "count", float(len(batch[0])) + scores.detach()[:, 0].sum(), on_step=True, on_epoch=True, reduce_fx="sum"
        )
        self.log("largest", scores.detach().max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.accuracy(scores, batch[2])
        self.error(scores[:, 0], batch[2].double())
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("error", self.error, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss, scores = self.loss(batch)
        self.log("val_loss", loss)
        self.validation_accuracy(scores, batch[2])
        self.log("val_accuracy", self.validation_accuracy, on_step=True, on_epoch=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("late", outputs["loss"], on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        if self.optimizer is not None:
            return self.optimizer(self)
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


# --- the scenarios ----------------------------------------------------------------------------------------------------


@scenario
def dropout(cut: int | None, path: str, random: bool = True) -> dict[str, Any]:
    """Dropout and shuffling; means, sums and torchmetrics; two loaders of the validation, ragged last batches."""
    pl.seed_everything(7, verbose=False)
    module = Classifier(0.3 if random else 0.0)
    validations = [DataLoader(Data(13, 9), 5), DataLoader(Data(7, 8), 3)]
    return run(cut, path, module, (DataLoader(Data(29), 8, shuffle=True), validations))


@scenario
def workers(cut: int | None, path: str, random: bool = True) -> dict[str, Any]:
    """Loaders with workers that augment; schedulers, callbacks that decide by a validation in mid-epoch."""
    pl.seed_everything(7, verbose=False)

    def optimizers(module: nn.Module) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), 0.2, momentum=0.9)
        by_step = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        schedulers = [{"scheduler": by_step, "interval": "step"}, {"scheduler": plateau, "monitor": "val_loss_epoch"}]
        return [optimizer], schedulers

    module = Classifier(optimizer=optimizers)
    module.validation_step = _forked(module)  # type: ignore[method-assign]
    loaders = (
        DataLoader(Data(26, noise=0.1 if random else 0.0), 6, shuffle=True, num_workers=2),
        DataLoader(Data(11, 9), 4, num_workers=1),
    )
    folder = Path(path).with_suffix("")
    callbacks = [
        EarlyStopping("val_loss_epoch", patience=3),
        ModelCheckpoint(folder, "{epoch}-{step}", monitor="val_loss_epoch", save_top_k=2),
    ]
    options = {"val_check_interval": 0.5, "enable_checkpointing": True}
    return run(cut, path, module, loaders, callbacks=callbacks, max_epochs=3, **options)


def _forked(module: Classifier) -> Callable[..., None]:
    def validation_step(batch: Any, batch_idx: int) -> None:
        module.log("val_loss", module.loss(batch)[0], on_step=True, on_epoch=True)

    return validation_step


@scenario
def accumulation(cut: int | None, path: str, random: bool = True) -> dict[str, Any]:
    """Accumulated and clipped gradients, a weighted sampler with a generator of its own, Adam."""
    pl.seed_everything(7, verbose=False)
    module = Classifier(0.2 if random else 0.0, lambda module: torch.optim.Adam(module.parameters(), 0.02))
    weights = torch.linspace(1.0, 3.0, 27)
    sampler = WeightedRandomSampler(weights.tolist(), 27, generator=torch.Generator().manual_seed(5))
    loaders = (DataLoader(Data(27), 4, sampler=sampler), DataLoader(Data(9, 9), 5))
    return run(cut, path, module, loaders, accumulate_grad_batches=2, gradient_clip_val=0.3)


class Pair(pl.LightningModule):
    """Two networks that are trained in turn, by hand."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(FEATURES, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, FEATURES)
        )
        self.critic = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 1))
        self.error = torchmetrics.MeanSquaredError()
        self.double()
        self.error.set_dtype(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[1]
        first, second = self.optimizers()
        made = self.generator(x)
        loss = self.critic(made).square().mean() + (made - x).square().mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        score = (self.critic(x) - 1.0).square().mean() + self.critic(self.generator(x).detach()).square().mean()
        second.zero_grad()
        self.manual_backward(score)
        if batch_idx % 2:
            second.step()
        self.error(made.detach(), x)
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.log_dict({"loss": loss, "score": score}, on_step=True, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", (self.generator(batch[1]) - batch[1]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.generator.parameters(), 0.02), torch.optim.SGD(self.critic.parameters(), 0.05)


@scenario
def by_hand(cut: int | None, path: str, random: bool = True) -> dict[str, Any]:
    """A stream of samples, two optimizers by hand, synchronized BatchNorm."""
    pl.seed_everything(7, verbose=False)
    loaders = (DataLoader(Stream(30), 8), DataLoader(Data(9, 9), 5))
    return run(cut, path, Pair(0.2 if random else 0.0), loaders, sync_batchnorm=True)


class Collecting(Classifier):
    """Keeps what its steps return until the end of the epoch, as Lightning's guide to version 2.0 shows."""

    def __init__(self) -> None:
        super().__init__(0.3)
        self.outputs: list[torch.Tensor] = []
        self.scores: dict[str, list[Any]] = {"all": []}
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss.detach() * len(batch[0]))
        self.seen += len(batch[0])
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("outputs", torch.stack(self.outputs).sum(), sync_dist=True)
        self.log("seen", float(self.seen))
        self.outputs.clear()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.scores["all"].append((self.loss(batch)[1].sum(), batch_idx))

    def on_validation_epoch_end(self) -> None:
        self.log("scores", torch.stack([score for score, _ in self.scores["all"]]).sum(), sync_dist=True)
        self.scores = {"all": []}


def collecting(cut: int | None, path: str) -> dict[str, Any]:
    pl.seed_everything(7, verbose=False)
    return run(cut, path, Collecting(), (DataLoader(Data(40), 8, shuffle=True), DataLoader(Data(10, 9), 5)))


class Freezing(Classifier):
    """Freezes a layer at the beginning of an epoch, which Lightning's hook does not repeat in the middle of one."""

    def on_train_epoch_start(self) -> None:
        self.layers[0].requires_grad_(self.current_epoch < 1)


def freezing(cut: int | None, path: str) -> dict[str, Any]:
    pl.seed_everything(7, verbose=False)
    return run(cut, path, Freezing(0.3), (DataLoader(Data(29), 8, shuffle=True), DataLoader(Data(9, 9), 5)))


def averaging(cut: int | None, path: str) -> dict[str, Any]:
    """The callback validates the average of the weights, and saves both in the places of each other."""
    pl.seed_everything(7, verbose=False)
    loaders = (DataLoader(Data(29), 8, shuffle=True), DataLoader(Data(9, 9), 5))
    return run(cut, path, Classifier(0.3), loaders, callbacks=[EMAWeightAveraging(decay=0.8)])


LOCAL: dict[str, Scenario] = {}


def local(name: str, sync: Any) -> None:
    """A scenario with local steps, for as many processes as before."""

    def scenario(cut: int | None, path: str, every: int | None = None) -> dict[str, Any]:
        pl.seed_everything(7, verbose=False)
        module = Classifier(0.3, lambda module: torch.optim.Adam(module.parameters(), 0.02))
        loaders = (DataLoader(Data(41), 8, shuffle=True), DataLoader(Data(9, 9), 5))
        strategy = CallbackStrategy(sync=sync)
        return run(cut, path, module, loaders, strategy, accumulate_grad_batches=2, every=every)

    LOCAL[name] = scenario


local("local_sgd", LocalSGD(3))
local("diloco", DiLoCo(3))
