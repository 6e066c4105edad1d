"""Parts of programs with a Trainer."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
import trainers
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities import CombinedLoader
from program_parts import CONTAINERS, PLAIN, Build, add, calls_in, part
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.retrieval import RetrievalMAP
from trainers import CLASSES, FEATURES, GAN, Net, WeightedClasses, Within, counted

from ddp_callbacks.errors import PeerError

trainer_part = functools.partial(part, "trainer")
BY_HAND = "accumulates clips schedule averages optimizer"


class Module(Net):
    """What the classes of the parts extend."""

    seen: list[float]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().test_step(batch, batch_idx)


class TrainerBuild(Build):
    """
    Attributes:
        classes: Of the module, which extend :class:`Module`.
        options: Of the Trainer.
    """

    def __init__(self, seed: int, strategy: Within) -> None:
        super().__init__(seed, trainers.data, strategy.has_resume and strategy.cut is None)
        self.strategy, self.classes = strategy, list[type]()
        self.options: dict[str, Any] = {}
        self.optimizer: Any = None
        self.schedule: Any = None

    def run(self) -> Any:
        kind = type("Program", (*reversed(self.classes), Module), {})
        self.module = kind(optimizer=self.optimizer, scheduler=self.schedule)
        self.trainer = self.new_trainer()
        return [call() for call in (*self.before, self.fit, *self.after)]

    def new_trainer(self) -> pl.Trainer:
        options = {"max_epochs": self.epochs, "callbacks": copy.deepcopy(self.callbacks)} | self.options
        return trainers.trainer(self.strategy.given(**self.given), **options)

    def fit(self) -> Any:
        self.trainer.fit(self.module, self.train, self.validation)
        states = [optimizer.state_dict()["state"] for optimizer in self.trainer.optimizers]
        found = trainers.outcome(self.trainer, self.module)
        return found | {"optimizers": copy.deepcopy(states), "seen": [*self.module.seen]}


# --- state that training steps leave behind ---------------------------------------------------------------------------


@trainer_part(each=CONTAINERS)
def keeps_calls_in(p: TrainerBuild, container: str) -> None:
    class Keeps(Module):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.kept = CONTAINERS[container]()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            add(self.kept)
            return super().training_step(batch, batch_idx) * (1 + 0.1 * calls_in(self.kept))

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["calls"] = calls_in(self.kept)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.kept = CONTAINERS[container]()
            for _ in range(checkpoint["calls"]):
                add(self.kept)

    if container in PLAIN:  # Resume keeps them by itself
        del Keeps.on_save_checkpoint, Keeps.on_load_checkpoint
    p.classes.append(Keeps)


class Annealed:
    """A loss that is no module."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return loss * (1 + 0.2 * min(self.calls, 5))


class AnnealedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return loss * (1 + 0.2 * self.calls.clamp(max=5))


@trainer_part(can_be_cut=False)
def loss_object(p: TrainerBuild) -> None:
    _anneal(p, Annealed)


@trainer_part()
def loss_module(p: TrainerBuild) -> None:
    _anneal(p, AnnealedModule)


def _anneal(p: TrainerBuild, make: Callable[[], Any]) -> None:
    class Anneals(Module):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.anneal = make()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.anneal(super().training_step(batch, batch_idx))

    p.classes.append(Anneals)


@trainer_part(each=("training_step", "on_train_batch_end", "on_before_zero_grad"))
def teacher_moved_in(p: TrainerBuild, hook: str) -> None:
    class Student(Module):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.teacher = copy.deepcopy(self.layers).requires_grad_(False)

        @torch.no_grad()
        def move(self) -> None:
            for old, new in zip(self.teacher.parameters(), self.layers.parameters(), strict=True):
                old.mul_(0.8).add_(new, alpha=0.2)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if hook == "training_step":
                self.move()
            return super().training_step(batch, batch_idx) + F.mse_loss(self(batch[0]), self.teacher(batch[0]))

    def moves(self: Any, *args: Any) -> None:
        getattr(super(Student, self), hook)(*args)
        self.move()

    if hook != "training_step":
        setattr(Student, hook, moves)
    p.classes.append(Student)


@trainer_part()
def buffer_counts(p: TrainerBuild) -> None:
    class Buffer(Module):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.register_buffer("steps", torch.zeros((), dtype=torch.float64))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.steps += 1
            return super().training_step(batch, batch_idx) / (1 + 0.1 * self.steps)

    p.classes.append(Buffer)


@trainer_part()
def buffer_with_the_shape_of_the_batch(p: TrainerBuild) -> None:
    """Grows as caches of masks do."""

    class Cache(Module):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.register_buffer("mask", torch.ones(0, 1, dtype=torch.float64), persistent=False)

        def loss(self, batch: Any) -> torch.Tensor:
            if len(self.mask) < len(batch[0]):
                self.mask = torch.full((len(batch[0]), 1), 0.9, dtype=torch.float64)
            return super().loss((batch[0] * self.mask[: len(batch[0])], batch[1]))

    p.classes.append(Cache)


@trainer_part()
def buffer_that_follows_the_data(p: TrainerBuild) -> None:
    class Codebook(Module):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.register_buffer("codebook", torch.zeros(FEATURES, dtype=torch.float64))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.codebook.mul_(0.9).add_(batch[0].mean(0), alpha=0.1)
            return super().training_step((batch[0] - 0.1 * self.codebook, batch[1]), batch_idx)

    p.classes.append(Codebook)
    p.allowed.append("codebook")


@trainer_part(without="validation_of_single_samples")
def batchnorm(p: TrainerBuild) -> None:
    class Normalized(Module):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.layers.insert(1, nn.BatchNorm1d(8).double())

    p.classes.insert(0, Normalized)
    p.options["sync_batchnorm"] = True


# --- what is logged ---------------------------------------------------------------------------------------------------

REDUCED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "max": torch.max,
    "min": torch.min,
}


@trainer_part(each=REDUCED, without="weighed")
def logs(p: TrainerBuild, reduction: str) -> None:
    options = {"reduce_fx": reduction, "on_epoch": True, "on_step": p.maybe(), "sync_dist": p.maybe(0.3)}
    every, trains = p.rng.randint(1, 2), p.maybe(0.6)

    class Logs(Module):
        def note(self, batch: Any, batch_idx: int) -> None:
            if batch_idx % every == every - 1:
                each = F.cross_entropy(self(batch[0]), batch[1], reduction="none").detach()
                self.log(f"the_{reduction}", REDUCED[reduction](each), **options)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if trains:
                self.note(batch, batch_idx)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx, dataloader_idx)
            if not trains:
                self.note(batch, batch_idx)

    p.classes.append(Logs)


@trainer_part(without="weighed", each=("training", "validation"))
def logs_a_class_if_there_is_one(p: TrainerBuild, stage: str) -> None:
    on_step = p.maybe()

    class Positives(Module):
        def note(self, batch: Any) -> None:
            chosen = (batch[1] == 2) & (batch[0][:, 0] > 0.3)
            if chosen.any():
                loss = F.cross_entropy(self(batch[0][chosen]), batch[1][chosen]).detach()
                self.log("positives", loss, batch_size=int(chosen.sum()), on_step=on_step, on_epoch=True)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if stage == "training":
                self.note(batch)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx, dataloader_idx)
            if stage == "validation":
                self.note(batch)

    p.classes.append(Positives)


@trainer_part()
def logs_a_masked_mean(p: TrainerBuild) -> None:
    class Masked(Module):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            mask = (batch[1] != 0).double()
            value, count = batch[0][:, 1] * mask, int(mask.sum())
            self.log("masked", value.sum() / max(1, count), batch_size=count, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    p.classes.append(Masked)


@trainer_part(without="batches_smaller_than_the_world", can_be_cut=False)
def logs_with_a_constant_batch_size(p: TrainerBuild) -> None:
    class Constant(Module):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log("constant", batch[0].mean(), batch_size=3, on_epoch=True)
            return super().training_step(batch, batch_idx)

    p.classes.append(Constant)


@trainer_part(without="by_hand")
def logs_in_hooks(p: TrainerBuild) -> None:
    class Hooks(Module):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.log("norm", torch.stack([q.grad.norm() for q in self.parameters() if q.grad is not None]).norm())

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            super().on_train_batch_end(outputs, batch, batch_idx)
            self.log("behind", outputs["loss"].detach(), on_step=True, on_epoch=True)

        def on_train_epoch_end(self) -> None:
            super().on_train_epoch_end()
            self.log("epoch_end", self.trainer.callback_metrics["loss_epoch"] * 2)

    p.classes.append(Hooks)


@trainer_part()
def logs_at_the_start_of_validation_batches(p: TrainerBuild) -> None:
    class Starts(Module):
        def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("samples", float(len(batch[1])), reduce_fx="sum", on_step=False, on_epoch=True)

    p.classes.append(Starts)


@trainer_part(each=("on_validation_end", "on_train_epoch_end", "on_validation_epoch_end"))
def reads_in(p: TrainerBuild, hook: str) -> None:
    class Reads(Module):
        pass

    def read(self: Any) -> None:
        getattr(super(Reads, self), hook)()
        values = self.trainer.callback_metrics
        self.seen += [float(values[key]) for key in sorted(values) if not self.trainer.sanity_checking]

    setattr(Reads, hook, read)
    p.classes.append(Reads)


Update = Callable[[Any, torch.Tensor, torch.Tensor], None]


def _by_logits(metric: Any, logits: torch.Tensor, y: torch.Tensor) -> None:
    metric.update(logits.softmax(1), y)


def _by_values(metric: Any, logits: torch.Tensor, y: torch.Tensor) -> None:
    metric.update(logits.detach()[:, 0])


def _by_queries(metric: Any, logits: torch.Tensor, y: torch.Tensor) -> None:
    metric.update(logits.detach()[:, 1].sigmoid(), y == 1, indexes=y * 0)


class Own(torchmetrics.Metric):
    """Its state is reduced by ``reduction``."""

    def __init__(self, reduction: Any) -> None:
        super().__init__()
        is_list = reduction in ("cat", None)
        self.add_state("kept", [] if is_list else torch.zeros((), dtype=torch.float64), dist_reduce_fx=reduction)
        self.reduction = reduction

    def update(self, values: torch.Tensor) -> None:
        if isinstance(self.kept, list):
            self.kept.append(values)
        else:
            more = {"max": torch.max, "min": torch.min}.get(self.reduction, torch.sum)(values)
            parts = torch.stack([self.kept, more])
            self.kept = {"max": torch.max, "min": torch.min}.get(self.reduction, torch.sum)(parts)

    def compute(self) -> torch.Tensor:
        kept = self.kept if isinstance(self.kept, torch.Tensor) else torch.cat(list(self.kept))
        return kept.square().sum()


def _multiclass(kind: Any, **options: Any) -> Any:
    return kind("multiclass", num_classes=CLASSES, **options)


def _summed(states: torch.Tensor) -> torch.Tensor:
    return states.sum(0)


METRICS: dict[str, tuple[Callable[[], Any], Update]] = {
    "mean": (torchmetrics.MeanMetric, _by_values),
    "sum": (torchmetrics.SumMetric, _by_values),
    "max": (torchmetrics.MaxMetric, _by_values),
    "min": (torchmetrics.MinMetric, _by_values),
    "cat": (torchmetrics.CatMetric, _by_values),
    "own_none": (lambda: Own(None), _by_values),
    "own_cat": (lambda: Own("cat"), _by_values),
    "own_max": (lambda: Own("max"), _by_values),
    "own_function": (lambda: Own(_summed), _by_values),
    "retrieval": (lambda: RetrievalMAP(empty_target_action="skip"), _by_queries),
    "accuracy": (lambda: _multiclass(torchmetrics.Accuracy), _by_logits),
    "f1": (lambda: _multiclass(torchmetrics.F1Score, average="macro"), _by_logits),
    "auroc": (lambda: _multiclass(torchmetrics.AUROC), _by_logits),
    "confusion": (lambda: _multiclass(torchmetrics.ConfusionMatrix), _by_logits),
    "collection": (
        lambda: torchmetrics.MetricCollection(
            [_multiclass(torchmetrics.Recall), _multiclass(torchmetrics.Precision), _multiclass(torchmetrics.AUROC)]
        ),
        _by_logits,
    ),
    "minmax": (lambda: torchmetrics.MinMaxMetric(_multiclass(torchmetrics.Accuracy)), _by_logits),
}


@trainer_part(each=METRICS)
def metric(p: TrainerBuild, name: str) -> None:
    """Updated and logged at the end of an epoch; some are logged as objects."""
    trains = p.maybe()
    make, update = METRICS[name]

    class Measures(Module):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.measure = make().set_dtype(torch.float64)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if trains:
                update(self.measure, self(batch[0]).detach(), batch[1])
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx, dataloader_idx)
            if not trains:
                update(self.measure, self(batch[0]).detach(), batch[1])

        def finish(self) -> None:
            found = self.measure.compute()
            found = found if isinstance(found, dict) else {"measured": found}
            self.log_dict({key: value.double().square().sum() for key, value in found.items()})
            self.measure.reset()

        def on_train_epoch_end(self) -> None:
            super().on_train_epoch_end()
            if trains:
                self.finish()

        def on_validation_epoch_end(self) -> None:
            super().on_validation_epoch_end()
            if not trains:
                self.finish()

    p.classes.append(Measures)


@trainer_part(each=("mean", "accuracy", "f1", "max", "minmax"))
def metric_logged_as_object(p: TrainerBuild, name: str) -> None:
    make, update = METRICS[name]
    on_step = p.maybe()

    class Measures(Module):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.object = make().set_dtype(torch.float64)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            logits = self(batch[0]).detach()
            if on_step and update is _by_logits:
                self.object(logits.softmax(1), batch[1])
            else:
                update(self.object, logits, batch[1])
            if name != "minmax":
                self.log("object", self.object, on_step=on_step and update is _by_logits, on_epoch=True)
            return super().training_step(batch, batch_idx)

    p.classes.append(Measures)


@trainer_part(without="no_validation weighed")
def callback_counts_rows(p: TrainerBuild) -> None:
    """In a test whose batches leave some process without a sample."""

    class Counts(pl.Callback):
        rows = 0.0

        def on_test_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
            self.rows += len(batch[0])

        def on_test_epoch_end(self, trainer: Any, module: Any) -> None:
            module.log("rows", self.rows, reduce_fx="sum", sync_dist=True)

    p.callbacks.append(Counts())
    p.after.append(lambda: p.trainer.test(p.module, DataLoader(p.data(5, 8), 1), verbose=False))


@trainer_part(without="no_validation validation_is_none")
def monitors(p: TrainerBuild) -> None:
    """Decisions by logged values, and the names of the files."""
    stop = EarlyStopping("val_loss", patience=1, min_delta=0.01)
    p.callbacks += [stop, LearningRateMonitor("step")]
    p.epochs = 4
    p.options["check_val_every_n_epoch"] = 1


@trainer_part(without="no_validation validation_is_none", can_be_cut=False)
def checkpoints(p: TrainerBuild) -> None:
    def fit_and_list() -> Any:
        saved = p.trainer.checkpoint_callback
        return [float(saved.best_model_score), sorted(map(float, saved.best_k_models.values()))]

    p.callbacks.append(
        ModelCheckpoint(p.folder, "{epoch}-{val_loss:.3f}", "val_loss", save_top_k=2, save_weights_only=p.maybe())
    )
    p.options["enable_checkpointing"] = True
    p.after.append(fit_and_list)


# --- losses -----------------------------------------------------------------------------------------------------------


@trainer_part(kind="loss", without="train validation")
def weighed(p: TrainerBuild) -> None:
    """A mean over the samples that are not of class 0."""

    class Masked(Module):
        def loss(self, batch: Any) -> torch.Tensor:
            counts = (batch[1] != 0).double()
            return (F.cross_entropy(self(batch[0]), batch[1], reduction="none") * counts).sum() / counts.sum()

    p.classes.append(Masked)
    p.given["weight"] = counted
    p.train, p.validation = trainers.masked(29, 8, 0), trainers.masked(13, 5, 9)


@trainer_part(kind="loss", without="train validation")
def weighed_classes(p: TrainerBuild) -> None:
    class Weighted(Module):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.criterion = WeightedClasses().criterion

        def loss(self, batch: Any) -> torch.Tensor:
            return self.criterion(self(batch[0]), batch[1])

    p.classes.append(Weighted)
    p.given["weight"] = "cross_entropy"
    p.train, p.validation = trainers.masked(29, 8, 0), trainers.masked(13, 5, 9)


@trainer_part()
def regularized(p: TrainerBuild) -> None:
    class Regularized(Module):
        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(batch) + 0.01 * sum(q.square().sum() for q in self.layers.parameters())

    p.classes.append(Regularized)


# --- optimization -----------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adam": lambda net: torch.optim.Adam(net.parameters(), 0.02),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), 0.02, amsgrad=True),
    "rmsprop": lambda net: torch.optim.RMSprop(net.parameters(), 0.01, momentum=0.5),
    "sgd": lambda net: torch.optim.SGD(net.parameters(), 0.2),
    "groups": lambda net: torch.optim.SGD([{"params": [q], "lr": 0.1 / (1 + q.ndim)} for q in net.parameters()], 0.1),
    "lbfgs": trainers.lbfgs,
}


@trainer_part(kind="optimizer", each=OPTIMIZERS)
def optimizer(p: TrainerBuild, name: str) -> None:
    p.optimizer = OPTIMIZERS[name]


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "epoch": trainers.halving,
    "plateau": trainers.on_plateau,
    "one_cycle": functools.partial(trainers.one_cycle, cycle_momentum=False),
    "step": lambda o: {"scheduler": torch.optim.lr_scheduler.StepLR(o, 2, 0.8), "interval": "step", "frequency": 2},
    "plateau_by_step": lambda o: {
        "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.05),
        "interval": "step",
        "monitor": "loss",
    },
}


@trainer_part(kind="schedule", each=SCHEDULES, without="no_validation validation_is_none")
def schedule(p: TrainerBuild, name: str) -> None:
    p.schedule = SCHEDULES[name]


@trainer_part(kind="optimizer", without=f"loss teacher_moved_in logs_in_hooks {BY_HAND}")
def by_hand(p: TrainerBuild) -> None:
    """Two optimizers; one accumulates."""

    class ByHand(Module):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.automatic_optimization = False
            self.judge = nn.Linear(CLASSES, 1).double()

        training_step = GAN.training_step
        configure_optimizers = GAN.configure_optimizers

    p.classes.insert(0, ByHand)


@trainer_part(each=("always", "by_epoch"))
def accumulates(p: TrainerBuild, how: str) -> None:
    if how == "always":
        p.options["accumulate_grad_batches"] = p.rng.randint(2, 4)
    else:
        p.callbacks.append(GradientAccumulationScheduler({0: 2, 1: 3}))


@trainer_part(each=("norm", "value"), without="lbfgs")
def clips(p: TrainerBuild, algorithm: str) -> None:
    p.options |= {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}


@trainer_part(each=("ema", "swa"))
def averages(p: TrainerBuild, how: str) -> None:
    ema = how == "ema"
    p.callbacks.append(EMAWeightAveraging(decay=0.7) if ema else StochasticWeightAveraging(0.05, swa_epoch_start=1))


@trainer_part(each=("replaced", "group", "assigned"), without="averages schedule by_hand", can_be_cut=False)
def new_parameters(p: TrainerBuild, how: str) -> None:
    """In the second epoch; the library may also refuse them by name."""

    class Grows(Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + (self.adapter(x) if hasattr(self, "adapter") else 0)

        def on_train_epoch_start(self) -> None:
            super().on_train_epoch_start()
            if self.current_epoch != 1:
                return
            if how == "replaced":
                self.layers[-1] = nn.Linear(8, CLASSES).double()
                self.trainer.strategy.setup_optimizers(self.trainer)
            elif how == "assigned":
                state = {name: value.clone() for name, value in self.state_dict().items()}
                self.load_state_dict(state, assign=True)
                self.trainer.strategy.setup_optimizers(self.trainer)
            else:
                self.adapter = nn.Linear(FEATURES, CLASSES).double()
                self.trainer.optimizers[0].add_param_group({"params": list(self.adapter.parameters())})

    p.classes.append(Grows)
    p.allowed.append(r"layers|adapter|parameter")


@trainer_part(each=("on_train_epoch_start", "on_train_batch_start", "on_validation_end"))
def rounded_in(p: TrainerBuild, hook: str) -> None:
    class Rounds(Module):
        pass

    def rounds(self: Any, *args: Any) -> None:
        getattr(super(Rounds, self), hook)(*args)
        self.float().double()

    setattr(Rounds, hook, rounds)
    p.classes.append(Rounds)


@trainer_part()
def freezes(p: TrainerBuild) -> None:
    class Freezes(Module):
        def on_train_epoch_start(self) -> None:
            super().on_train_epoch_start()
            self.layers[0].requires_grad_(self.current_epoch < 1)

    p.classes.append(Freezes)


@trainer_part(can_be_cut=False)
def callback_trains(p: TrainerBuild) -> None:
    """A classifier of its own, which is the module's from the start of the fit."""

    class Online(pl.Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            torch.manual_seed(4)
            module.online = nn.Linear(CLASSES, CLASSES).double()
            self.optimizer = torch.optim.SGD(module.online.parameters(), 0.1)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            F.cross_entropy(module.online(module(batch[0]).detach()), batch[1]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    p.callbacks.append(Online())
    p.allowed.append("online")


# --- hooks and the loop -----------------------------------------------------------------------------------------------

DRAWS = ("on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start", "on_validation_epoch_end")


@trainer_part(each=(*DRAWS, "on_before_optimizer_step"))
def draws_in(p: TrainerBuild, hook: str) -> None:
    def draw(self: Any, trainer: Any, module: Any, *_: Any) -> None:
        with torch.no_grad():
            for parameter in module.layers.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter) + 0.01 * random.random())

    p.callbacks.append(type("Draws", (pl.Callback,), {hook: draw})())


@trainer_part()
def replaces_batches(p: TrainerBuild) -> None:
    class Replaces(Module):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            x, y = super().on_after_batch_transfer(batch, dataloader_idx)
            return x * 1.5, y

    p.classes.append(Replaces)


@trainer_part()
def ends_epochs_early(p: TrainerBuild) -> None:
    class Ends(Module):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            super().on_train_batch_start(batch, batch_idx)
            return -1 if batch_idx == 2 else None

    p.classes.append(Ends)


@trainer_part(without="checkpoints")
def stops_by_a_logged_value(p: TrainerBuild) -> None:
    class Stops(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            trainer.should_stop = bool(trainer.callback_metrics["loss_epoch"] < 1.09)

    p.callbacks.append(Stops())
    p.epochs = 4


@trainer_part(each=("train", "validation", "steps", "overfit"))
def limits(p: TrainerBuild, what: str) -> None:
    p.options |= {
        "train": {"limit_train_batches": p.rng.randint(1, 3)},
        "validation": {"limit_val_batches": 1, "num_sanity_val_steps": 0},
        "steps": {"max_steps": p.rng.randint(1, 5)},
        "overfit": {"overfit_batches": 2},
    }[what]


@trainer_part(kind="validates", without="limits iterable batches_smaller_than_the_world no_validation")
def validates_in_mid_epoch(p: TrainerBuild) -> None:
    p.train = DataLoader(p.data(p.rng.randint(24, 40)), p.rng.randint(4, 6), shuffle=True)
    p.options |= p.rng.choice(
        [
            {"val_check_interval": p.rng.randint(1, 3)},
            {"val_check_interval": 0.5},
            {"val_check_interval": 5, "check_val_every_n_epoch": None},
        ]
    )


@trainer_part(kind="validates", without="schedule")
def validates_every_other_epoch(p: TrainerBuild) -> None:
    p.options["check_val_every_n_epoch"] = 2
    p.epochs = 4


@trainer_part(without="logs metric logs_a_class_if_there_is_one reads_in")
def validation_is_none(p: TrainerBuild) -> None:
    class Silent(Module):
        validation_step = None  # type: ignore[assignment]

    p.classes.append(Silent)


@trainer_part()
def writes_now_and_then(p: TrainerBuild) -> None:
    p.options["log_every_n_steps"] = p.rng.randint(2, 4)


@trainer_part(kind="train", without="weighed weighed_classes", each=("min_size", "max_size_cycle", "max_size", "sequential"))
def combined(p: TrainerBuild, mode: str) -> None:
    class Both(Module):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            parts = [each for each in batch.values() if each is not None] if isinstance(batch, dict) else [batch]
            joined = [torch.cat(each) for each in zip(*parts, strict=True)]
            return super().training_step(joined, batch_idx)

    class Sequential(Module):
        def training_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
            return super().training_step(batch, batch_idx)

    first, second = DataLoader(p.data(25), 6, shuffle=True), DataLoader(p.data(13, 5), 6, shuffle=True)
    if mode == "sequential":
        p.classes.append(Sequential)
        p.train = CombinedLoader([first, second], mode)
    else:
        p.classes.append(Both)
        p.train = CombinedLoader({"a": first, "b": second}, mode)


@trainer_part(kind="validation")
def several_validations(p: TrainerBuild) -> None:
    p.validation = [DataLoader(p.data(11, 9), 4), DataLoader(p.data(5, 8), 2)]


# --- what else is called ----------------------------------------------------------------------------------------------


@trainer_part(without="no_validation validation_is_none")
def evaluated_before(p: TrainerBuild) -> None:
    p.before.append(lambda: p.trainer.validate(p.module, p.validation, verbose=False))


@trainer_part(without="weighed")
def tested_and_predicted(p: TrainerBuild) -> None:
    loaders = [DataLoader(p.data(11, 4), p.rng.randint(1, 4)), DataLoader(p.data(7, 3), p.rng.randint(2, 9))]
    p.after.append(lambda: p.trainer.test(p.module, loaders, verbose=False))
    p.after.append(lambda: p.trainer.predict(p.module, DataLoader(p.data(9, 4), p.rng.randint(1, 4))))


@trainer_part()
def behind_a_run_that_has_failed(p: TrainerBuild) -> None:
    def fail() -> None:
        with contextlib.suppress(ArithmeticError, PeerError):
            trainers.fit(Within(p.strategy.way), trainers.Fails())

    p.before.insert(0, fail)


@trainer_part(without="limits")
def fitted_longer(p: TrainerBuild) -> None:
    def again() -> Any:
        p.trainer.fit_loop.max_epochs += 1
        return p.fit()

    p.after.append(again)


@trainer_part(without="averages")
def fitted_by_another_trainer(p: TrainerBuild) -> None:
    def again() -> Any:
        p.trainer = p.new_trainer()
        return p.fit()

    p.after.append(again)


@trainer_part(can_be_cut=False, without="averages by_hand")
def fails_first(p: TrainerBuild) -> None:
    class Fails(Module):
        attempts = 0

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 1 and not type(self).attempts:
                type(self).attempts = 1
                raise ArithmeticError("on all processes")
            return super().training_step(batch, batch_idx)

    def attempt() -> None:
        try:
            p.fit()
        except Exception as error:
            if "on all processes" not in str(error):
                raise
        p.trainer = p.new_trainer()

    p.classes.append(Fails)
    p.before.append(attempt)
