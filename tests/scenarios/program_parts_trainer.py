"""Parts of programs with a Trainer."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import program_parts
import program_parts_draws  # noqa: F401  (it adds its parts)
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
from program_parts import CONTAINERS, OTHER_AMOUNT, PLAIN, Build, Change, add, calls_in, part
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.retrieval import RetrievalMAP
from trainers import CLASSES, FEATURES, GAN, Net, WeightedClasses, Within, counted

from ddp_callbacks.errors import PeerError

trainer_part = functools.partial(part, "trainer")
BY_HAND = "accumulates clips schedule averages optimizer"
Module = Any


class Basis(Net):
    """What the parts extend."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().test_step(batch, batch_idx)


class TrainerBuild(Build):
    """
    Attributes:
        classes: Of the module, which extend :class:`Basis`.
        options: Of the Trainer.
    """

    def __init__(self, seed: int, strategy: Within) -> None:
        super().__init__(seed, trainers.data, strategy.has_resume and strategy.cut is None)
        self.strategy, self.classes = strategy, list[Any]()
        self.options: dict[str, Any] = {}
        self.optimizer: Any = None
        self.schedule: Any = None

    def run(self) -> Any:
        kind = type("Program", (*reversed(self.classes), Basis), {})
        self.module = kind(optimizer=self.optimizer, scheduler=self.schedule)
        self.trainer: Any = self.new_trainer()
        return [call() for call in (*self.before, self.fit, *self.after)]

    def new_trainer(self) -> pl.Trainer:
        options = {"max_epochs": self.epochs, "callbacks": copy.deepcopy(self.callbacks)} | self.options
        return trainers.trainer(self.strategy.given(**self.given), **options)

    def fit(self) -> Any:
        self.trainer.fit(self.module, self.train, self.validation)
        states = [optimizer.state_dict()["state"] for optimizer in self.trainer.optimizers]
        found = trainers.outcome(self.trainer, self.module)
        return found | {"optimizers": copy.deepcopy(states), "seen": [*self.module.seen]}

    def insert(self, layer: Callable[[], nn.Module], is_first: bool) -> None:
        self.extend(lambda module: module.layers.insert(0 if is_first else -1, layer().double()))
        self.classes.insert(0, self.classes.pop())  # before others copy the layers

    def change_batches(self, change: Change) -> None:
        hook = self.rng.choice(["on_before_batch_transfer", "on_after_batch_transfer"])
        self.extend(None, None, **{hook: lambda module, batch, index: [change(batch[0]), batch[1]]})

    def change_predictions(self, change: Change) -> None:
        self.extend(None, lambda module, loss, batch: loss + F.cross_entropy(change(module(batch[0])), batch[1]))

    def change_gradients(self, change: Callable[[Any], None]) -> None:
        self.extend(on_before_optimizer_step=lambda module, optimizer: change(module.parameters()))

    def extend(
        self,
        init: Callable[[Module], Any] | None = None,
        step: Callable[[Module, Any, Any], Any] | None = None,
        **hooks: Callable[..., Any],
    ) -> None:
        """Let the module also do this.

        Args:
            init: At the end of ``__init__``.
            step: Gets the loss and the batch of a training step; what it returns is the loss.
            hooks: By their names, or that of another method; they come behind what is there.
        """
        made: Any = type("Extended", (Basis,), {})

        def __init__(module: Module, **options: Any) -> None:
            super(made, module).__init__(**options)
            init(module)  # type: ignore[misc]

        def training_step(module: Module, batch: Any, batch_idx: int) -> Any:
            loss = super(made, module).training_step(batch, batch_idx)  # type: ignore[misc]
            found = step(module, torch.zeros(()) if loss is None else loss, batch)  # type: ignore[misc]
            return None if loss is None else found  # None: by hand

        if init:
            made.__init__ = __init__
        if step:
            made.training_step = training_step
        for name, function in hooks.items():
            setattr(made, name, _behind(made, name, function))
        self.classes.append(made)


def _behind(made: Any, name: str, function: Callable[..., Any]) -> Any:
    def hook(module: Module, *args: Any) -> Any:
        before = getattr(super(made, module), name)(*args)
        found = function(module, *args)
        return before if found is None else found

    return hook


# --- state that training steps leave behind ---------------------------------------------------------------------------


@trainer_part(each=[name for name in CONTAINERS if name != "list"])  # a list drops the entries of padding batches
def keeps_calls_in(p: TrainerBuild, container: str) -> None:
    def start(module: Module, calls: int = 0) -> None:
        module.kept = CONTAINERS[container]()
        for _ in range(calls):
            add(module.kept)

    def step(module: Module, loss: Any, batch: Any) -> Any:
        add(module.kept)
        return loss * (1 + 0.1 * calls_in(module.kept))

    saved = {
        "on_save_checkpoint": lambda module, checkpoint: checkpoint.update(calls=calls_in(module.kept)),
        "on_load_checkpoint": lambda module, checkpoint: start(module, checkpoint["calls"]),
    }
    p.extend(start, step, **({} if container in PLAIN else saved))  # Resume keeps plain ones by itself


class Annealed:
    """A loss that is no module."""

    calls = 0

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return loss * (1 + 0.2 * min(self.calls, 5))


class AnnealedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self: Any, loss: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return loss * (1 + 0.2 * self.calls.clamp(max=5))


@trainer_part(without="loss_module")
def loss_object(p: TrainerBuild) -> None:
    p.extend(lambda module: setattr(module, "anneal", Annealed()), lambda module, loss, batch: module.anneal(loss))


@trainer_part()
def loss_module(p: TrainerBuild) -> None:
    p.extend(
        lambda module: setattr(module, "anneal", AnnealedModule()), lambda module, loss, batch: module.anneal(loss)
    )


@trainer_part(each=("training_step", "on_train_batch_end", "on_before_zero_grad"), without="loss")
def teacher_moved_in(p: TrainerBuild, hook: str) -> None:
    @torch.no_grad()
    def move(module: Module, *_: Any) -> None:
        for old, new in zip(module.teacher.parameters(), module.layers.parameters(), strict=True):
            old.mul_(0.8).add_(new, alpha=0.2)

    def step(module: Module, loss: Any, batch: Any) -> Any:
        if hook == "training_step":
            move(module)
        return loss + F.mse_loss(module(batch[0]), module.teacher(batch[0]))

    def start(module: Module) -> None:
        module.teacher = copy.deepcopy(module.layers).requires_grad_(False)

    p.extend(start, step, **({} if hook == "training_step" else {hook: move}))


class AverageOf:
    """An average of a model that is no module, as a copy of it or as tensors."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        self.model = copy.deepcopy(model) if kind == "module" else None
        self.tensors = {name: each.detach().clone() for name, each in model.named_parameters()}

    @torch.no_grad()
    def move(self, model: nn.Module) -> None:
        for name, new in model.named_parameters():
            old = self.tensors[name] if self.model is None else self.model.get_parameter(name)
            old.mul_(0.8).add_(new, alpha=0.2)

    def __call__(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return functional_call(model, self.tensors, (x,)) if self.model is None else self.model(x)


@trainer_part(each=("module", "tensors"), without="loss teacher_moved_in batchnorm")
def average_in_an_object(p: TrainerBuild, kind: str) -> None:
    def step(module: Module, loss: Any, batch: Any) -> Any:
        module.average.move(module.layers)
        return loss + F.mse_loss(module(batch[0]), module.average(module.layers, batch[0]))

    p.extend(lambda module: setattr(module, "average", AverageOf(module.layers, kind)), step)


@trainer_part()
def buffer_with_the_shape_of_the_batch(p: TrainerBuild) -> None:
    """It grows, as caches of masks do."""

    def forward(module: Module, x: torch.Tensor) -> torch.Tensor:
        if len(module.mask) < len(x):
            module.mask = torch.full((len(x), 1), 0.9, dtype=torch.float64)
        return Net.forward(module, x * module.mask[: len(x)])

    p.extend(lambda module: module.register_buffer("mask", torch.ones(0, 1), persistent=False), forward=forward)


@trainer_part(without="validation_of_single_samples")
def batchnorm(p: TrainerBuild) -> None:
    p.extend(lambda module: module.layers.insert(0, nn.BatchNorm1d(FEATURES).double()))
    p.classes.insert(0, p.classes.pop())
    p.options["sync_batchnorm"] = True


# --- what is logged ---------------------------------------------------------------------------------------------------

REDUCED: dict[str, Any] = {"mean": torch.mean, "sum": torch.sum, "max": torch.max, "min": torch.min}


def in_steps(p: TrainerBuild, stage: str, note: Callable[[Module, Any], None]) -> None:
    """Call ``note`` in each training or validation step."""

    def step(module: Module, loss: Any, batch: Any) -> Any:
        note(module, batch)
        return loss

    def validate(module: Module, batch: Any, *_: Any) -> None:
        note(module, batch)

    p.extend(None, step) if stage == "training" else p.extend(validation_step=validate)


STAGES = ("training", "validation")


@trainer_part(each=REDUCED, without="loss")
def logs(p: TrainerBuild, reduction: str) -> None:
    options = {"reduce_fx": reduction, "on_epoch": True, "on_step": p.maybe(), "sync_dist": p.maybe(0.3)}

    def note(module: Module, batch: Any) -> None:
        each = F.cross_entropy(module(batch[0]), batch[1], reduction="none").detach()
        module.log(f"the_{reduction}", REDUCED[reduction](each), **options)

    in_steps(p, p.rng.choice(STAGES), note)


@trainer_part(without="loss ends_epochs_early limits", each=STAGES)
def logs_a_class_if_there_is_one(p: TrainerBuild, stage: str) -> None:
    """As long as each part has one, sizes of 1 look like ``batch_size=1``: in a step, or an epoch of few batches."""

    def note(module: Module, batch: Any) -> None:
        chosen = (batch[1] == 2) & (batch[0][:, 0] > 0.3)
        if chosen.any():
            loss = F.cross_entropy(module(batch[0][chosen]), batch[1][chosen]).detach()
            module.log("class", loss, batch_size=int(chosen.sum()), on_step=False, on_epoch=True)

    p.allowed += [OTHER_AMOUNT, "does not follow from the number of samples"]  # of layers that draw: for some rows
    in_steps(p, stage, note)


@trainer_part(without="ends_epochs_early limits", each=STAGES)  # as above
def logs_a_masked_mean(p: TrainerBuild, stage: str) -> None:
    def note(module: Module, batch: Any) -> None:
        mask = (batch[1] != 0).double()
        value, count = (batch[0][:, 1] * mask).sum(), int(mask.sum())
        module.log("masked", value / max(1, count), batch_size=count, on_step=False, on_epoch=True)

    in_steps(p, stage, note)


@trainer_part(without="loss lbfgs")  # as many closures as samples look like a value of each sample
def logs_with_a_constant_batch_size(p: TrainerBuild) -> None:
    size = p.rng.choice([1, 7, 64])
    in_steps(p, "training", lambda module, batch: module.log("c", batch[0].mean(), batch_size=size, on_epoch=True))


@trainer_part(without="by_hand")
def logs_in_hooks(p: TrainerBuild) -> None:
    def norm(module: Module, optimizer: Any) -> None:
        module.log("norm", torch.stack([q.grad.norm() for q in module.parameters() if q.grad is not None]).norm())

    def behind(module: Module, outputs: Any, *_: Any) -> None:
        module.log("behind", outputs["loss"].detach(), on_step=True, on_epoch=True)

    def end(module: Module) -> None:
        module.log("end", module.trainer.callback_metrics["loss_epoch"] * 2)

    p.extend(on_before_optimizer_step=norm, on_train_batch_end=behind, on_train_epoch_end=end)


@trainer_part()
def logs_at_the_start_of_validation_batches(p: TrainerBuild) -> None:
    def note(module: Module, batch: Any, *_: Any) -> None:
        module.log("samples", float(len(batch[1])), reduce_fx="sum", on_step=False, on_epoch=True)

    p.extend(on_validation_batch_start=note)


@trainer_part(each=("on_validation_end", "on_train_epoch_end", "on_validation_epoch_end"))
def reads_in(p: TrainerBuild, hook: str) -> None:
    def read(module: Module) -> None:
        values = module.trainer.callback_metrics
        module.seen += [float(values[key]) for key in sorted(values) if not module.trainer.sanity_checking]

    p.extend(None, None, **{hook: read})


class Own(torchmetrics.Metric):
    """Its state is reduced by ``reduction``."""

    def __init__(self, reduction: Any) -> None:
        super().__init__()
        is_list = reduction in ("cat", None)
        self.add_state("kept", [] if is_list else torch.zeros(1, dtype=torch.float64), dist_reduce_fx=reduction)
        self.join = torch.amax if reduction == "max" else torch.sum

    def update(self: Any, values: torch.Tensor) -> None:
        if isinstance(self.kept, list):
            self.kept.append(values)
        else:
            self.kept = self.join(torch.cat([self.kept, values]), 0, keepdim=True)

    def compute(self) -> torch.Tensor:
        return (self.kept if isinstance(self.kept, torch.Tensor) else torch.cat(list(self.kept))).square().sum()


def _summed(states: torch.Tensor) -> torch.Tensor:
    return states.sum(0)


BY_LOGITS: dict[str, Callable[..., Any]] = {
    "accuracy": torchmetrics.Accuracy,
    "f1": functools.partial(torchmetrics.F1Score, average="macro"),
    "auroc": torchmetrics.AUROC,
    "confusion": torchmetrics.ConfusionMatrix,
    "collection": lambda *args, **options: torchmetrics.MetricCollection(
        [kind(*args, **options) for kind in (torchmetrics.Recall, torchmetrics.Precision, torchmetrics.AUROC)]
    ),
    "minmax": lambda *args, **options: torchmetrics.MinMaxMetric(torchmetrics.Accuracy(*args, **options)),
}
BY_VALUES: dict[str, Callable[[], Any]] = {
    "mean": torchmetrics.MeanMetric,
    "sum": torchmetrics.SumMetric,
    "max": torchmetrics.MaxMetric,
    "min": torchmetrics.MinMetric,
    "own_list": lambda: Own(None),
    "own_cat": lambda: Own("cat"),
    "own_max": lambda: Own("max"),
    "own_function": lambda: Own(_summed),
    "retrieval": lambda: RetrievalMAP(empty_target_action="skip"),
    "running": lambda: torchmetrics.wrappers.Running(torchmetrics.MeanMetric(), 2),
}


def _arguments(name: str, logits: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
    if name == "retrieval":
        return logits[:, 1].sigmoid(), y == 1, y * 0
    return (logits.softmax(1), y) if name in BY_LOGITS else (logits[:, 0].mul(64).round() / 64,)  # exact in float32


def _make_metric(name: str) -> Any:
    return BY_LOGITS[name]("multiclass", num_classes=CLASSES) if name in BY_LOGITS else BY_VALUES[name]()


@trainer_part(each=(*BY_LOGITS, *BY_VALUES))
def metric(p: TrainerBuild, name: str) -> None:
    """Its value is logged at the end of the epoch."""
    p.allowed.append("in a way .dist_reduce_fx. that cannot be put together")  # on fewer processes, after a cut
    stage = p.rng.choice(STAGES)

    def note(module: Module, batch: Any) -> None:
        module.measure.update(*_arguments(name, module(batch[0]).detach(), batch[1]))

    def finish(module: Module) -> None:
        found = module.measure.compute()
        found = found if isinstance(found, dict) else {"measured": found}
        module.log_dict({key: value.double().square().sum() for key, value in found.items()})
        module.measure.reset()

    in_steps(p, stage, note)
    hook = {"training": "on_train_epoch_end", "validation": "on_validation_epoch_end"}[stage]
    p.extend(lambda module: setattr(module, "measure", _make_metric(name)), None, **{hook: finish})


@trainer_part(each=("mean", "accuracy", "f1", "auroc", "max"))
def metric_logged_as_object(p: TrainerBuild, name: str) -> None:
    on_step, stage = p.maybe(), p.rng.choice(STAGES)

    def note(module: Module, batch: Any) -> None:
        module.object(*_arguments(name, module(batch[0]).detach(), batch[1]))
        module.log("object", module.object, on_step=on_step, on_epoch=True)

    in_steps(p, stage, note)
    p.extend(lambda module: setattr(module, "object", _make_metric(name)))


@trainer_part(without="no_validation weighed batchnorm")  # which computes padding batches in tests, too
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


@trainer_part(without="validation validates")
def monitors(p: TrainerBuild) -> None:
    p.callbacks += [EarlyStopping("val_loss", patience=1, min_delta=0.01), LearningRateMonitor("step")]
    p.epochs = 4


@trainer_part(without="validation validates")
def checkpoints(p: TrainerBuild) -> None:
    def best() -> Any:
        saved: Any = p.trainer.checkpoint_callback
        return [float(saved.best_model_score), sorted(map(float, saved.best_k_models.values()))]

    with trainers.folder(p.strategy) as folder:
        p.callbacks.append(ModelCheckpoint(folder, "{epoch}-{val_loss:.3f}", "val_loss", save_top_k=2))
    p.options["enable_checkpointing"] = True
    p.after.append(best)


# --- losses -----------------------------------------------------------------------------------------------------------


@trainer_part(kind="loss", without="train validation")
def weighed(p: TrainerBuild) -> None:
    """A mean over the samples that are not of class 0."""

    def loss(module: Module, batch: Any) -> torch.Tensor:
        counts = (batch[1] != 0).double()
        return (F.cross_entropy(module(batch[0]), batch[1], reduction="none") * counts).sum() / counts.sum()

    p.extend(loss=loss)
    p.given["weight"] = counted
    p.train, p.validation = trainers.masked(29, 8, 0), trainers.masked(13, 5, 9)


@trainer_part(kind="loss", without="train validation")
def weighed_classes(p: TrainerBuild) -> None:
    p.extend(
        lambda module: setattr(module, "criterion", WeightedClasses().criterion),
        loss=lambda module, batch: module.criterion(module(batch[0]), batch[1]),
    )
    p.given["weight"] = "cross_entropy"
    p.train, p.validation = trainers.masked(29, 8, 0), trainers.masked(13, 5, 9)


@trainer_part()
def regularized(p: TrainerBuild) -> None:
    def step(module: Module, loss: Any, batch: Any) -> Any:
        return loss + 0.01 * torch.stack([q.square().sum() for q in module.layers.parameters()]).sum()

    p.extend(None, step)


# --- optimization -----------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adam": lambda net: torch.optim.Adam(net.parameters(), 0.02),
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), 0.02, amsgrad=True),
    "rmsprop": lambda net: torch.optim.RMSprop(net.parameters(), 0.01, momentum=0.5),
    "groups": lambda net: torch.optim.SGD([{"params": [q], "lr": 0.1 / (1 + q.ndim)} for q in net.parameters()], 0.1),
}


@trainer_part(each=OPTIMIZERS)
def optimizer(p: TrainerBuild, name: str) -> None:
    p.optimizer = OPTIMIZERS[name]


@trainer_part(kind="optimizer", without="clips")
def lbfgs(p: TrainerBuild) -> None:
    """By small steps: larger ones, or clipped gradients, let a difference of 1e-15 grow to 1e-8 or more."""
    p.optimizer = lambda net: torch.optim.LBFGS(net.parameters(), 0.05, max_iter=3, history_size=2)


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


@trainer_part(each=SCHEDULES, without="validation validates fitted_longer fitted_by_another_trainer limits")
def schedule(p: TrainerBuild, name: str) -> None:
    p.schedule = SCHEDULES[name]


@trainer_part(kind="optimizer", without=f"loss teacher_moved_in logs_in_hooks {BY_HAND}")
def by_hand(p: TrainerBuild) -> None:
    """Two optimizers; one accumulates."""

    def start(module: Module) -> None:
        module.automatic_optimization = False
        module.judge = nn.Linear(CLASSES, 1).double()

    p.extend(start)
    p.classes.insert(0, p.classes.pop())
    p.classes[0].training_step, p.classes[0].configure_optimizers = GAN.training_step, GAN.configure_optimizers


@trainer_part(each=("always", "by_epoch"))
def accumulates(p: TrainerBuild, how: str) -> None:
    if how == "always":
        p.options["accumulate_grad_batches"] = p.rng.randint(2, 4)
    else:
        p.callbacks.append(GradientAccumulationScheduler({0: 2, 1: 3}))


@trainer_part(each=("norm", "value"))
def clips(p: TrainerBuild, algorithm: str) -> None:
    p.options |= {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}


@trainer_part(each=("ema", "swa"))
def averages(p: TrainerBuild, how: str) -> None:
    ema = how == "ema"
    p.callbacks.append(EMAWeightAveraging(decay=0.7) if ema else StochasticWeightAveraging(0.05, swa_epoch_start=1))


@trainer_part(each=("replaced", "group", "assigned"), without="averages schedule by_hand loss", can_be_cut=False)
def new_parameters(p: TrainerBuild, how: str) -> None:
    """In the second epoch; the library may also refuse them by name."""

    def grow(module: Module) -> None:
        if module.current_epoch != 1:
            return
        if how == "group":
            module.adapter = nn.Linear(FEATURES, CLASSES).double()
            module.trainer.optimizers[0].add_param_group({"params": list(module.adapter.parameters())})
        elif how == "replaced":
            module.layers[-1] = nn.Linear(8, CLASSES).double()
        else:
            module.load_state_dict({name: q.clone() for name, q in module.state_dict().items()}, assign=True)
        if how != "group":
            module.trainer.strategy.setup_optimizers(module.trainer)

    def step(module: Module, loss: Any, batch: Any) -> Any:
        return loss + F.cross_entropy(module.adapter(batch[0]), batch[1]) if hasattr(module, "adapter") else loss

    p.extend(None, step, on_train_epoch_start=grow)
    p.allowed.append(r"layers|adapter|parameter")


@trainer_part(each=("on_train_epoch_start", "on_train_batch_start", "on_validation_end"))
def rounded_in(p: TrainerBuild, hook: str) -> None:
    def rounds(module: Module, *_: Any) -> None:
        gradients = [None if q.grad is None else q.grad.clone() for q in module.parameters()]
        module.float().double()
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter.grad = gradient  # while they accumulate, each process has a part: a sum of rounded ones differs

    p.extend(None, None, **{hook: rounds})


@trainer_part()
def freezes(p: TrainerBuild) -> None:
    def freeze(module: Module) -> None:
        module.layers[0].requires_grad_(module.current_epoch < 1)

    p.extend(on_train_epoch_start=freeze)


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


DRAWS = "on_train_start on_validation_start on_validation_epoch_start on_validation_epoch_end on_validation_end"


@trainer_part(each=("on_train_epoch_start", "on_train_epoch_end", *DRAWS.split()))
def draws_in(p: TrainerBuild, hook: str) -> None:
    @torch.no_grad()
    def draw(self: Any, trainer: Any, module: Any, *_: Any) -> None:
        for parameter in module.layers.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter) + 0.01 * random.random())

    p.callbacks.append(type("Draws", (pl.Callback,), {hook: draw})())


@trainer_part()
def replaces_batches(p: TrainerBuild) -> None:
    p.extend(on_after_batch_transfer=lambda module, batch, index: [batch[0] * 1.5, batch[1]])


@trainer_part()
def ends_epochs_early(p: TrainerBuild) -> None:
    p.extend(on_train_batch_start=lambda module, batch, batch_idx: -1 if batch_idx == 2 else None)


@trainer_part(without="checkpoints by_hand")
def stops_by_a_logged_value(p: TrainerBuild) -> None:
    def stop(module: Module) -> None:
        module.trainer.should_stop = bool(module.trainer.callback_metrics["loss_epoch"] < 1.09)

    p.extend(on_train_epoch_end=stop)
    p.epochs = 4


@trainer_part(each=("train", "validation", "steps", "overfit"))
def limits(p: TrainerBuild, what: str) -> None:
    p.options |= {
        "train": {"limit_train_batches": p.rng.randint(1, 3)},
        "validation": {"limit_val_batches": 1, "num_sanity_val_steps": 0},
        "steps": {"max_steps": p.rng.randint(1, 5)},
        "overfit": {"overfit_batches": 2},
    }[what]


@trainer_part(kind="validates", without="limits train loss no_validation")
def validates_in_mid_epoch(p: TrainerBuild) -> None:
    p.train = DataLoader(p.data(p.rng.randint(24, 40)), p.rng.randint(4, 6), shuffle=True)
    p.options |= p.rng.choice(
        [
            {"val_check_interval": p.rng.randint(1, 3)},
            {"val_check_interval": 0.5},
            {"val_check_interval": 5, "check_val_every_n_epoch": None},
        ]
    )


@trainer_part(kind="validates")
def validates_every_other_epoch(p: TrainerBuild) -> None:
    p.options["check_val_every_n_epoch"] = 2
    p.epochs = 4


@trainer_part(kind="validates", without="logs metric logs_a_class_if_there_is_one reads_in logs_a_masked_mean")
def validation_is_none(p: TrainerBuild) -> None:
    p.classes.append(type("Silent", (Basis,), {"validation_step": None}))


@trainer_part()
def writes_now_and_then(p: TrainerBuild) -> None:
    p.options["log_every_n_steps"] = p.rng.randint(2, 4)


@trainer_part(kind="train", without="loss", each=("min_size", "max_size_cycle", "max_size"))
def combined(p: TrainerBuild, mode: Any) -> None:
    def join(module: Module, batch: Any, index: int) -> Any:
        return (
            [torch.cat(each) for each in zip(*filter(None, batch.values()), strict=True)]
            if isinstance(batch, dict)
            else batch
        )

    size, drops = p.rng.randint(4, 6), p.maybe(0.8)
    loaders = [DataLoader(p.data(count, seed), size, True, drop_last=drops) for count, seed in ((25, 0), (13, 5))]
    p.allowed.append("divided in equal proportions")
    p.extend(on_before_batch_transfer=join)
    p.train = CombinedLoader(dict(zip("ab", loaders, strict=True)), mode)


@trainer_part(kind="validation")
def several_validations(p: TrainerBuild) -> None:
    p.validation = [DataLoader(p.data(11, 9), 4), DataLoader(p.data(5, 8), 2)]


# --- what else is called ----------------------------------------------------------------------------------------------


@trainer_part(without="validation validates")
def evaluated_before(p: TrainerBuild) -> None:
    p.before.append(lambda: p.trainer.validate(p.module, p.validation, verbose=False))


@trainer_part(without="weighed")
def tested_and_predicted(p: TrainerBuild) -> None:
    loaders = [DataLoader(p.data(11, 4), p.rng.randint(1, 4)), DataLoader(p.data(7, 3), p.rng.randint(2, 9))]
    batch_size = p.rng.randint(1, 4)
    p.after.append(lambda: p.trainer.test(p.module, loaders, verbose=False))
    p.after.append(lambda: p.trainer.predict(p.module, DataLoader(p.data(9, 4), batch_size)))


@trainer_part()
def behind_a_run_that_has_failed(p: TrainerBuild) -> None:
    def fail() -> None:
        with contextlib.suppress(ArithmeticError, PeerError):
            trainers.fit(Within(p.strategy.way), trainers.Fails())
        pl.seed_everything(7, verbose=False)

    p.before.insert(0, fail)


@trainer_part(without="limits", can_be_cut=False)
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


@trainer_part(without="averages by_hand", each=("and_is_seeded", "and_draws_on"))
def fails_first(p: TrainerBuild, how: str) -> None:
    attempts: list[pl.Trainer] = []

    def fail(module: Module, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and p.trainer in attempts:
            raise ArithmeticError("on all processes")

    def attempt() -> None:
        attempts.append(p.trainer)
        with contextlib.suppress(ArithmeticError):
            p.fit()
        with torch.random.fork_rng(enabled=how == "and_draws_on"):
            p.trainer = p.new_trainer()

    p.extend(on_train_batch_start=fail)
    p.before.append(attempt)


# --- scenarios --------------------------------------------------------------------------------------------------------


def of_parts(name: str, *programs: str, seed: int = 0) -> None:
    trainers.SCENARIOS[name] = program_parts.of_parts("trainer", functools.partial(TrainerBuild, seed), *programs)


of_parts(
    "parameters_changed_at_random_in_hooks",
    "draws_in=on_train_epoch_start draws_in=on_train_epoch_end draws_in=on_validation_epoch_end "
    "noise_in_gradients=numpy",
)
of_parts("hooks_that_end_an_epoch_and_freeze_a_layer", "ends_epochs_early freezes")
of_parts("metrics_that_keep_more_than_states", "metric=minmax", "metric=running", seed=3)  # which are in training
of_parts("a_stream_fitted_longer", "iterable_without_length fitted_longer")  # Lightning begins the stream again
of_parts("a_fit_behind_one_that_raised", "fails_first=and_draws_on")  # other orders than those of the first
