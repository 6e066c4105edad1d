"""verify="first_batch": what cannot be exact is named, and what is exact passes."""

from __future__ import annotations

import contextlib
import copy
import csv
import functools
import io
import itertools
import logging
import os
import queue
import re
import shutil
import signal
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy
import pytest
import torch
import torch.distributed as dist
import torchbearer
import torchmetrics
from kit.compare import assert_equal
from kit.ranks import BY_PART
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial
from trainer_cases import OURS, TWO, Bodies, message_of, quiet
from trainers import (
    CLASSES,
    FEATURES,
    LogsAll,
    Net,
    Normalized,
    NormalizedMaskedMean,
    counted,
    fit,
    lbfgs,
    loader,
    masked,
    trainer,
)

from ddp_callbacks import get_rank, get_world_size
from ddp_callbacks.comm import all_gather_object, barrier, broadcast_object
from ddp_callbacks.data.sharding import shard_loader
from ddp_callbacks.gradients import verification
from ddp_callbacks.gradients.verification import verify_gradient
from ddp_callbacks.lightning import CallbackStrategy
from ddp_callbacks.torchbearer import DDPCallback

pytestmark = [pytest.mark.usefixtures("seed_variables"), pytest.mark.shares_results()]

SAMPLES = 12  # compared in parts of 8 and 4 samples
IGNORED = -100
PASSES = ""
DIFFERS = "MismatchError: the gradient of the first batch on 2 processes is not that of one process: for parameter "

Loss = Callable[[nn.Module, Any], torch.Tensor]

WORLD = Bodies(__name__, quiet)


def outcome(call: Callable[[], Any]) -> str:
    """The error."""
    found = message_of(call)
    return PASSES if found == "no error" else found


# --- losses -----------------------------------------------------------------------------------------------------------


def samples() -> TensorDataset:
    """Samples of five features, a class of four, and every third class unknown."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 5, dtype=torch.float64, generator=generator)
    classes = torch.randint(4, (SAMPLES,), generator=generator)
    classes[::3] = IGNORED
    return TensorDataset(inputs, classes)


def alternating() -> TensorDataset:
    """Each of the equal parts that training would take has as many known targets."""
    inputs, classes = samples().tensors
    return TensorDataset(inputs, torch.where(torch.arange(SAMPLES) % 6 < 3, classes.clamp(min=0), IGNORED))


def network(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), *layers, nn.Linear(6, 4)).double()


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    """A mean over the samples."""
    return F.cross_entropy(model(batch[0]), batch[1].clamp(min=0))


def known_only(model: nn.Module, batch: Any) -> torch.Tensor:
    """A mean over the targets that are known."""
    return F.cross_entropy(model(batch[0]), batch[1], ignore_index=IGNORED)


def summed(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1].clamp(min=0), reduction="sum")


def contrastive(model: nn.Module, batch: Any) -> torch.Tensor:
    """Each sample against all others of the batch."""
    embedded = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(embedded @ embedded.T, torch.arange(len(embedded)))


def at_random(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model, (F.dropout(batch[0], 0.5), batch[1]))


def padded(samples: list[Any]) -> Any:
    """Inputs of different lengths, by classes, padded to the longest."""
    inputs = [sample[: 1 + int(label) % 5] for sample, label in samples]
    return nn.utils.rnn.pad_sequence(inputs, batch_first=True), torch.stack([label for _, label in samples])


def lengths(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model, (F.pad(batch[0], (0, 5 - batch[0].shape[1])), batch[1]))


def seen_padding(model: nn.Module, batch: Any) -> torch.Tensor:
    return lengths(model, batch) / batch[0].shape[1]


def known(batch: Any) -> float:
    return float((batch[1] != IGNORED).sum())


def verify(
    loss: Loss,
    *layers: nn.Module,
    weight_of: Callable[[Any], float] | None = None,
    rows: Any = None,
    model: nn.Module | None = None,
    **options: Any,
) -> str:
    model = model or network(*layers)
    batches = iter(shard_loader(DataLoader(samples(), SAMPLES) if rows is None else rows, **options))
    next(batches)
    batches.take_share()
    first = batches.whole_batch()

    def weight() -> tuple[float, float | None]:
        if weight_of is None:
            return first.share.local, first.share.total
        return weight_of(first.part) if first.share.local else 0.0, None

    return outcome(lambda: verify_gradient(model, loss, first.whole, first.part, weight))


def with_unused_images() -> nn.Module:
    images = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    return nn.ModuleList([network(), images]).double()


WRONG = "give weight=, in a Trainer weight="
LOSSES: dict[str, tuple[Callable[[], str], str]] = {
    "mean over samples": (lambda: verify(cross_entropy), PASSES),
    "dropout": (lambda: verify(cross_entropy, nn.Dropout(0.5)), PASSES),
    "known targets, weighed": (lambda: verify(known_only, weight_of=known), PASSES),
    "shuffled, workers": (
        lambda: verify(cross_entropy, rows=DataLoader(samples(), SAMPLES, shuffle=True, num_workers=1)),
        PASSES,
    ),
    "fewer samples than ranks": (lambda: verify(cross_entropy, rows=DataLoader(samples(), 1)), PASSES),
    "whole batches of each rank": (
        lambda: verify(cross_entropy, rows=DataLoader(samples(), 3), batch_size="per_process"),
        PASSES,
    ),
    "padded to the longest of a part": (
        lambda: verify(lengths, rows=DataLoader(samples(), SAMPLES, collate_fn=padded)),
        PASSES,
    ),
    "padding that the loss sees": (
        lambda: verify(seen_padding, rows=DataLoader(samples(), SAMPLES, collate_fn=padded)),
        "collate_fn pads each to its own longest sample. If the model or the loss sees the padding, pad all to one",
    ),
    "an unused layer in channels_last": (
        lambda: verify(lambda model, batch: cross_entropy(model[0], batch), model=with_unused_images()),
        PASSES,
    ),
    "contrastive": (lambda: verify(contrastive), WRONG),
    "known targets": (lambda: verify(known_only), WRONG),
    "wrong weight": (lambda: verify(known_only, weight_of=lambda batch: known(batch) + 1), WRONG),
    "equal parts": (lambda: verify(known_only, rows=DataLoader(alternating(), SAMPLES)), DIFFERS),
    "sum": (
        lambda: verify(summed, rows=DataLoader(samples(), 6)),
        "Added up without weights the gradients are right: the loss is a sum over the samples, so give "
        'reduction="sum" to DDPCallback (of a Trial or Trainer), CallbackStrategy (Trainer(strategy=...)) or '
        "CallbackFabricStrategy (Fabric(strategy=...)), in a loop of your own weigh(",
    ),
    "batch norm": (
        lambda: verify(cross_entropy, nn.BatchNorm1d(6)),
        "layer 1 normalizes by each process's part of the batch (BatchNorm): give sync_batchnorm=True",
    ),
    "at random": (lambda: verify(at_random), "The model is random"),
    "another model than the copy": (
        lambda: verify(lambda _, batch: cross_entropy(network(), batch)),
        "its loss depends on no parameter of the copy",
    ),
}


def assert_told(message: str, says: str) -> None:
    """It passes, or the error says this."""
    assert says in message if says else message == PASSES, message
    if says == WRONG:
        assert message.startswith(DIFFERS)
        assert ".weight it differs by up to " in message or ".bias it differs by up to " in message


@WORLD.on(TWO)
def test_nothing_of_the_model_is_changed() -> None:
    """`verify` changes nothing of the model."""
    model = network(nn.BatchNorm1d(6), nn.Dropout(0.5))
    before, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    whole, part = samples()[:], samples()[dist.get_rank() :: 2]
    outcome(lambda: verify_gradient(model, cross_entropy, whole, part, lambda: (1.0, None)))
    assert_equal(model.state_dict(), before, 0.0)
    assert [parameter.grad for parameter in model.parameters()] == [None] * 6
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(layer.training for layer in model)


# --- Trials and Trainers ----------------------------------------------------------------------------------------------


def trial(criterion: Any, *layers: nn.Module, callbacks: Sequence[Any] = (), **options: Any) -> Trial:
    model, callbacks = network(*layers), [DDPCallback(**options), *callbacks]
    made = Trial(model, torch.optim.SGD(model.parameters(), 0.1), criterion, callbacks=callbacks, verbose=0)
    return made.with_train_generator(DataLoader(samples(), SAMPLES)).to("cpu", torch.float64)


def run_trial(criterion: Any, **options: Any) -> str:
    return outcome(lambda: trial(criterion, verify="first_batch", **options).run(2))


def of_known(state: Any) -> torch.Tensor:
    return (state[torchbearer.Y_TRUE] != IGNORED).sum()


def mean_of_known(outputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, classes)


class KnownOnly(Net):
    """A mean over the targets that count."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], ignore_index=0)


class HasMetrics(Net):
    def __init__(self) -> None:
        super().__init__()
        self.largest, self.farthest = torchmetrics.MaxMetric(), torchmetrics.MaxMetric()
        self.total, self.count = torchmetrics.SumMetric(), torchmetrics.SumMetric()
        self.all, self.each = torchmetrics.CatMetric(), torchmetrics.CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        for metric in (self.largest, self.total, self.all):
            metric(loss)
        self.farthest(batch[0].abs().max())
        self.count.update(len(batch[0]))
        self.each.update(batch[0][:, 0])
        return loss


class WithASmallTerm(Net):
    """Of the whole batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs = self(batch[0].to(next(self.parameters())))
        return F.cross_entropy(outputs, batch[1]) + 1e-3 * outputs.std(0).mean()


class Linear(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layers[0](batch[0]).mean()


def nearly_cancelling(factor: float = 1e4) -> DataLoader[Any]:
    """The gradient is the mean of large numbers of both signs: rounding makes 1e-4 of it, or more."""
    large, small = factor * torch.randn(4, FEATURES), torch.randn(4, FEATURES)
    return DataLoader(TensorDataset(torch.cat([large, small - large.flip(0)])), 8)


class MeanOfKnown(nn.Module):
    def forward(self, outputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, classes, ignore_index=0)


class MakesItsLoss(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return MeanOfKnown()(self(batch[0]), batch[1])


@functools.cache
def teacher() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES).double()


class HasACachedTeacher(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + F.mse_loss(self(batch[0]), teacher()(batch[0]).detach())


class LogsARareMean(Net):
    """Of samples that the second part of the first batch alone has, and all parts of the others."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        rare = batch[0][:, 0] > 0
        if rare.any():
            self.log("rare", rare[rare].double().mean(), on_step=True, on_epoch=True)
        return loss


class OfTwo(Net):
    """Adds two batches, or multiplies their losses."""

    def __init__(self, multiplies: bool = False) -> None:
        super().__init__()
        self.multiplies = multiplies

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        first, second = (F.cross_entropy(self(x), y) for x, y in batch)
        return first * second if self.multiplies else first + second


class GathersAQueue(Net):
    """Compares each sample with the last ones of all processes."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = torch.zeros(0, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs = self(batch[0])
        self.queue = torch.cat([self.queue, *all_gather_object(outputs.detach(), "the outputs")])[-30:]
        loss = (outputs @ self.queue.T).logsumexp(1).mean()
        self.log("loss", loss)
        return loss


class Summed(Net):
    """A sum over the samples."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1], reduction="sum") / 10
        self.log("loss", loss, on_step=True, on_epoch=True, **self.logged)
        return loss

    logged: ClassVar[dict[str, str]] = {"reduce_fx": "sum"}


class LogsASumAsAMean(Summed):
    logged: ClassVar[dict[str, str]] = {}


class SummedWithATerm(Net):
    """A sum over the samples, and a term of the parameters, which each process adds."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        term = sum(parameter.square().sum() for parameter in self.parameters())
        return F.cross_entropy(self(batch[0]), batch[1], reduction="sum") + term


class SummedWithATermByN(SummedWithATerm):
    """Each process adds its part of the term; in the comparison, one process computes the whole batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        counts = {self.trainer.world_size, get_world_size(), dist.get_world_size() if dist.is_initialized() else 1}
        term = sum(parameter.square().sum() for parameter in self.parameters())
        (count,) = counts
        return F.cross_entropy(self(batch[0]), batch[1], reduction="sum") + term / count


class BesideALargeGradient(KnownOnly):
    """Of another parameter, which hides no error of these."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + 50 * self.scale.square()


class HoldsALock(KnownOnly):
    """Which ``copy.deepcopy`` refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class ReadsAGenerator(KnownOnly):
    """Which no copy can have."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = (1.0 for _ in range(1000))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * next(self.factors)


class Watched(KnownOnly):
    """By a hook that closes over a list."""

    def __init__(self) -> None:
        super().__init__()
        calls = list[int]()
        self.layers.register_forward_hook(lambda *_: calls.append(1))


def closing_over(criterion: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda outputs, classes: criterion(outputs, classes)


class WeighsClasses(Net):
    """Its loss closes over the module that weighs the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = closing_over(nn.CrossEntropyLoss(torch.arange(1.0, 1 + CLASSES, dtype=torch.float64)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.criterion(self(batch[0]), batch[1])


class ReadsWhatItLogs(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        last = float(self.trainer.callback_metrics.get("loss_step", 1.0))
        return super().training_step(batch, batch_idx) * last


MEAN_OF_KNOWN = functools.partial(F.cross_entropy, ignore_index=0)


class ByHand(Net):
    """Steps twice in a batch, by a closure and without, and its scheduler too."""

    is_weighed = True

    def __init__(self, loss: Any = F.cross_entropy) -> None:
        super().__init__()
        self.automatic_optimization, self.loss_of = False, loss

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        self.steps = getattr(self, "steps", 0) + 1

        def closure() -> torch.Tensor:
            optimizer.zero_grad()  # type: ignore[union-attr]
            loss: torch.Tensor = self.loss_of(self(batch[0]), batch[1])
            self.manual_backward(loss) if self.is_weighed else loss.backward()
            return loss

        self.toggle_optimizer(optimizer)  # type: ignore[arg-type]
        optimizer.step(closure)  # type: ignore[union-attr, arg-type]
        self.untoggle_optimizer(optimizer)  # type: ignore[arg-type]
        with optimizer.toggle_model():  # type: ignore[union-attr]
            closure()
            optimizer.step()  # type: ignore[union-attr]
        scheduler.step()  # type: ignore[union-attr, call-arg]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class ByPlainBackward(ByHand):
    is_weighed = False


class Adversaries(Net):
    """Two optimizers by turns, as of a GAN."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.automatic_optimization, self.loss_of = False, loss

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.toggle_optimizer(optimizer)  # type: ignore[arg-type]
            loss = self.loss_of(self(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), 0.1) for layer in (self.layers[0], self.layers[2])]


def run_trainer(module: Net | None = None, rows: Any = None, weight: Any = None, **options: Any) -> str:
    strategy: Any = CallbackStrategy(verify="first_batch", weight=weight)
    return outcome(lambda: fit(strategy, module, rows or loader(29, 8, shuffle=True), **options))


RUNS: dict[str, tuple[Callable[[], str], str]] = {
    "a Trial with torch's own": (lambda: run_trial(nn.CrossEntropyLoss()), PASSES),
    "a Trial with a sum": (lambda: run_trial(nn.CrossEntropyLoss(reduction="sum")), PASSES),
    "a Trial with weight": (lambda: run_trial(mean_of_known, weight=of_known), PASSES),
    "a Trial without weight": (lambda: run_trial(mean_of_known), DIFFERS),
    "a Trainer with weight": (lambda: run_trainer(KnownOnly(), weight=lambda batch: (batch[1] != 0).sum()), PASSES),
    "accumulated batches": (lambda: run_trainer(accumulate_grad_batches=3), PASSES),
    "a Trainer with synchronized batch norm": (lambda: run_trainer(Normalized(), sync_batchnorm=True), PASSES),
    "a part over nothing": (
        lambda: run_trainer(NormalizedMaskedMean(), masked(29, 8, 0), weight=counted, sync_batchnorm=True),
        PASSES,
    ),
    "a Trainer with a sum, and a term by the number of processes": (
        lambda: outcome(
            lambda: fit(CallbackStrategy(verify="first_batch", reduction="sum"), SummedWithATermByN(), loader(29, 8))
        ),
        PASSES,
    ),
    "a Trainer with a sum": (lambda: run_trainer(Summed()), 'so give reduction="sum" to DDPCallback'),
    "a Trainer without weight": (lambda: run_trainer(KnownOnly(), loader(29, 8)), f"{DIFFERS}layers."),
    "a Trainer with batch norm": (lambda: run_trainer(Normalized()), "layer layers.0 normalizes by each process"),
    "by hand": (lambda: run_trainer(ByHand()), PASSES),
    "by hand, of known targets": (
        lambda: run_trainer(ByHand(MEAN_OF_KNOWN), loader(29, 8)),
        f"{DIFFERS}layers.",
    ),
    "by hand, by plain backward": (lambda: run_trainer(ByPlainBackward()), "ByPlainBackward calls none in its first"),
    "what cannot be copied": (
        lambda: run_trainer(HoldsALock()),
        "copy.deepcopy cannot copy HoldsALock (TypeError: cannot pickle '_thread.lock' object)",
    ),
    "a queue of rows that are gathered": (lambda: run_trainer(GathersAQueue()), PASSES),
    "two loaders": (lambda: run_trainer(OfTwo(), [loader(29, 8), loader(29, 8, 1)]), PASSES),
    "two loaders, by their product": (lambda: run_trainer(OfTwo(True), [loader(29, 8), loader(29, 8, 1)]), DIFFERS),
    "two loaders of different sizes": (
        lambda: run_trainer(OfTwo(), [loader(32, 8), loader(64, 16)]),
        "the first batch is not compared with one process: it comes from several loaders with batches of different",
    ),
}


# --- as a warning, which is the default -------------------------------------------------------------------------------


def told(run: Callable[[], Any]) -> str:
    """What a run warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        for begins in (
            "gradient of",
            "data set is not the same",
            "mean over the processes",
            "loss calls",
        ):
            warnings.filterwarnings("always", f"the {begins}")
        warnings.filterwarnings("always", "rank 0 has computed no gradient")
        warnings.filterwarnings("always", "the step makes a ")
        warnings.filterwarnings("always", "rank 1 computes other gradients than rank 0")
        warnings.filterwarnings("always", ".*weight= counts nothing")
        warnings.filterwarnings("always", BY_PART)
        found = outcome(run)
    return found + "".join(str(each.message) for each in caught)


def trainer_tells(module: Net | None = None, rows: Any = None, **options: Any) -> str:
    return told(lambda: fit(CallbackStrategy(**options), module, rows or loader(29, 8)))


class EitherWay(ByHand):
    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        step = Net if self.automatic_optimization else ByHand
        return step.training_step(self, batch, batch_idx)


class KeepsALayer(EitherWay):
    """Has a layer of BatchNorm that it does not use, or may use after its first backward, if it trains by hand."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__(by_hand)
        self.kept = nn.BatchNorm1d(CLASSES)


class Mixed(Net):
    """Mixes the samples of its part."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch[0].add_(batch[0].flip(0))
        return batch


class LogsARoot(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("root", loss.detach().sqrt())
        return loss


class WritesItself(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.logger.log_metrics({"raw": loss.item(), "rate": 0.1}, step=batch_idx)
        self.logger.experiment.add_scalar("scalar", loss, batch_idx)
        return loss


class MixesInPlace(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        batch[0].add_(batch[0].flip(0))
        return super().training_step(batch, batch_idx)


class DrawsForEach(Net):
    """What it draws makes no difference, except for what draws next."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        print("step", self.global_step)
        for _ in batch[0]:
            torch.rand(1)
        return super().training_step(batch, batch_idx)


class Augmented(Net):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]


class DrawsNoise(Net):
    """Adds noise to its samples, and draws a mask of them."""

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor], mean_of_masked: bool = False) -> None:
        super().__init__()
        self.draw, self.mean_of_masked = draw, mean_of_masked
        self.own = torch.Generator()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        outputs = self(batch[0] + self.draw(batch[0]) + torch.rand(batch[0].shape, generator=self.own))
        losses = F.cross_entropy(outputs, batch[1], reduction="none")
        return losses[torch.rand(len(losses)) > 0.3].mean() if self.mean_of_masked else losses.mean()


class Breaks(Net):
    """On rank 1, unless the batch is one of the training."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if dist.get_rank() and len(batch[0]) != 4:
            raise MemoryError
        return super().training_step(batch, batch_idx)


def collate_at_random(rows: list[Any]) -> Any:
    x, y = torch.utils.data.default_collate(rows)
    return x * (torch.rand(x.shape) > 0.5), y


def trial_tells(criterion: Any, *layers: nn.Module, **options: Any) -> str:
    return told(lambda: trial(criterion, *layers, **options).run(2))


@torchbearer.callbacks.on_sample
def all_known(state: Any) -> None:
    """Then the mean is over all samples."""
    state[torchbearer.Y_TRUE] = state[torchbearer.Y_TRUE].clamp(1)


def mean_by_hand(state: Any) -> None:
    """A closure for another loss than the criterion."""
    state[torchbearer.Y_PRED] = state[torchbearer.MODEL](state[torchbearer.X])
    state[torchbearer.OPTIMIZER].zero_grad()
    state[torchbearer.LOSS] = state[torchbearer.Y_PRED].mean()
    state[torchbearer.LOSS].backward()


def drawn_apart() -> DataLoader[Any]:
    """Other features on each process, and the same labels, which are compared before."""
    (_, labels), (features, _) = (loader(24, seed=seed).dataset.tensors for seed in (0, dist.get_rank()))  # type: ignore[attr-defined]
    return DataLoader(TensorDataset(features, labels), 8)


class Noisy(TensorDataset):
    """Each sample draws when it is loaded, from the global generator or its own."""

    generator: torch.Generator | None = None

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x * torch.rand((), generator=self.generator), y


def noisy(generator: torch.Generator | None = None, **options: Any) -> DataLoader[Any]:
    """In batches of 5 samples for rank 0, and 4 for rank 1."""
    rows = Noisy(*loader(27).dataset.tensors)  # type: ignore[attr-defined]
    rows.generator = generator
    return DataLoader(rows, 9, **options)


def seed_by_rank(worker: int) -> None:
    """Like Lightning's ``worker_init_fn``."""
    torch.manual_seed(100 * worker + int(os.environ["RANK"]))


class Counts(Net):
    """Logs ``largest``, which does not add up over the parts of a batch, and what does or cannot be told."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("seen", float(len(batch[0])))
        outputs = self(batch[0])
        self.log_dict({"largest": outputs.max(), "mean": outputs.mean(), "since": time.monotonic(), "lr": 0.1})
        self.log_dict({"noise": torch.rand(()), "zero": outputs.sum() * 0, "centred": (outputs - outputs.mean()).sum()})
        self.log("samples", float(len(batch[0])), reduce_fx="sum")
        self.log("weighed", outputs.mean(), batch_size=1)
        if len(batch[0]) == 8:
            self.log_dict({"by the whole": 1.0, "infinite": float("inf")})
        return super().training_step(batch, batch_idx)


class Judges(KnownOnly):
    """Its validation logs a mean over the samples, one over the known targets, and a count."""

    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        self.layers = self.layers.extend(more)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hits = (self(batch[0]).argmax(1) == batch[1]).double()
        self.log("accuracy", hits.mean(), batch_size=len(hits))
        self.log("loss of known", F.cross_entropy(self(batch[0]), batch[1], ignore_index=0))
        self.log("count", float(len(hits)), batch_size=1)
        self.log("spread", hits.std(correction=0))


def judge(module: Net | None = None, **options: Any) -> str:
    strategy = CallbackStrategy(**options)
    return told(lambda: fit(strategy, module or Judges(), loader(29, 8), loader(13, 7, 9), sync_batchnorm=True))


JUDGED = "the mean over the processes of what validation_step logs for a batch is not that of one process: "
TELLS = "the gradient of the first batch on 2 processes is not that of one process: "
NORMALIZES = "normalizes by each process's part of the batch (BatchNorm), not as one process: sync_batchnorm=True"
DATA = (
    "the data set is not the same on every process: in a batch that is compared, rank 1 has loaded other samples than"
)
WARNINGS: dict[str, tuple[Callable[[], str], str]] = {
    "a Trainer": (lambda: trainer_tells(), ""),
    "of known targets": (lambda: trainer_tells(KnownOnly()), f"{TELLS}for parameter layers."),
    "with a small term": (lambda: trainer_tells(WithASmallTerm()), TELLS),
    "with a small term, in single precision": (lambda: trainer_tells(WithASmallTerm().float()), TELLS),
    "that rounds much": (lambda: trainer_tells(Linear().float(), nearly_cancelling()), ""),
    "of rounding": (lambda: trainer_tells(Linear().float(), nearly_cancelling(1e8)), ""),
    "of known targets, by a module that the step makes": (lambda: trainer_tells(MakesItsLoss()), TELLS),
    "beside a cached teacher": (
        lambda: trainer_tells(HasACachedTeacher()),
        "the step makes a Linear that something outside of the model keeps, such as a cache",
    ),
    "that is to be silent": (lambda: trainer_tells(KnownOnly(), verify=None), ""),
    "counts that are logged": (
        lambda: trainer_tells(Counts()),
        "what the training step logs is not: largest (0.255303 for 0.412876), "
        "by the whole (0 for 1), infinite (0 for inf). Log",
    ),
    "a validation, by weight": (
        lambda: judge(weight=lambda batch: (batch[1] != 0).sum()),
        f"{JUDGED}accuracy (0.2 for 0.142857), spread (0.4 for 0.349927). Log",
    ),
    "metrics of the mean of a part": (
        lambda: trainer_tells(HasMetrics()),
        "MaxMetric largest (1.04808 for 0.984842), SumMetric total (1.8432 for 0.984842), CatMetric all (2 for 1). ",
    ),
    "a validation that is to be silent": (lambda: judge(verify=None), ""),
    "what is logged with a wrong weight": (
        lambda: trainer_tells(Net(), weight=lambda batch: (batch[1] > 1).sum() + 1),
        "loss (0.939669 for 0.984842)",
    ),
    "with weight": (lambda: trainer_tells(KnownOnly(), weight=lambda batch: (batch[1] > 1).sum() + 1), ""),
    "a sum": (lambda: trainer_tells(Summed()), 'so give reduction="sum" to DDPCallback'),
    "a sum that is said": (lambda: trainer_tells(Summed(), reduction="sum"), ""),
    "a sum that is logged as a mean": (lambda: trainer_tells(LogsASumAsAMean(), reduction="sum"), ""),
    "a sum with a term of the parameters": (
        lambda: trainer_tells(SummedWithATerm(), reduction="sum"),
        "A sum must not have terms of the parameters alone, unless divided by the number of processes",
    ),
    "data that each process draws apart": (
        lambda: trainer_tells(rows=drawn_apart()),
        DATA,
    ),
    "batch norm by parts": (lambda: trainer_tells(Normalized()), NORMALIZES),
    "batch norm that no step calls": (lambda: trainer_tells(KeepsALayer()), ""),
    "batch norm that no step calls, by hand": (lambda: trainer_tells(KeepsALayer(by_hand=True)), NORMALIZES),
    "batch norm by parts that is to be silent": (lambda: trainer_tells(Normalized(), verify=None), ""),
    "augmented behind the loader": (lambda: trainer_tells(Augmented()), ""),
    "mixed behind the loader": (lambda: trainer_tells(Mixed()), "the gradient of the first batch on 2 processes"),
    "a root of a mean that is logged": (
        lambda: trainer_tells(LogsARoot()),
        "but the mean over the processes of what the training step logs is not: root (",
    ),
    "what goes to a logger itself": (
        lambda: told(lambda: fit(CallbackStrategy(), WritesItself(), loader(29, 8), logger=DummyLogger())),
        "self.logger's raw (1.04808 for 0.984842), self.logger's scalar (1.04808 for 0.984842). Log",
    ),
    "mixed in place by the step": (lambda: trainer_tells(MixesInPlace()), TELLS),
    "augmented by the loader": (lambda: trainer_tells(rows=loader(24, 8, collate_fn=collate_at_random)), ""),
    "augmented by workers, seeded by the rank": (
        lambda: trainer_tells(rows=noisy(num_workers=1, worker_init_fn=seed_by_rank)),
        "",
    ),
    "augmented by a generator of the data set": (lambda: trainer_tells(rows=noisy(torch.Generator())), ""),
    "loaded by workers": (lambda: trainer_tells(KnownOnly(), loader(24, 8, num_workers=1)), TELLS),
    "noise by torch": (lambda: trainer_tells(DrawsNoise(torch.randn_like)), ""),
    "noise by NumPy": (
        lambda: trainer_tells(DrawsNoise(lambda x: torch.from_numpy(numpy.random.normal(size=x.shape)))),
        "draw those of the samples by torch, with the batch in the first dimension",
    ),
    "one number by NumPy": (lambda: trainer_tells(DrawsNoise(lambda x: torch.tensor(numpy.random.normal()))), ""),
    "a mask that its step draws": (lambda: trainer_tells(DrawsNoise(torch.randn_like, mean_of_masked=True)), TELLS),
    "more than one rank can compute": (lambda: trainer_tells(Breaks(), loader(24, 8)), ""),
    "by hand": (lambda: trainer_tells(ByHand()), ""),
    "by hand, of known targets": (lambda: trainer_tells(ByHand(MEAN_OF_KNOWN)), f"{TELLS}for parameter layers."),
    "adversaries": (lambda: trainer_tells(Adversaries(F.cross_entropy)), ""),
    "adversaries, of known targets": (lambda: trainer_tells(Adversaries(MEAN_OF_KNOWN)), TELLS),
    "beside a large gradient": (lambda: trainer_tells(BesideALargeGradient()), f"{TELLS}for parameter layers."),
    "what cannot be copied": (lambda: trainer_tells(ReadsAGenerator()), ""),
    "what cannot be copied, and is not needed": (lambda: trainer_tells(HoldsALock()), TELLS),
    "watched by a hook": (lambda: trainer_tells(Watched()), TELLS),
    "that closes over a module with class weights": (lambda: trainer_tells(WeighsClasses()), TELLS),
    "that reads what each process has logged": (
        lambda: told(lambda: fit(CallbackStrategy(), ReadsWhatItLogs(), loader(29, 8), logger=False)),
        "rank 1 computes other gradients than rank 0 of the same batch: the step or a hook reads a value that each",
    ),
    "a validation with synchronized BatchNorm": (
        lambda: judge(Judges(nn.BatchNorm1d(CLASSES, dtype=torch.float64))),
        f"{JUDGED}spread (",
    ),
    "a Trial": (lambda: trial_tells(nn.CrossEntropyLoss()), ""),
    "a Trial with a loss of its own": (lambda: trial_tells(mean_of_known), TELLS),
    "a Trial with weight": (lambda: trial_tells(mean_of_known, weight=of_known), ""),
    "a Trial that is to be silent": (lambda: trial_tells(mean_of_known, verify=None), ""),
    "a Trial with batch norm by parts, and dropout": (
        lambda: trial_tells(nn.CrossEntropyLoss(), nn.BatchNorm1d(6), nn.Dropout(0.5)),
        NORMALIZES,
    ),
    "a Trial with a callback that changes the targets": (lambda: trial_tells(mean_of_known, callbacks=[all_known]), ""),
    "a Trial with a closure": (lambda: told(lambda: trial(mean_of_known).with_closure(mean_by_hand).run(2)), ""),
}


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 2


class Augments(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.scales, self.seen = Scales(), list[int]()

    def train_dataloader(self) -> Any:
        return loader(29, 8)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen.append(dataloader_idx)
        return self.scales(batch[0]), batch[1]


@WORLD.on(TWO)
def test_hooks_of_a_datamodule_are_compared_on_a_copy_that_leaves_no_trace() -> None:
    datamodule = Augments()
    found = told(lambda: trainer(CallbackStrategy()).fit(KnownOnly(), datamodule=datamodule))
    assert TELLS in found or dist.get_rank(), found
    assert len(datamodule.seen) == datamodule.scales.calls == 8


class DrawsInData(Augments):
    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] * torch.rand((), generator=self.own), batch[1]


@WORLD.on(TWO)
def test_a_comparison_leaves_the_generator_of_a_datamodule_alone() -> None:
    datamodule, expected = DrawsInData(), torch.Generator()
    assert told(lambda: trainer(CallbackStrategy()).fit(KnownOnly(), datamodule=datamodule)) == ""
    torch.rand(8, generator=expected)
    assert torch.equal(torch.rand(3, generator=datamodule.own), torch.rand(3, generator=expected))


@WORLD.on(TWO)
def test_the_log_says_why_a_default_comparison_is_left_out() -> None:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("ddp_callbacks")
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        trainer_tells(ReadsAGenerator())
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    assert any("A batch is not compared" in each and "not an iterator" in each for each in records), records


@WORLD
def warned() -> dict[str, str]:
    return {name: run() for name, (run, _) in WARNINGS.items()}


@pytest.mark.parametrize("name", WARNINGS)
def test_an_inexact_loss_never_passes_silently(name: str) -> None:
    """Inexact losses are warned of."""
    says = WARNINGS[name][1]
    for rank, found in enumerate(each[name] for each in WORLD.returned(warned)):
        if says and rank == 0:
            assert says in found and found.endswith("verify=None leaves the comparison out.)"), found
        else:
            assert found == "", found


class Appends(Net):
    """Appends the labels of each batch to a file, by every process or by rank 0 alone, as some programs do."""

    def __init__(self, path: Path, by_rank_0: bool) -> None:
        super().__init__()
        self.path, self.by_rank_0 = path, by_rank_0

    def test_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero or not self.by_rank_0:
            with self.path.open("a") as file:
                file.writelines(f"{label}\n" for label in batch[1])


@WORLD.on(TWO)
def test_a_comparison_writes_no_row_of_a_step_and_what_each_process_writes_is_named() -> None:
    for by_rank_0, rows, who in ((False, 23, "each process writes"), (True, 12, "rank 0 alone writes")):
        folder = broadcast_object(None if get_rank() else tempfile.mkdtemp(), "a folder")
        path = Path(folder, "rows.txt")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer(OURS).test(Appends(path, by_rank_0), loader(23, 8), verbose=False)
        texts = [str(each.message) for each in caught if "rows.txt" in str(each.message)]
        assert [text.startswith(f"{who} {path} in test_step") for text in texts] == [True] * (get_rank() == 0)
        barrier("the file")
        assert len(path.read_text().splitlines()) == rows
        barrier("its end")
        shutil.rmtree(folder, ignore_errors=True)


@WORLD.on(TWO)
def test_a_step_that_draws_for_each_sample_is_named_and_prints_once() -> None:
    said = "Some random numbers may not .* DrawsForEach .*: when, how often or how much it draws depends on the samples"
    with contextlib.redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(OURS, DrawsForEach(), loader(24, 8))
    assert printed.getvalue().splitlines().count("step 0") == 1
    assert sum(bool(re.match(said, str(each.message))) for each in caught) == 1


class LogsByLength(Net):
    """Its batches of validation have the samples in the second dimension."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("by length", batch.mean())
        self.log("by samples", batch.mean(), batch_size=batch.shape[1])


def time_first(rows: list[int]) -> torch.Tensor:
    return torch.ones(5 + rows[-1], len(rows))


@WORLD.on(TWO)
def test_a_value_that_counts_by_the_length_of_a_part_is_named() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(OURS, LogsByLength(), loader(24, 8), DataLoader(range(12), 4, collate_fn=time_first))
    said = [str(each.message).partition(": ")[0] for each in caught if "is logged without" in str(each.message)]
    sizes = "(8 for its first batch, which has 4, and 6, 8 for the parts)"
    by = "so batches count by what Lightning takes for the number of samples"
    assert said == [f"'by length' is logged without batch_size=, {by} {sizes}"] * (dist.get_rank() == 0)


class Traced(LogsAll):
    """Keeps what its steps have done in attributes and in the Trainer, and logs by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.losses, self.seen = 0, [], {"rows": []}
        self.average = torch.zeros(FEATURES, dtype=torch.float64)
        self.drop = nn.Dropout(0.3)
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.steps += 1
        self.average.mul_(0.9).add_(batch[0].mean(0))
        self.seen["rows"].append(len(batch[0]))
        self.trainer.seen = getattr(self.trainer, "seen", 0) + 1  # type: ignore[attr-defined]
        for slow, fast in zip(self.teacher.parameters(), self.layers.parameters(), strict=True):
            slow.data.mul_(0.8).add_(fast.data, alpha=0.2)
        loss = super().training_step((self.drop(batch[0]), batch[1]), batch_idx)
        loss = loss + F.mse_loss(self(batch[0]), self.teacher(batch[0]))
        self.losses.append(loss.detach())
        self.logger.log_metrics({"by hand": float(loss.detach())}, self.steps)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Not the norm of all gradients: the teacher has none."""


class TermFromEpoch3(Net):
    """Its loss is a mean over known targets from epoch 3 on. Keeps what its steps have done."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: tuple[torch.Tensor, ...] = ()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1], ignore_index=0 if self.current_epoch >= 3 else -100)
        self.seen = (*self.seen, loss.detach() + torch.rand(()))
        return loss


class CriterionFromEpoch3(nn.Module):
    """Counts the epochs, of one batch each, by its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, outputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.cross_entropy(outputs, classes if self.calls > 3 else classes.clamp(min=0))


@WORLD.on(TWO)
def test_a_term_that_a_loss_gets_later_is_warned_of_in_the_next_batch_that_is_compared() -> None:
    tells = "the gradient of batch {} of the training on 2 processes is not that of one process: for parameter"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "_FREELY", 0)
        patch.setattr(verification, "_RARELY", 0)
        found = [(12, late_term()), (3, told(lambda: trial(CriterionFromEpoch3()).run(9)))]
        patch.setattr(verification, "_RARELY", 1e9)
        assert late_term() == ""
        patch.setattr(verification, "_FREELY", 1e9)
        found.append((22, late_term()))  # 13 and 17 have as many known targets in each part
    assert dist.get_rank() or all(text.count(tells.format(at)) == text.count("the grad") == 1 for at, text in found)


def late_term() -> str:
    return told(lambda: fit(CallbackStrategy(), TermFromEpoch3(), loader(29, 8), max_epochs=9))


@WORLD.as_on_one()
def test_a_mean_that_one_part_alone_logs_first_is_no_sum(strategy: str) -> Any:
    x, y = loader(32, 8).dataset[:]
    x[:, 0] = torch.tensor([-1.0] * 7 + [1.0] * 25)
    return fit(strategy, LogsARareMean(), DataLoader(TensorDataset(x, y), 8))


@WORLD.on(TWO)
def test_comparisons_leave_no_trace() -> None:
    def run(kind: Any, **options: Any) -> Any:
        module = kind()
        found = fit(CallbackStrategy(**options), module, loader(29, 8, shuffle=True), max_epochs=5)
        kept = [getattr(module, name, None) for name in ("steps", "losses", "seen", "average")]
        return found, module.state_dict(), kept, getattr(module.trainer, "seen", None), torch.get_rng_state()

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        for text in ("the processes have unequal parts", "the gradient of (the first batch|batch .*) is that of one"):
            warnings.filterwarnings("ignore", text)  # by loss.backward(), which is not weighed; by a logger
        patch.setattr(verification, "_RARELY", 0)
        for kind in (Traced, ByHand, ByPlainBackward, functools.partial(Net, optimizer=lbfgs)):
            assert_equal(run(kind), run(kind, verify=None), 0.0)


class Outside:
    calls = 0

    def __init__(self) -> None:
        self.calls, self.sizes, self.sum = 0, deque[int](), torch.zeros(())

    def count(self, size: int) -> None:
        self.calls, self.sizes = self.calls + 1, deque([*self.sizes, size])
        self.sum += 1
        Outside.calls += 1


def counting() -> tuple[Callable[[], None], Callable[[], int]]:
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1

    return count, lambda: calls


def tally(batch: Any, known: tuple[list[int], ...] = ([],)) -> int:
    tally.calls += 1  # type: ignore[attr-defined]
    known[0].append(len(batch[0]))
    return len(known[0])


CALLS, OF_BATCHES, OUTSIDE, (COUNT, COUNTED) = 0, {"all": [0], "of sizes": numpy.zeros(9)}, Outside(), counting()
OPTIONS = SimpleNamespace(tallied=0)


class CountsOutside(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        global CALLS
        CALLS += 1
        OF_BATCHES["all"][0] += 1
        OF_BATCHES["of sizes"][len(batch[0])] += 1
        OUTSIDE.count(len(batch[0]))
        COUNT()
        OPTIONS.tallied = tally(batch)
        return super().training_step(batch, batch_idx)


@WORLD.on(TWO)
def test_a_comparison_counts_nothing_that_a_step_counts_outside_of_its_module() -> None:
    OUTSIDE.__init__()  # type: ignore[misc]
    tally.calls = Outside.calls = 0  # type: ignore[attr-defined]
    before = CALLS, OF_BATCHES["all"][0], COUNTED(), int(OF_BATCHES["of sizes"].sum())
    fit(CallbackStrategy(), CountsOutside(), loader(29, 8), max_epochs=2)
    after = CALLS, OF_BATCHES["all"][0], COUNTED(), int(OF_BATCHES["of sizes"].sum())
    found = [now - then for now, then in zip(after, before, strict=True)]
    found += [OUTSIDE.calls, len(OUTSIDE.sizes), int(OUTSIDE.sum), Outside.calls, OPTIONS.tallied]
    assert found == [8] * 9


class OnlyOne:
    made: ClassVar[Any] = None

    def __new__(cls) -> OnlyOne:
        if cls.made is None:
            cls.made = super().__new__(cls)
            cls.made.calls = 0
        return cls.made

    def count(self) -> None:
        self.calls = self.calls + 1
        type(self).also = getattr(type(self), "also", 0) + 1


NUMBERS, COUNT_ONE, NAMES = itertools.count(), OUTSIDE.count, {"tally": functools.partial(tally, known=([],))}


class CountsBehind(Net):
    """By an iterator, a method of an object, a function with arguments in a dict, and the one object of a class."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        next(NUMBERS)
        COUNT_ONE(1)
        NAMES["tally"](batch)
        OnlyOne().count()
        return super().training_step(batch, batch_idx)


@WORLD.on(TWO)
def test_a_comparison_moves_no_iterator_and_counts_nothing_by_methods_partials_and_singletons() -> None:
    OnlyOne.made = None
    Outside.calls = tally.calls = 0  # type: ignore[attr-defined]
    OUTSIDE.__init__()  # type: ignore[misc]
    number = next(NUMBERS)
    fit(CallbackStrategy(), CountsBehind(), loader(29, 8), max_epochs=2)
    known = NAMES["tally"].keywords["known"][0]
    found = [next(NUMBERS) - number - 1, OUTSIDE.calls, len(known), OnlyOne().calls, OnlyOne.also]  # type: ignore[attr-defined]
    assert found == [8] * 5


class GoesByAGenerator(KnownOnly):
    numbers = SimpleNamespace(of=(number for number in range(1000)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        next(self.numbers.of)
        return super().training_step(batch, batch_idx)


@WORLD.on(TWO)
def test_a_step_that_moves_a_generator_is_not_compared() -> None:
    before = next(GoesByAGenerator.numbers.of)
    assert told(lambda: fit(CallbackStrategy(), GoesByAGenerator(), loader(29, 8), max_epochs=1)) == ""
    assert next(GoesByAGenerator.numbers.of) - before == 5


SIGNALS = 0


def on_signal(*_: object) -> None:
    global SIGNALS
    SIGNALS += 1


class GetsASignal(Net):
    """In a comparison, the only one that computes whole batches."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if len(batch[0]) == 8 and not SIGNALS:
            signal.raise_signal(signal.SIGUSR2)
        return super().training_step(batch, batch_idx)


@WORLD.on(TWO)
def test_what_a_handler_of_signals_notes_during_a_comparison_stays() -> None:
    before = signal.signal(signal.SIGUSR2, on_signal)
    try:
        fit(CallbackStrategy(), GetsASignal(), loader(29, 8), max_epochs=1)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert SIGNALS == 1


class GathersByHand(Net):
    """As contrastive losses do. Parts of other sizes would end the process."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        parts = [torch.empty_like(batch[0]) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, batch[0])
        return super().training_step(batch, batch_idx)


@WORLD.on(TWO)
def test_a_step_that_communicates_is_not_compared() -> None:
    assert told(lambda: fit(CallbackStrategy(), GathersByHand(), loader(24, 8), max_epochs=1)) == ""
    says = "cannot compare a step that communicates (torch.distributed.all_gather)"
    strict = CallbackStrategy(verify="first_batch")
    assert says in outcome(lambda: fit(strict, GathersByHand(), loader(24, 8), max_epochs=1))
    parts = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(parts, torch.ones(1))
    assert parts[1] == 1


class ComparesItsRows(Net):
    """Compares the rows of a part with those of all parts, as CLIP's local loss does."""

    sizes = queue.SimpleQueue[int]()  # of a library, so comparisons change it, too

    def rank(self) -> int:
        return self.global_rank

    def loss(self, batch: Any) -> torch.Tensor:
        self.sizes.put(len(batch[1]))
        outputs, labels = self(batch[0]), torch.arange(len(batch[1])) + self.rank() * len(batch[1])
        every = self.all_gather(outputs, sync_grads=True).reshape(-1, CLASSES)
        return F.cross_entropy(outputs @ every.T, labels)


class KnowsItsRank(ComparesItsRows):
    def __init__(self) -> None:
        super().__init__()
        self.own = get_rank()

    def rank(self) -> int:
        return self.own


class AsksForItsRank(ComparesItsRows):
    def rank(self) -> int:
        assert dist.get_rank() == get_rank() == self.global_rank
        return dist.get_rank()


@WORLD.on(TWO)
def test_no_part_is_compared_if_one_rank_alone_cannot_compute_the_whole_batch() -> None:
    for kind, compared in ((KnowsItsRank, []), (AsksForItsRank, [(6, 2)[get_rank()]])):
        fit(CallbackStrategy(), kind(), loader(32, 8), max_epochs=1)
        found = [ComparesItsRows.sizes.get_nowait() for _ in range(ComparesItsRows.sizes.qsize())]
        assert found == [8, *compared, 4, 4, 4, 4]


class DividesByAll(Net):
    """Divides by what all parts have, as many losses of boxes do."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        count = (batch[1] > 0).sum().double()
        if dist.is_initialized():
            dist.all_reduce(count)
        loss = F.cross_entropy(self(batch[0]), batch[1], reduction="sum") / count
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


@WORLD.on(TWO)
def test_a_loss_that_communicates_is_named_where_parts_are_unequal() -> None:
    says = "the loss calls torch.distributed.all_reduce, so it is not compared with one process, and the parts of a "
    texts = [
        told(lambda rows=rows: fit(CallbackStrategy(), DividesByAll(), loader(rows, 8), max_epochs=1))
        for rows in (24, 29)
    ]
    assert texts[0] == "" and texts[1].startswith(f"{says}batch are not equal (3 of 5") == (dist.get_rank() == 0)


class LeavesOut(EitherWay):
    """Steps that leave out batches, such as small ones; automatic ones return ``None`` for them."""

    def __init__(self, leaves_out: Callable[[int, int], bool], by_hand: bool) -> None:
        super().__init__(by_hand)
        self.leaves_out = leaves_out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if self.leaves_out(len(batch[0]), batch_idx) else super().training_step(batch, batch_idx)


@WORLD.on(TWO)
def test_parts_that_a_step_leaves_out_because_they_are_small_are_named() -> None:
    # One process trains on the last batch, or on all, and nothing told.
    ways = [lambda samples, _: samples < 3, lambda _, number: number == 1, lambda samples, _: samples < 5]
    for by_hand in (False, True):
        texts = [trainer_tells(LeavesOut(leaves_out, by_hand), loader(20, 8)) for leaves_out in ways]
        parts = [re.sub(r".* of a batch \((.*?) samples.*", r"\1", text) for text in texts]
        assert parts == (["2 of 4", "", "4 of 8"] if dist.get_rank() == 0 else ["", "", ""])


@WORLD.as_on_one()
def test_a_sum_divided_by_what_all_parts_have_trains_and_is_logged_as_on_one_process(strategy: str) -> Any:
    chosen = CallbackStrategy(reduction="sum") if strategy == OURS else strategy
    return fit(chosen, DividesByAll(), loader(29, 8, shuffle=True))


class CountsNoneAtFirst(Net):
    """Counts nothing in the first batch of a later epoch, which is compared, too."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        counts = self.current_epoch != 1 or batch_idx > 0
        self.log("seen", float(len(batch[0]) * counts), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


@WORLD.as_on_one()
def test_a_count_stays_one_after_a_comparison_of_a_batch_without_any(strategy: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "_RARELY", 0)
        return fit(strategy, CountsNoneAtFirst(), loader(29, 8), max_epochs=2)


class CountsAndDiffers(KnownOnly):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("seen", float(len(batch[0])), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


@WORLD.on(TWO)
def test_a_count_is_a_sum_also_where_the_gradient_is_not_that_of_one_process() -> None:
    found: dict[str, Any] = {}
    told(lambda: found.update(fit(CallbackStrategy(), CountsAndDiffers(), loader(29, 8), max_epochs=1)))
    assert float(found["callback_metrics"]["seen"]) == pytest.approx((3 * 8 * 8 + 5 * 5) / 29)


class LogsWithARoot(Net):
    """What no parts give, beside what they give; it holds what cannot be copied, and compiled layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.rows, self.last = threading.Lock(), csv.writer(io.StringIO()), torch.zeros(())
        self.layers.compile(backend="eager")

    def _log_all(self, batch: Any) -> None:
        with self.lock:
            self.last = super().training_step(batch, 0)
            self.rows.writerow([float(self.last)])
        self.log("root", self.last.exp(), on_step=False, on_epoch=True)
        self.log("highest", self.last, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("rows", float(len(batch[0])), on_step=False, on_epoch=True)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self._log_all(batch)
        return self.last

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._log_all(batch)


@WORLD.as_on_one()
def test_a_value_that_no_parts_give_does_not_spoil_those_beside_it(strategy: str) -> Any:
    # An open file, a lock, a kept output or compiled layers left the comparison out, and with it all counts.
    made = trainer(strategy, max_epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(LogsWithARoot(), loader(29, 8))
        found = dict(made.callback_metrics)
        (of_validation,) = made.validate(LogsWithARoot(), loader(13, 5, 9), verbose=False)
    found |= {f"val_{name}": value for name, value in of_validation.items()}
    return {name: value for name, value in found.items() if not name.endswith("root")}


@WORLD.on(TWO)
def test_a_part_without_weight_whose_loss_is_not_zero_is_named() -> None:
    rows = TensorDataset(loader(16, 8).dataset[:][0], torch.tensor([0, 1, 2, 1] * 3 + [0] * 4))
    kind = functools.partial(CallbackStrategy, weight=lambda batch: (batch[1] > 0).sum())
    text = told(lambda: fit(kind(), Net(), DataLoader(rows, 8), max_epochs=1))
    says = "weight= counts nothing in this rank's part of step 1, so its loss of "
    assert (says in text) == (dist.get_rank() == 1)


class Averaged(nn.Module):
    """A loss that is divided by a running mean of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones((), dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, outputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(outputs, classes)
        self.mean.lerp_(loss.detach(), 0.5)
        return loss / self.mean * self.scale


AVERAGED = Averaged()


class CallsAGlobal(Net):
    """Its loss is a module that the script keeps, not the model."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return AVERAGED(self(batch[0]), batch[1])


@WORLD.on(TWO)
def test_a_module_of_the_script_is_compared_on_a_copy_unless_it_may_train() -> None:

    def mean_after(run: Callable[..., str], says: str = "", **options: Any) -> float:
        AVERAGED.mean.fill_(1.0)
        assert (says in run(**options)) if says and get_rank() == 0 else (run(**options) == "")
        return float(AVERAGED.mean)

    def in_trainer(**options: Any) -> str:
        return trainer_tells(CallsAGlobal(), **options)

    for run in (in_trainer, functools.partial(trial_tells, lambda *arguments: AVERAGED(*arguments))):
        AVERAGED.requires_grad_(True)
        assert mean_after(run) == mean_after(run, verify=None) != 1.0
        AVERAGED.requires_grad_(False)
        assert mean_after(run, says=TELLS) == mean_after(run, verify=None) != 1.0


CASES = LOSSES | RUNS


@WORLD
def cases() -> dict[str, str]:
    return {name: run() for name, (run, _) in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_an_exact_loss_passes_in_the_first_batch_and_another_is_named(name: str) -> None:
    """`verify="first_batch"` names an inexact loss and the remedy."""
    for found in WORLD.returned(cases):
        assert_told(found[name], CASES[name][1])


@WORLD.as_on_one()
def test_a_trainer_that_is_verified_trains_as_one_process(strategy: str) -> Any:
    # Values of steps and epochs, torchmetrics among them, do not see the batch that was computed again.
    chosen: Any = CallbackStrategy(verify="first_batch") if strategy == OURS else strategy
    return fit(chosen, LogsAll())


@WORLD.as_on_one()
def test_a_loss_that_is_a_sum_trains_as_on_one_process_where_the_strategy_knows(strategy: str) -> Any:
    """`reduction="sum"` trains a sum as one process does."""
    chosen: Any = CallbackStrategy(reduction="sum", verify="first_batch") if strategy == OURS else strategy
    return fit(chosen, Summed(), loader(26, 8, shuffle=True))  # with two samples in the last batch
