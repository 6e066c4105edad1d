"""Scripts with a Lightning Trainer: each is a user's, to whose Trainer a strategy may be given.

``scenario(strategy)`` builds everything from fixed seeds, runs it and returns what must not depend on the number of
processes, nor on cuts. ``strategy`` is a name, or a way (see ``ways.py``): :func:`trainer` adds what it needs. Logged
values come from a logger that, unlike Lightning's, keeps those of every rank.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import pickle
import tempfile
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torchmetrics
from kit.ranks import BY_PART
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
)
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler
from ways import Way

from ddp_callbacks import CrossEntropyWeight
from ddp_callbacks.errors import PeerError, Preempted
from ddp_callbacks.lightning import CallbackStrategy, DDPCallback, Resume

Scenario = Callable[[Any], Any]
SCENARIOS: dict[str, Scenario] = {}

FEATURES, CLASSES = 6, 3
ACCELERATOR = "cpu"  # tests/cuda sets another


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


class Record(Logger):
    """Keeps what is logged, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        return "record"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.lines.append({**metrics, "step": float(step or 0)})


class Net(pl.LightningModule):
    """Logs in every way that there is."""

    def __init__(self, lr: float = 0.1, optimizer: Any = None, scheduler: Any = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.lr, self.optimizer, self.scheduler = lr, optimizer, scheduler
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("loss_sync", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
        self.log("val_loss_sync", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), on_step=True, on_epoch=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        return self(batch[0]).softmax(1)

    def configure_optimizers(self) -> Any:
        optimizer = (
            self.optimizer(self) if self.optimizer else torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)
        )
        return optimizer if self.scheduler is None else [[optimizer], [self.scheduler(optimizer)]]


def data(samples: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, FEATURES, dtype=torch.float64, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (samples,), generator=generator))


def loader(samples: int = 29, batch_size: int = 8, seed: int = 0, **options: Any) -> DataLoader[Any]:
    return DataLoader(data(samples, seed), batch_size, **options)


@dataclasses.dataclass
class Within:
    """In place of the name of a strategy: a way, for each Trainer that a script makes.

    Attributes:
        way: ``None``: without the library.
        folder: Of a run that is resumed.
        cut: The moment of the script at which it is asked to stop.
        has_resume: Its Trainers have a ``Resume``.
        options: Of the strategy, by the script.
        counts: The Trainers, folders and moments of the script until now.
    """

    way: Way | None
    folder: str = ""
    cut: int | None = None
    has_resume: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    counts: Counter[str] = dataclasses.field(default_factory=Counter)

    def given(self, **options: Any) -> Within:
        return dataclasses.replace(self, options=options)

    @property
    def strategy(self) -> Any:
        if self.way is None or self.way.by_callback:
            return "auto"
        return CallbackStrategy(**self.chosen) if self.chosen else "ddp_callbacks"

    @property
    def chosen(self) -> dict[str, Any]:
        return {} if self.way is None else dict(self.way.options) | self.options

    def name(self, kind: str) -> str:
        """Of the next of its kind, the same when the script goes on."""
        self.counts[kind] += 1
        return f"{self.folder}/{kind}-{self.counts[kind]}"

    def callbacks(self) -> list[pl.Callback]:
        ours = [DDPCallback(**self.chosen)] if self.way is not None and self.way.by_callback else []
        if self.way is None or not self.has_resume:
            return [*ours, Moments(self)]
        resume = Resume(self.name("trainer"), **dict(self.way.resume))
        return [*ours, resume, Moments(self, resume)]


class Moments(pl.Callback):
    """Counts the moments of a script, and asks all processes to stop at one of them.

    What a :class:`Record` has got before a cut is there behind it, as with a logger that writes files.
    """

    def __init__(self, within: Within, resume: Any = None) -> None:
        self.within, self.resume, self.lines = within, resume, 0
        if resume is not None:
            self.ask, resume.preemption.is_requested = resume.preemption.is_requested, self.is_requested

    def is_requested(self) -> bool:
        self.within.counts["moments"] += 1
        if self.within.counts["moments"] != self.within.cut:
            return bool(self.ask())
        self.resume.preemption.request("the scenario")
        while not self.ask():  # until all ranks have heard of it
            pass
        return True

    def count(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self.within.counts["moments"] += self.resume is None and not trainer.sanity_checking

    on_train_batch_end = on_validation_batch_end = on_train_epoch_end = count

    def on_fit_end(self, *_: Any) -> None:  # behind the last epoch it is over
        self.within.counts["moments"] -= self.resume is None

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        goes_on = self.resume is not None and stage == "fit" and Path(self.resume.path).exists()
        if goes_on and isinstance(trainer.logger, Record):
            trainer.logger.lines[:] = pickle.loads(self.lines_of(trainer.global_rank).read_bytes())
            self.lines = len(trainer.logger.lines)

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        """Where a logger cuts its file if the run goes on from here."""
        self.lines = len(getattr(trainer.logger, "lines", ()))

    def teardown(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self.keep_lines(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        if isinstance(exception, Preempted):
            self.keep_lines(trainer, self.lines)

    def keep_lines(self, trainer: pl.Trainer, count: int | None = None) -> None:
        if self.resume is not None and isinstance(trainer.logger, Record):
            self.lines_of(trainer.global_rank, is_new=True).write_bytes(pickle.dumps(trainer.logger.lines[:count]))

    def lines_of(self, rank: int, is_new: bool = False) -> Path:
        """Of this rank; if there were fewer, of rank 0."""
        path = Path(f"{self.resume.path}.lines-{rank}")
        return path if is_new or path.exists() else Path(f"{self.resume.path}.lines-0")


def trainer(strategy: Any, **options: Any) -> pl.Trainer:
    pl.seed_everything(7, verbose=False)
    if isinstance(strategy, Within):
        options["callbacks"] = [*strategy.callbacks(), *options.get("callbacks", [])]
        strategy = strategy.strategy
    defaults: dict[str, Any] = {
        "max_epochs": 2,
        "accelerator": ACCELERATOR,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "logger": Record(),
    }
    return pl.Trainer(strategy=strategy, **(defaults | options))


def fit(strategy: Any, module: pl.LightningModule | None = None, *loaders: Any, **options: Any) -> dict[str, Any]:
    """What a fit leaves behind."""
    made = trainer(strategy, **options)
    module = Net() if module is None else module
    made.fit(module, *(loaders or (loader(shuffle=True), loader(13, 5, 9))))
    return outcome(made, module)


def outcome(made: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
    assert made.model is None or made.model is module
    return {
        "parameters": {name: value.detach().clone() for name, value in module.state_dict().items()},
        "callback_metrics": dict(sorted(made.callback_metrics.items())),
        "logged": made.logger.lines if isinstance(made.logger, Record) else [],
        "global_step": made.global_step,
        "epochs": made.current_epoch,
    }


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what Lightning says about the settings of these small runs; what ddp_callbacks says is an error."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for category in (UserWarning, DeprecationWarning, FutureWarning):
                warnings.filterwarnings("ignore", category=category)
            warnings.filterwarnings("error", category=UserWarning, module="ddp_callbacks")
            warnings.filterwarnings(
                "ignore", f"{BY_PART}|.* from a global generator, and the steps or other loaders do"
            )
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def folder(strategy: Any) -> Iterator[str]:
    """For the files of a script: each rank has its own, but one that goes on finds those that it had.

    The other ranks may read in that of rank 0 until all leave.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(strategy, Within) and strategy.has_resume:
            yield strategy.name("folder")
        else:
            yield stack.enter_context(tempfile.TemporaryDirectory())
        if dist.is_initialized():
            dist.barrier()


# --- the ways ---------------------------------------------------------------------------------------------------------


def run_script(script: Scenario, way: Way | None, folder: str, cut: int | None, has_resume: bool) -> tuple[Any, int]:
    """Its result, and the number of its moments."""
    within = Within(way, folder, cut, has_resume)
    with quiet():
        return script(within), within.counts["moments"]


def run(name: str, way: Way | None, folder: str = "", cut: int | None = None) -> tuple[Any, int]:
    """See ``ways.Table``."""
    return run_script(SCENARIOS[name], way, folder, cut, way is not None and way.resumed_on != 0)


def joined(first: Any, second: Any) -> Any:
    """The second has it all: what was logged before the cut, too."""
    return second


class Fails(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1:
            raise ArithmeticError("on all processes")
        return super().training_step(batch, batch_idx)


def fail() -> None:
    """As a script that catches it; see ``ways.Table``."""
    with quiet(), contextlib.suppress(ArithmeticError, PeerError):
        fit("ddp_callbacks", Fails())


# --- the loop's settings ----------------------------------------------------------------------------------------------


def settings(name: str, *each: dict[str, Any]) -> None:
    """A scenario of fits that differ in these settings of the Trainer."""
    SCENARIOS[name] = lambda strategy: [fit(strategy, **copy.deepcopy(options)) for options in each]


settings("plain", {})
settings("accumulate_ragged", {"accumulate_grad_batches": 3})
settings("clip_by_norm", {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2})
settings("clip_by_value", {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"})


def one_cycle(optimizer: Any, **options: Any) -> Any:
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20, **options)
    return {"scheduler": schedule, "interval": "step"}


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def on_plateau(optimizer: Any) -> Any:
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)
    return {"scheduler": schedule, "monitor": "val_loss"}


def sgd(net: Any) -> Any:
    return torch.optim.SGD(net.parameters(), 0.2)


def lbfgs(net: Any) -> Any:
    return torch.optim.LBFGS(net.parameters(), 0.5, max_iter=4)


@scenario
def without_momentum(strategy: Any) -> Any:
    per_step = Net(optimizer=sgd, scheduler=lambda optimizer: one_cycle(optimizer, cycle_momentum=False))
    stop = EarlyStopping("val_loss", patience=1, min_delta=0.01)
    return [
        fit(strategy, per_step, loader(29, 8, shuffle=True), loader(13, 5, 9), val_check_interval=2, callbacks=[stop]),
        fit(strategy, Net(optimizer=sgd), DataLoader(Stream(19), 4), DataLoader(Stream(7), 3)),
    ]


@scenario
def schedulers(strategy: Any) -> Any:
    return {
        "per step": fit(strategy, Net(scheduler=one_cycle)),
        "per epoch": fit(strategy, Net(scheduler=halving)),
    }


@scenario
def early_stopping_and_a_plateau(strategy: Any) -> Any:
    stop = EarlyStopping("val_loss", patience=1, min_delta=0.01)
    return fit(strategy, Net(lr=0.5, scheduler=on_plateau), callbacks=[stop], max_epochs=12) | {"best": stop.best_score}


@scenario
def checkpoints(strategy: Any) -> Any:
    with folder(strategy) as name:
        best = ModelCheckpoint(name, "b-{epoch}-{val_loss:.3f}", "val_loss", save_top_k=2, save_last=True)
        steps = ModelCheckpoint(name, "s-{step}-{loss_step:.3f}", "loss_step", save_top_k=2, every_n_train_steps=3)
        results = fit(strategy, Net(lr=0.4), callbacks=[best, steps], enable_checkpointing=True, max_epochs=3)
        kept = [sorted(saving.best_k_models.items()) for saving in (best, steps)]
        return results | {"kept": [{Path(path).name: score for path, score in each} for each in kept]}


# --- data -------------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    """Without a length, so that Lightning fetches a batch ahead."""

    def __init__(self, samples: int) -> None:
        self.rows: Any = data(samples, 4)

    def __iter__(self) -> Iterator[Any]:
        yield from self.rows


class Shuffled(Stream):
    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(len(self.rows)).tolist():
            yield self.rows[index]


@scenario
def a_stream_that_its_workers_shuffle(strategy: Any) -> Any:
    made, module = trainer(strategy), Net()
    pl.seed_everything(7, workers=True, verbose=False)
    made.fit(module, DataLoader(Shuffled(18), 4, num_workers=1))
    return outcome(made, module)


class Named(Net):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        x, _, names = batch
        rows = self(x)
        lengths = [float(len(name)) for name in names]
        joined = {"rows": rows, "each": list(rows), "lengths": lengths, "array": rows.numpy()}
        return joined | {"mean": rows.mean(), "number": rows.mean().item(), "constant": 0.1, "batch": batch_idx}


@scenario
def predictions_of_all_kinds(strategy: Any) -> Any:
    rows: Any = [(x, y, "n" * (index % 5)) for index, (x, y) in enumerate(zip(*data(11, 3).tensors, strict=True))]
    return trainer(strategy).predict(Named(), [DataLoader(rows, 4), DataLoader(rows, 3)])


@scenario
def odd_loaders(strategy: Any) -> Any:
    weighted = WeightedRandomSampler([1.0, 3.0] * 11, 17, generator=torch.Generator().manual_seed(5))
    return {
        "smaller than the world": fit(strategy, None, loader(11, 3, shuffle=True), loader(5, 2, 9)),
        "streams": fit(strategy, None, DataLoader(Stream(19), 4), DataLoader(Stream(7), 3)),
        "weighted": fit(strategy, None, DataLoader(data(22), 5, sampler=weighted, drop_last=True)),
    }


class TwoSources(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        losses = {name: self.loss(part) for name, part in batch.items() if part is not None}
        self.log_dict({f"loss_{name}": loss for name, loss in losses.items()}, batch_size=4)
        return torch.stack(list(losses.values())).sum()


class TwoValidations(Net):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), on_step=True, on_epoch=True)


@scenario
def several_loaders(strategy: Any) -> Any:
    def combined(mode: Any) -> Any:
        a, b = loader(27, 6, shuffle=True, drop_last=True), loader(13, 6, 5, shuffle=True, drop_last=True)
        return fit(strategy, TwoSources(), CombinedLoader({"a": a, "b": b}, mode))

    streams = {"a": DataLoader(Stream(24), 12), "b": DataLoader(Stream(36), 12)}
    return {mode: combined(mode) for mode in ("min_size", "max_size_cycle", "max_size")} | {
        "streams": fit(strategy, TwoSources(), streams),
        "validations": fit(strategy, TwoValidations(), loader(), [loader(13, 5, 9), loader(7, 4, 8)]),
    }


class Digits(pl.LightningDataModule):
    def setup(self, stage: str) -> None:
        self.rows = data(27, 2)

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, batch_size=6, shuffle=True)

    def val_dataloader(self) -> Any:
        # By keyword: predict() of Lightning 2.6 makes the loader again, and takes a position for a second batch_size.
        return DataLoader(self.rows, batch_size=4)

    test_dataloader = predict_dataloader = val_dataloader


@scenario
def every_function_of_the_trainer(strategy: Any) -> Any:
    made: Any = trainer(strategy)
    module, source = Net(), Digits()
    made.fit(module, datamodule=source)
    results = outcome(made, module)
    results["validate"] = made.validate(module, datamodule=source, verbose=False)
    results["test"] = made.test(module, datamodule=source, verbose=False)
    results["predict"] = made.predict(module, datamodule=source)
    results["again"] = made.predict(module, [loader(5, 2, 3), loader(3, 2, 4)])
    results["lines"] = list(made.logger.lines)
    return results


# --- what is logged ---------------------------------------------------------------------------------------------------


class LogsAll(Net):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        self.f1 = torchmetrics.F1Score("multiclass", num_classes=CLASSES, average="macro")
        self.auroc = torchmetrics.AUROC("multiclass", num_classes=CLASSES)
        self.both = torchmetrics.MetricCollection(
            [
                torchmetrics.Recall("multiclass", num_classes=CLASSES),
                torchmetrics.Precision("multiclass", num_classes=3),
            ]
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        self.f1(logits, y)
        self.log("f1", self.f1, on_step=True, on_epoch=True)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy)
        per_sample = F.cross_entropy(logits, y, reduction="none")
        loss = per_sample.mean()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("given", loss, on_epoch=True, batch_size=len(y))
        self.log("sum", per_sample.sum(), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("highest", per_sample.max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("lowest", per_sample.min(), on_step=False, on_epoch=True, reduce_fx=torch.min, sync_dist=True)
        self.log("lr", 0.25, on_epoch=True)
        if batch_idx % 2:
            self.log("odd", loss, on_step=True, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("afterwards", outputs["loss"], on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("at_end", float(self.current_epoch))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.auroc.update(logits.softmax(1), y)
        self.log("auroc", self.auroc)
        self.both.update(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y), on_step=True, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.both.compute())
        self.both.reset()


@scenario
def logs(strategy: Any) -> Any:
    return fit(strategy, LogsAll(), loader(29, 8, shuffle=True), loader(13, 5, 9))


class LogsBehind(Net):
    """Hooks log behind the step; others decide by that in a later hook, or see it in a log written now and then."""

    def __init__(self, interval: str = "epoch") -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        self.interval, self.seen = interval, list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.accuracy(self(batch[0]), batch[1])
        return self.loss(batch)

    def on_after_backward(self) -> None:
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("behind", outputs["loss"], on_step=True)

    def on_train_epoch_end(self) -> None:
        self.seen.append(float(self.trainer.callback_metrics["behind"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.5, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval, "monitor": "behind"}]


@scenario
def logs_behind_the_step(strategy: Any) -> Any:
    def run(interval: str, patience: int) -> Any:
        module, stop = LogsBehind(interval), EarlyStopping("behind", patience=patience)
        options: dict[str, Any] = {"callbacks": [stop], "val_check_interval": 3, "log_every_n_steps": 2}
        results = fit(strategy, module, loader(29, 4, shuffle=True), loader(13, 5, 9), max_epochs=3, **options)
        return results, module.seen, stop.best_score, stop.wait_count

    return run("step", 5), run("epoch", 1)


class LogsLengths(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch[1]))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch[1]))


@scenario
def logs_of_small_batches(strategy: Any) -> Any:
    parts_of_one = fit(strategy, LogsLengths(), loader(5, 2), loader(3, 2, 9))
    return fit(strategy, LogsAll(), loader(11, 3, shuffle=True), loader(10, 3, 9)), parts_of_one


class LogsStepsOfEvaluations(LogsAll):
    """In some batches of some loaders only; one metric of a callback sees every sample once."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        logits = self(x)
        if dataloader_idx:
            self.accuracy(logits, y)
            self.log("val_accuracy", self.accuracy, on_step=True, on_epoch=True)
        if batch_idx % 2:
            self.log("val_odd", F.cross_entropy(logits, y), on_step=True, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        pass


class Counts(pl.Callback):
    def __init__(self) -> None:
        self.mean = torchmetrics.MeanMetric().set_dtype(torch.float64)

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.mean.update(batch[0][:, 0])


@scenario
def logs_of_steps_of_evaluations(strategy: Any) -> Any:
    counts = Counts()
    validations = [loader(10, 4, 9), loader(7, 3, 8)]
    results = fit(strategy, LogsStepsOfEvaluations(), loader(22, 4), validations, callbacks=[counts])
    return results | {"counted": counts.mean.compute()}


def by_class(samples: int, batch_size: int, seed: int) -> DataLoader[Any]:
    """Each batch is sorted, so that most parts of it lack a class."""
    x, y = data(samples, seed).tensors
    order = torch.cat(
        [at + part.argsort() for at, part in zip(range(0, samples, batch_size), y.split(batch_size), strict=True)]
    )
    return DataLoader(TensorDataset(x[order], y[order]), batch_size)


class LogsClasses(Net):
    """Logs what only some ranks meet: means over a class, their maximum and sum, a metric that sees the class alone."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracies = nn.ModuleList(
            torchmetrics.Accuracy("multiclass", num_classes=CLASSES) for _ in range(CLASSES)
        )

    def log_classes(self, name: str, batch: Any) -> torch.Tensor:
        logits = self(batch[0])
        losses = F.cross_entropy(logits, batch[1], reduction="none")
        for kind in batch[1].unique().tolist():
            of_kind = batch[1] == kind
            options: dict[str, Any] = {"on_epoch": True, "on_step": False, "prog_bar": True}
            self.log(f"{name}{kind}", losses[of_kind].mean(), batch_size=int(of_kind.sum()), **options)
            self.log(f"{name}{kind}_most", losses[of_kind].max(), on_step=True, on_epoch=True, reduce_fx=max)
            self.log(f"{name}{kind}_sum", losses[of_kind].sum(), on_epoch=True, reduce_fx="sum", sync_dist=True)
        return losses.mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.log_classes("class", batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.log_classes("val_class", batch))
        for kind in batch[1].unique().tolist():
            of_kind = batch[1] == kind
            self.accuracies[kind](self(batch[0][of_kind]), batch[1][of_kind])
            self.log(f"val_accuracy{kind}", self.accuracies[kind], on_step=True, on_epoch=True)


@scenario
def logs_of_some_ranks(strategy: Any) -> Any:
    with folder(strategy) as name:
        key = "val_class2/dataloader_idx_1"
        best = ModelCheckpoint(name, "{" + key + ":.6f}", key, save_top_k=-1, auto_insert_metric_name=False)
        validations = [by_class(26, 10, 9), by_class(16, 16, 8)]
        made = fit(
            strategy, LogsClasses(), by_class(29, 8, 0), validations, callbacks=[best], enable_checkpointing=True
        )
        made["logged"] = [dict(sorted(line.items())) for line in made["logged"]]  # rank 0 met other keys first
        return made, sorted(Path(path).name for path in best.best_k_models), best.best_model_score


class ReadsAtValidations(pl.Callback):
    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            trainer.logger.log_metrics({"read": float(trainer.callback_metrics["loss_step"])}, trainer.global_step)


@scenario
def reading_a_step_behind_a_validation_in_mid_epoch(strategy: Any) -> Any:
    options: dict[str, Any] = {
        "accumulate_grad_batches": 2,
        "val_check_interval": 3,
        "callbacks": [ReadsAtValidations()],
    }
    return fit(strategy, Net(), loader(43, 8), loader(13, 5, 9), **options)


class Normalized(Net):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        first, second = nn.BatchNorm1d(FEATURES, momentum=None, **options), nn.BatchNorm1d(8, **options)
        self.layers = nn.Sequential(first, *list(self.layers)[:2], second, self.layers[2]).double()


@scenario
def a_batch_too_short_for_batchnorm_on_all(strategy: Any) -> Any:
    class Parts(Net):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)).double()

    return [fit(strategy, Parts(), loader(samples, 8), loader(5, 4)) for samples in (2, 3)]


@scenario
def synchronized_batchnorm(strategy: Any) -> Any:
    """Ragged batches, some smaller than the world, in training and in evaluations."""
    options: dict[str, Any] = {"sync_batchnorm": True}
    ragged, small = (loader(29, 8, shuffle=True), loader(13, 5, 9)), (loader(11, 3, shuffle=True), loader(5, 2, 9))
    made, module = trainer(strategy, **options), Normalized(track_running_stats=False)
    made.fit(module, loader(11, 3))
    return {
        "averaged": fit(strategy, Normalized(), *ragged, callbacks=[EMAWeightAveraging(decay=0.7)], **options),
        "small": fit(strategy, Normalized(), *small, accumulate_grad_batches=2, gradient_clip_val=0.1, **options),
        "no statistics": outcome(made, module) | {"test": made.test(module, loader(11, 3, 4), verbose=False)},
    }


# --- optimization -----------------------------------------------------------------------------------------------------


class MaskedMean(Net):
    """The loss is the mean over the samples that are not of class 0, written by hand: over none it is 0 / 0."""

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        counts = (y != 0).double()
        self.log("samples", float(len(y)), reduce_fx="sum", on_step=False, on_epoch=True)
        return (F.cross_entropy(self(x), y, reduction="none") * counts).sum() / counts.sum()


class NormalizedMaskedMean(MaskedMean, Normalized):
    pass


class WeightedClasses(Net):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        weight = torch.arange(1.0, CLASSES + 1, dtype=torch.float64)
        self.criterion = nn.CrossEntropyLoss(weight, ignore_index=0)

    def loss(self, batch: Any) -> torch.Tensor:
        return self.criterion(self(batch[0]), batch[1])


def masked(samples: int, batch_size: int, seed: int, **options: Any) -> DataLoader[Any]:
    """Each batch has a sample that counts; many parts of one have none."""
    x, y = data(samples, seed).tensors
    counts = (torch.arange(samples) % batch_size == 0) | (torch.arange(samples) % 7 == 5)
    return DataLoader(TensorDataset(x, torch.where(counts, y.clamp(min=1), 0)), batch_size, **options)


def counted(batch: Any) -> torch.Tensor:
    return (batch[1] != 0).sum()


def given(strategy: Any, **options: Any) -> Any:
    """The strategy with options, which one process does not need."""
    if isinstance(strategy, Within):
        return strategy.given(**options)
    return strategy if strategy != "ddp_callbacks" else CallbackStrategy(**options)


def fit_and_test(strategy: Any, module: pl.LightningModule, **options: Any) -> Any:
    made = trainer(strategy, **options)
    made.fit(module, masked(29, 8, 0), masked(13, 5, 9))
    return outcome(made, module) | {"test": made.test(module, masked(11, 4, 3), verbose=False)}


@scenario
def means_over_what_counts(strategy: Any) -> Any:
    def weighed(module: Any, **options: Any) -> Any:
        return fit_and_test(given(strategy, weight=counted), module, **options)

    stop = EarlyStopping("val_loss", patience=1, min_delta=0.01)
    return {
        "accumulated": weighed(MaskedMean(), accumulate_grad_batches=3, gradient_clip_val=0.1),
        "stopped": weighed(MaskedMean(lr=0.5), callbacks=[stop], max_epochs=8),
        "several forwards": weighed(MaskedMean(optimizer=lbfgs), max_epochs=1),
        "synchronized": weighed(NormalizedMaskedMean(), accumulate_grad_batches=2, sync_batchnorm=True),
        "best": stop.best_score,
    }


@scenario
def a_cross_entropy_with_class_weights_and_ignored_targets(strategy: Any) -> Any:
    criterion = WeightedClasses().criterion
    function = CrossEntropyWeight(criterion, target=lambda batch: batch[1])
    return [
        fit_and_test(given(strategy, weight="cross_entropy"), WeightedClasses()),
        fit_and_test(given(strategy, weight=function), WeightedClasses(), accumulate_grad_batches=2),
    ]


class GAN(Net):
    """Two optimizers, by hand; the discriminator's gradients are accumulated over two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Linear(CLASSES, 1).double()

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        generator, judge = self.optimizers()
        self.toggle_optimizer(generator)
        loss = F.softplus(-self.judge(self(x))).mean()
        generator.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(generator, 0.1, "norm")
        generator.step()
        self.untoggle_optimizer(generator)
        self.toggle_optimizer(judge)
        real = F.one_hot(y, CLASSES).double()
        wrong = F.softplus(-self.judge(real)).mean() + F.softplus(self.judge(self(x).detach())).mean()
        self.manual_backward(wrong / 2)
        if batch_idx % 2:
            judge.step()
            judge.zero_grad()
        self.untoggle_optimizer(judge)
        self.log_dict({"generator": loss, "judge": wrong}, on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.layers.parameters(), 0.02), torch.optim.SGD(self.judge.parameters(), 0.1)


class NormalizedGAN(GAN, Normalized):
    pass


@scenario
def gan(strategy: Any) -> Any:
    return [
        fit(strategy, GAN(), loader(29, 8, shuffle=True)),
        fit(strategy, NormalizedGAN(), DataLoader(Shuffled(30), 8), sync_batchnorm=True),
    ]


class Skips(Net):
    """Some parameters are used in no batch, some in some, some on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3).double()
        self.sometimes = nn.Linear(FEATURES, CLASSES).double()
        self.for_some = nn.Parameter(torch.ones(CLASSES, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self(x) + (self.sometimes(x) if batch_idx % 2 else 0)
        per_sample = F.cross_entropy(logits, y, reduction="none")
        chosen = x[:, 0] > 1.2
        if chosen.any():
            per_sample = per_sample + torch.where(chosen, self.for_some.square().sum(), 0.0)
        return per_sample.mean()


@scenario
def skipped_parameters(strategy: Any) -> Any:
    return [fit(strategy, Skips(), loader(29, 8)), fit(strategy, Skips(), loader(29, 8), accumulate_grad_batches=2)]


@scenario
def several_forwards_in_a_step(strategy: Any) -> Any:
    return fit(strategy, Net(optimizer=lbfgs), loader(24, 12))


class Annealer:
    """A plain object that a module holds."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return min(1.0, self.calls / 6)


class MovesATeacher(Net):
    """A step moves the frozen parameters of a teacher, and changes all kinds of attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)
        self.anneal, self.steps = Annealer(), Counter[str]()
        self.sizes: defaultdict[str, list[int]] = defaultdict(list)
        self.order: OrderedDict[str, int] = OrderedDict()
        self.generator = torch.Generator().manual_seed(3)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.layers.parameters(), strict=True):
                if slow.dim() > 1:
                    slow.mul_(0.8).add_(fast, alpha=0.2)
                else:
                    slow.data = 0.8 * slow.data + 0.2 * fast.data
        self.steps["all"] += 1
        self.sizes["of batches"].append(1)
        self.order[f"{self.current_epoch}-{batch_idx}-{len(self.order)}"] = 1
        noise = torch.randn(FEATURES, dtype=torch.float64, generator=self.generator)
        return super().training_step(batch, batch_idx) + self.anneal() * F.mse_loss(
            self(batch[0]), self.teacher(batch[0] + noise)
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["kept"] = self.kept

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.anneal.calls, steps, sizes, order, state = checkpoint["kept"]
        self.steps, self.order = Counter(steps), OrderedDict.fromkeys(order, 1)
        self.sizes = defaultdict(list, {key: [*each] for key, each in sizes.items()})
        self.generator.set_state(state)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layers.parameters(), 0.3)

    @property
    def kept(self) -> Any:
        sizes = {key: [*each] for key, each in self.sizes.items()}
        return self.anneal.calls, dict(self.steps), sizes, [*self.order], self.generator.get_state()


@scenario
def a_teacher_and_counters_that_a_step_changes(strategy: Any) -> Any:
    module, found = MovesATeacher(), []
    for _ in range(2):
        found.append(fit(strategy, module) | {"kept": module.kept})
    return found


class Silent(Net):
    """torch 2.13 cannot trace Lightning 2.6's self.log."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)


@scenario
def compiled(strategy: Any) -> Any:
    made, module = trainer(strategy), Silent()
    made.fit(torch.compile(module, backend="aot_eager"), loader(24, 8), loader(8, 8, 9))  # type: ignore[arg-type]
    return outcome(made, module)


class Online(pl.Callback):
    """Trains its own classifier on what the module computes."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        self.evaluator = nn.Linear(CLASSES, CLASSES).double()
        self.optimizer = torch.optim.SGD(self.evaluator.parameters(), 0.1)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        nn.functional.cross_entropy(self.evaluator(pl_module(batch[0]).detach()), batch[1]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return self.evaluator.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.evaluator.load_state_dict(state_dict)


@scenario
def a_classifier_that_a_callback_trains(strategy: Any) -> Any:
    """Its loss is a mean over the samples, whatever the module's is."""

    def found(strategy: Any, module: Any, make: Any) -> Any:
        online = Online()
        found = fit(strategy, module, make(29, 8, 0), make(13, 5, 9), callbacks=[online])
        return found | {"evaluator": online.evaluator.weight.detach().clone()}

    return [found(strategy, Net(), loader), found(given(strategy, weight=counted), MaskedMean(), masked)]


class Centres(Net):
    """A parameter that only its optimizer has, as some losses keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = [nn.Parameter(torch.linspace(-1, 1, CLASSES, dtype=torch.float64))]

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self(batch[0]) + self.centres[0], batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.centres], 0.1, momentum=0.9)


class OnlineWithoutState(pl.Callback):
    def __init__(self) -> None:
        torch.manual_seed(4)
        self.evaluator = nn.Linear(CLASSES, CLASSES).double()
        self.optimizer = torch.optim.Adam(self.evaluator.parameters(), 0.1)

    on_train_batch_end = Online.on_train_batch_end


@scenario
def parameters_that_no_module_has(strategy: Any) -> Any:
    module, online = Centres(), OnlineWithoutState()
    found = fit(strategy, module, callbacks=[online])
    return found | {"kept": [*module.centres, *online.evaluator.parameters()]}


class DrawsAtStarts(pl.Callback):
    @torch.no_grad()
    def draw(self, trainer: pl.Trainer, pl_module: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))

    on_train_start = on_train_epoch_start = on_validation_start = on_validation_epoch_start = draw


@scenario
def hooks_at_the_start_draw(strategy: Any) -> Any:
    train, validation = loader(shuffle=True), DataLoader(Stream(13), 5)
    made, module = trainer(strategy, callbacks=[DrawsAtStarts()]), Net()
    made.fit(module, train, validation)
    return outcome(made, module), made.validate(module, loader(13, 5, 9, shuffle=True), verbose=False)


class Drawing(Net):
    """Draws in its layers and in all its steps; backward computes one layer again."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.recurrent = nn.GRU(3, 8, 2, dropout=0.3, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, bias=False, batch_first=True)
        self.dropout = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4))
        self.out = nn.Linear(8, CLASSES)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.recurrent(x.view(len(x), -1, 3))[0]
        h = h + self.attention(h, h, h)[0] * (torch.rand(len(h), 1, 1, dtype=h.dtype) > 0.2)
        return self.out(checkpoint(self.dropout, h.mean(1) + 0.1 * torch.randn_like(h[:, 0]), use_reentrant=False))


@scenario
def layers_that_draw(strategy: Any) -> Any:
    loaders = loader(44, 12, shuffle=True), loader(17, 12, 9, shuffle=True)
    return fit(strategy, Drawing(), *loaders, val_check_interval=2, accumulate_grad_batches=2)


class NoisySGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in filter(lambda each: each.grad is not None, group["params"]):
                gradient = parameter.grad.add(parameter, alpha=0.01)
                parameter.grad = gradient + 0.01 * torch.randn_like(gradient)
        super().step()
        return loss


class DrawsByHand(Drawing):
    """Two losses a step, as of a generator and its critic. The optimizer draws, too."""

    def __init__(self) -> None:
        super().__init__(optimizer=lambda net: NoisySGD(net.parameters(), 0.1))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()

        def compute() -> None:
            optimizer.zero_grad()
            self.manual_backward(super(DrawsByHand, self).training_step(batch, batch_idx))

        compute()
        optimizer.step()
        optimizer.step(closure=compute)


@scenario
def steps_by_hand_that_draw(strategy: Any) -> Any:
    return fit(strategy, DrawsByHand(), loader(44, 12, shuffle=True), loader(17, 12, 9))
