"""What a Trainer can be given, one script for each, as in ``lightning_scenarios``: with the numbers that a user sees.

``FEATURES`` has those that are not among the scenarios there. Times and what only rank 0 says are left out, or taken
from rank 0.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    DeviceStatsMonitor,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    ProgressBar,
    RichModelSummary,
    RichProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import DoublePrecision, TorchCheckpointIO
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning_scenarios import (
    ACCELERATOR,
    CLASSES,
    Net,
    Normalized,
    Record,
    Scenario,
    data,
    fit,
    loader,
    outcome,
    trainer,
)
from lightning_scenarios import (
    FEATURES as COLUMNS,
)
from torch import nn
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader, TensorDataset

FEATURES: dict[str, Scenario] = {}
NEEDS = {"rich_progress_bar": "rich", "rich_model_summary": "rich", "device_stats_monitor": "psutil"}


def feature(function: Scenario) -> Scenario:
    FEATURES[function.__name__] = function
    return function


def missing(name: str) -> str | None:
    """The package that a feature needs and that is not installed."""
    needed = NEEDS.get(name)
    return needed if needed is not None and importlib.util.find_spec(needed) is None else None


def of_rank_zero(made: pl.Trainer, value: Any) -> Any:
    """What rank 0 alone has, on all ranks."""
    return made.strategy.broadcast(value)


@contextlib.contextmanager
def folder(made: pl.Trainer | None = None) -> Iterator[str]:
    """A folder of this rank's; the others may read in that of rank 0 until all leave."""
    with tempfile.TemporaryDirectory() as name:
        yield name
        if torch.distributed.is_initialized():
            torch.distributed.barrier()


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def floats(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in sorted(metrics.items())}


# --- callbacks that report --------------------------------------------------------------------------------------------


@feature
def learning_rate_monitor(strategy: str) -> Any:
    per_step = Net(
        scheduler=lambda optimizer: {
            "scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6),
            "interval": "step",
        }
    )
    monitors = [LearningRateMonitor(log_momentum=True, log_weight_decay=True), LearningRateMonitor("epoch")]
    results = [
        fit(strategy, per_step, callbacks=[monitors[0]]),
        fit(strategy, Net(scheduler=halving), callbacks=[monitors[1]], accumulate_grad_batches=2),
    ]
    return results, [monitor.lrs for monitor in monitors]


class Bars(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def on_train_epoch_end(self) -> None:
        self.log("epoch_number", float(self.current_epoch), prog_bar=True)


def shown(kind: type[ProgressBar]) -> type[ProgressBar]:
    """A progress bar that keeps what it shows."""

    class Shown(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.shown: list[dict[str, float]] = []
            self.totals: set[float] = set()

        def get_metrics(self, made: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
            metrics = super().get_metrics(made, module)
            self.shown.append(floats(metrics))
            self.totals |= {float(self.total_train_batches), float(self.total_val_batches)}
            return metrics

    return Shown


def with_a_bar(strategy: str, kind: type[ProgressBar]) -> Any:
    bar: Any = shown(kind)()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        made, module = trainer(strategy, callbacks=[bar], enable_progress_bar=True), Bars()
        made.fit(module, loader(shuffle=True), loader(13, 5, 9))
    return outcome(made, module), of_rank_zero(made, [bar.shown, sorted(bar.totals)])


@feature
def tqdm_progress_bar(strategy: str) -> Any:
    return with_a_bar(strategy, TQDMProgressBar)


@feature
def rich_progress_bar(strategy: str) -> Any:
    return with_a_bar(strategy, RichProgressBar)


@feature
def throughput_monitor(strategy: str) -> Any:
    """What it counts on the process of rank 0: batches, and a time for each."""
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[1]), window_size=3)
    made, module = trainer(strategy, callbacks=[monitor]), Net()
    made.fit(module, loader(32, 8), loader(16, 8, 9))
    made.test(module, loader(16, 8, 9), verbose=False)
    made.predict(module, loader(16, 8, 9))
    assert isinstance(made.logger, Record)
    counted = [
        {name: value for name, value in line.items() if name.endswith(("|batches", "|epoch", "step"))}
        for line in made.logger.lines
    ]
    return of_rank_zero(made, [line for line in counted if len(line) > 1]), of_rank_zero(made, floats(monitor._batches))


@feature
def device_stats_monitor(strategy: str) -> Any:
    made, module = trainer(strategy, callbacks=[DeviceStatsMonitor(cpu_stats=True)]), Net()
    made.fit(module, loader(), loader(13, 5, 9))
    made.test(module, loader(13, 5, 9), verbose=False)
    assert isinstance(made.logger, Record)
    results = outcome(made, module)
    names = [dict.fromkeys(line, 0.0) | {"step": line["step"]} for line in results.pop("logged")]
    return results, names


@feature
def simple_profiler(strategy: str) -> Any:
    """Each action is as often in the profile as on one process, save what a strategy does inside of itself."""
    profiler = SimpleProfiler()
    results = fit(strategy, callbacks=[LambdaCallback(on_train_batch_end=lambda *_: None)], profiler=profiler)
    counted = {name: len(times) for name, times in sorted(profiler.recorded_durations.items())}
    return results, {name: times for name, times in counted.items() if not name.startswith("[Strategy]")}


@feature
def advanced_profiler(strategy: str) -> Any:
    with folder() as name:
        profiler = AdvancedProfiler(name, "profile")
        results = fit(strategy, profiler=profiler)
        return results | {"files": len(list(Path(name).iterdir()))}


@feature
def pytorch_profiler(strategy: str) -> Any:
    with folder() as name:
        schedule = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1)
        profiler = PyTorchProfiler(name, "profile", export_to_chrome=False, schedule=schedule)
        results = fit(strategy, profiler=profiler, max_epochs=1)
        return results | {"files": len(list(Path(name).iterdir()))}


class Summary(ModelSummary):
    """Keeps what it says, by sizes that it computes in a forward of its own."""

    said: ClassVar[list[Any]] = []

    @staticmethod
    def summarize(summary_data: Any, *args: Any, **kwargs: Any) -> None:
        Summary.said += [list(column) for name, column in summary_data if name not in ("Type", "Mode")]


class Exemplary(Normalized):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = data(4).tensors[0]


@feature
def model_summary(strategy: str) -> Any:
    Summary.said = []
    options = {"callbacks": [Summary(max_depth=2)], "enable_model_summary": True, "sync_batchnorm": True}
    with folder() as name:
        graph = TensorBoardLogger(name, log_graph=True)
        results = fit(strategy, Exemplary(), logger=graph, **options)
        made = trainer(strategy)
        return results, of_rank_zero(made, Summary.said)


@feature
def rich_model_summary(strategy: str) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        return fit(strategy, callbacks=[RichModelSummary()], enable_model_summary=True)


@feature
def csv_and_tensorboard(strategy: str) -> Any:
    with folder() as name:
        loggers = [CSVLogger(name, "csv", flush_logs_every_n_steps=1), TensorBoardLogger(name, "board")]
        made, module = trainer(strategy, logger=loggers), Bars()
        made.fit(module, loader(), loader(13, 5, 9))
        made.test(module, loader(13, 5, 9), verbose=False)
        path = Path(name, "csv", "version_0", "metrics.csv")
        lines = path.read_text().splitlines() if made.is_global_zero else []
        rows = [[float(cell) if cell else None for cell in line.split(",")] for line in lines[1:]]
        return outcome(made, module), of_rank_zero(made, [len(lines), rows])


class Remembers(pl.Callback):
    """What the Trainer knows in each hook of its batches."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def note(self, made: pl.Trainer, *_: Any) -> None:
        self.seen.append({**floats(made.callback_metrics), "step": made.global_step, "epoch": made.current_epoch})


@feature
def lambda_callback(strategy: str) -> Any:
    notes = Remembers()
    hooks = {f"on_{name}": notes.note for name in ("train_batch_end", "train_epoch_end", "validation_end", "fit_end")}
    return fit(strategy, callbacks=[LambdaCallback(**hooks)]), notes.seen


# --- callbacks that decide --------------------------------------------------------------------------------------------


@feature
def timer(strategy: str) -> Any:
    return [
        fit(strategy, callbacks=[Timer("00:12:00:00")]),
        fit(strategy, callbacks=[Timer({"seconds": 0})]),
        fit(strategy, callbacks=[Timer({"seconds": 0})], min_steps=3),
        fit(strategy, callbacks=[Timer({"seconds": 0}, interval="epoch")], min_epochs=1, max_epochs=3),
        fit(strategy, max_time={"seconds": 0}, min_steps=2),
    ]


def with_an_outlier(samples: int, at: int) -> DataLoader[Any]:
    x, y = data(samples).tensors
    x = x.clone()
    x[at] *= 1e3
    return DataLoader(TensorDataset(x, y), 8)


class Noted(SpikeDetection):
    """Keeps the losses that it has compared."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.losses: list[float] = []

    def _is_spike(self, loss: torch.Tensor) -> bool:
        self.losses.append(float(loss))
        return super()._is_spike(loss)


class Spiky(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x.square().sum(1, keepdim=True) * torch.arange(CLASSES)


@feature
def spike_detection(strategy: str) -> Any:
    """A loss of the whole batch is compared, on each process with the same result."""
    found: list[Any] = []
    for at in (20, 29):
        with folder() as name:
            detection = Noted(window=3, warmup=1, rtol=3.0, exclude_batches_path=f"{name}/bad.json")
            made, module = trainer(strategy, callbacks=[detection]), Spiky(lr=1e-6)
            with contextlib.suppress(TrainingSpikeException):
                made.fit(module, with_an_outlier(32, at))
            path = Path(str(detection.exclude_batches_path))
            bad = json.loads(path.read_text()) if made.is_global_zero and path.exists() else []
            found += [of_rank_zero(made, bad), detection.bad_batches, detection.losses, outcome(made, module)]
    return found


class Pretrained(Net):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.backbone = nn.Sequential(nn.Linear(COLUMNS, COLUMNS), nn.BatchNorm1d(COLUMNS)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((each for each in self.parameters() if each.requires_grad), self.lr, momentum=0.9)


class OneLayerMore(BaseFinetuning):
    """Unfreezes a layer with each epoch."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze([module.backbone, module.layers[0]])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        layers = {1: module.layers[0], 2: module.backbone}
        if epoch in layers:
            self.unfreeze_and_add_param_group(layers[epoch], optimizer, lr=0.02)


@feature
def backbone_finetuning(strategy: str) -> Any:
    tuning = BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_ratio_lr=0.1)
    monitor = LearningRateMonitor()
    options: dict[str, Any] = {"max_epochs": 4, "sync_batchnorm": True}
    return [
        fit(strategy, Pretrained(), callbacks=[tuning, monitor], **options),
        monitor.lrs,
        fit(strategy, Pretrained(), callbacks=[OneLayerMore()], accumulate_grad_batches=2, **options),
    ]


@feature
def gradient_accumulation_scheduler(strategy: str) -> Any:
    return fit(strategy, callbacks=[GradientAccumulationScheduler({0: 3, 1: 1, 2: 2})], max_epochs=3)


@feature
def model_pruning(strategy: str) -> Any:
    structured: dict[str, Any] = {"pruning_dim": 0, "pruning_norm": 2, "use_global_unstructured": False}
    return [
        fit(strategy, callbacks=[ModelPruning("l1_unstructured", amount=0.3)]),
        fit(strategy, callbacks=[ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False)]),
        fit(strategy, callbacks=[ModelPruning("ln_structured", amount=0.3, parameter_names=["weight"], **structured)]),
        fit(strategy, callbacks=[ModelPruning("l1_unstructured", amount=2, prune_on_train_epoch_end=False)]),
    ]


@feature
def averaged_weights_with_batchnorm(strategy: str) -> Any:
    """Its last epoch computes the statistics of the averaged weights."""
    options: dict[str, Any] = {"max_epochs": 4, "sync_batchnorm": True}

    def averaging(**more: Any) -> Any:
        return StochasticWeightAveraging(0.05, swa_epoch_start=0.5, annealing_epochs=1, **more)

    linear = StochasticWeightAveraging([0.05], 1, 2, "linear", avg_fn=lambda average, new, count: (average + new) / 2)
    return [
        fit(strategy, Normalized(), callbacks=[averaging()], **options),
        fit(strategy, Normalized(), callbacks=[averaging()], accumulate_grad_batches=2, **options),
        fit(strategy, Normalized(), callbacks=[linear], **options),
    ]


class EveryOther(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return (step_idx is not None and step_idx % 2 == 1) or epoch_idx == 1


@feature
def weight_averaging(strategy: str) -> Any:
    """With a checkpoint, which has the averaged weights, and training that goes on from it."""
    with folder() as name:
        checkpoint = ModelCheckpoint(name, save_last=True)
        module = Normalized()
        callbacks = [EveryOther(avg_fn=get_ema_avg_fn(0.8)), checkpoint]
        made = trainer(strategy, callbacks=callbacks, enable_checkpointing=True, sync_batchnorm=True)
        made.fit(module, loader(), loader(13, 5, 9))
        path = made.strategy.broadcast(checkpoint.last_model_path)
        first, averaged = outcome(made, module), torch.load(path, weights_only=False)["state_dict"]
        callbacks = [EveryOther(avg_fn=get_ema_avg_fn(0.8))]
        made, module = trainer(strategy, callbacks=callbacks, sync_batchnorm=True, max_epochs=3), Normalized()
        made.fit(module, loader(), loader(13, 5, 9), ckpt_path=path, weights_only=False)
        return first, averaged, outcome(made, module)


# --- settings of the loop ---------------------------------------------------------------------------------------------


@feature
def barebones(strategy: str) -> Any:
    pl.seed_everything(7, verbose=False)
    made = pl.Trainer(barebones=True, max_epochs=2, strategy=strategy, accelerator=ACCELERATOR)
    module = Net()
    made.fit(module, loader(shuffle=True), loader(13, 5, 9))
    return outcome(made, module)


@feature
def detect_anomaly(strategy: str) -> Any:
    return fit(strategy, detect_anomaly=True)


class Grows(pl.LightningDataModule):
    """Its data depends on the epoch in which a loader is asked for."""

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return loader(17 + 4 * self.trainer.current_epoch, 4, self.trainer.current_epoch, shuffle=True)

    def val_dataloader(self) -> Any:
        assert self.trainer is not None
        return loader(7 + self.trainer.current_epoch, 3, 8)


@feature
def reload_dataloaders_every_n_epochs(strategy: str) -> Any:
    results = []
    for every in (1, 2):
        made, module = trainer(strategy, reload_dataloaders_every_n_epochs=every, max_epochs=4), Net()
        made.fit(module, datamodule=Grows())
        results.append(outcome(made, module))
    return results


@feature
def val_check_interval(strategy: str) -> Any:
    return [
        fit(strategy, val_check_interval=0.5),
        fit(strategy, val_check_interval=0.3, limit_train_batches=0.8),
        fit(strategy, val_check_interval=3, check_val_every_n_epoch=None, max_epochs=3),
        fit(strategy, check_val_every_n_epoch=2, max_epochs=5),
    ]


class MadeLate(Net):
    """Has its layers when the Trainer asks for them."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers
        self.layers: Any = None

    def configure_model(self) -> None:
        if self.layers is None:
            self.layers = nn.Sequential(nn.Linear(COLUMNS, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


@feature
def configure_model(strategy: str) -> Any:
    made, module = trainer(strategy), MadeLate()
    made.fit(module, loader(), loader(13, 5, 9))
    return outcome(made, module) | {"test": made.test(module, loader(13, 5, 9), verbose=False)}


class Sized(Net):
    def __init__(self, lr: float = 0.1, scale: float = 1.0) -> None:
        super().__init__(lr)
        self.scale = scale
        self.save_hyperparameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x * self.scale)


@feature
def load_from_checkpoint(strategy: str) -> Any:
    with folder() as name:
        checkpoint = ModelCheckpoint(name, monitor="val_loss", save_weights_only=True)
        made, module = trainer(strategy, callbacks=[checkpoint], enable_checkpointing=True), Sized(0.2, 0.5)
        made.fit(module, loader(), loader(13, 5, 9))
        loaded = Sized.load_from_checkpoint(checkpoint.best_model_path)
        best = made.test(ckpt_path="best", dataloaders=loader(13, 5, 9), verbose=False)
        other = trainer(strategy)
        validated = other.validate(loaded, loader(13, 5, 9), verbose=False)
        return [outcome(made, module), loaded.lr, loaded.scale, best, validated, outcome(other, loaded)]


@feature
def parts_of_the_data(strategy: str) -> Any:
    made, module = trainer(strategy, limit_test_batches=0.5, limit_predict_batches=2), Net()
    evaluated = [
        made.test(module, loader(29, 8), verbose=False),
        made.predict(module, loader(13, 5, 9)),
        made.predict(module, [loader(13, 5, 9), loader(4, 4, 9)]),
    ]
    return [
        fit(strategy, overfit_batches=0.5),
        fit(strategy, None, loader(29, 8, shuffle=True), overfit_batches=0.3),
        fit(strategy, limit_train_batches=0.5, limit_val_batches=1),
        fit(strategy, limit_val_batches=0),
        fit(strategy, limit_train_batches=0),
        evaluated,
    ]


@feature
def sanity_checks(strategy: str) -> Any:
    return [fit(strategy, num_sanity_val_steps=steps) for steps in (0, 1, -1)]


@feature
def fast_dev_run(strategy: str) -> Any:
    made, module = trainer(strategy, fast_dev_run=2), Net()
    made.fit(module, loader(), loader(13, 5, 9))
    fast = outcome(made, module)
    fast["test"] = made.test(module, loader(13, 5, 9), verbose=False)
    fast["predict"] = made.predict(module, loader(13, 5, 9))
    return fast, fit(strategy, fast_dev_run=True)


@feature
def limits_of_a_run(strategy: str) -> Any:
    return [
        fit(strategy, max_epochs=4, max_steps=6, min_steps=2),
        fit(strategy, max_steps=0),
        fit(strategy, max_epochs=-1, max_steps=9),
        fit(strategy, log_every_n_steps=3),
        fit(strategy, accumulate_grad_batches=4, max_steps=3),
    ]


class Forces(Net):
    """Derives what it predicts, also in evaluations: a potential and its forces."""

    def forces(self, batch: Any) -> torch.Tensor:
        with torch.enable_grad():
            x = batch[0].detach().requires_grad_()
            potential = self(x).logsumexp(1).sum()
            (force,) = torch.autograd.grad(potential, x, create_graph=True)
        return (force - x.detach()).square().mean(1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch) + self.forces(batch).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_force", self.forces(batch).mean())

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        return self.forces(batch).detach()


def F_energy(logits: torch.Tensor) -> torch.Tensor:
    return logits.logsumexp(1).sum()


@feature
def without_inference_mode(strategy: str) -> Any:
    made, module = trainer(strategy, inference_mode=False), Forces()
    made.fit(module, loader(), loader(13, 5, 9))
    return outcome(made, module), made.predict(module, loader(13, 5, 9))


@feature
def reproducible_settings(strategy: str) -> Any:
    before = torch.are_deterministic_algorithms_enabled()
    try:
        return fit(strategy, deterministic=True, benchmark=False, precision="64-true", enable_autolog_hparams=False)
    finally:
        torch.use_deterministic_algorithms(before)


class CountsSaves(TorchCheckpointIO):
    saved = 0

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.saved += 1
        super().save_checkpoint(*args, **kwargs)


@feature
def plugins(strategy: str) -> Any:
    with folder() as name:
        files = CountsSaves()
        made = trainer(strategy, plugins=[files, DoublePrecision()], default_root_dir=name, enable_checkpointing=True)
        module = Net()
        made.fit(module, loader(), loader(13, 5, 9))
        return outcome(made, module), of_rank_zero(made, files.saved)
