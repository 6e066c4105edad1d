"""What a Trainer can be given, one script for each, with the numbers that a user sees; and the table of all scripts.

Times and what only rank 0 says are left out, or taken from rank 0.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    DeviceStatsMonitor,
    EMAWeightAveraging,
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
from torch import nn
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader, TensorDataset
from trainers import (
    ACCELERATOR,
    CLASSES,
    FEATURES,
    SCENARIOS,
    Net,
    Normalized,
    Record,
    Within,
    data,
    fit,
    folder,
    joined,
    loader,
    outcome,
    run,
    scenario,
    settings,
    trainer,
)
from ways import Way

__all__ = ["APART", "SCENARIOS", "joined", "names", "refusal", "run"]  # see ways.Table


def of_rank_zero(made: pl.Trainer, value: Any) -> Any:
    """What rank 0 alone has, on all ranks."""
    return made.strategy.broadcast(value)


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def floats(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in sorted(metrics.items())}


# --- callbacks that report --------------------------------------------------------------------------------------------


@scenario
def learning_rate_monitor(strategy: Any) -> Any:
    per_step = Net(
        scheduler=lambda optimizer: {
            "scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6),
            "interval": "step",
        }
    )
    monitors = [LearningRateMonitor(log_momentum=True, log_weight_decay=True), LearningRateMonitor("epoch")]
    return [
        fit(strategy, per_step, callbacks=[monitors[0]]),
        fit(strategy, Net(scheduler=halving), callbacks=[monitors[1]], accumulate_grad_batches=2),
    ]


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


def with_a_bar(strategy: Any, kind: type[ProgressBar]) -> Any:
    bar: Any = shown(kind)()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        made, module = trainer(strategy, callbacks=[bar], enable_progress_bar=True), Bars()
        made.fit(module, loader(shuffle=True), loader(13, 5, 9))
    return outcome(made, module), of_rank_zero(made, [bar.shown, sorted(bar.totals)])


@scenario
def tqdm_progress_bar(strategy: Any) -> Any:
    return with_a_bar(strategy, TQDMProgressBar)


@scenario
def rich_progress_bar(strategy: Any) -> Any:
    return with_a_bar(strategy, RichProgressBar)


@scenario
def throughput_monitor(strategy: Any) -> Any:
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


@scenario
def device_stats_monitor(strategy: Any) -> Any:
    made, module = trainer(strategy, callbacks=[DeviceStatsMonitor(cpu_stats=True)]), Net()
    made.fit(module, loader(), loader(13, 5, 9))
    made.test(module, loader(13, 5, 9), verbose=False)
    assert isinstance(made.logger, Record)
    results = outcome(made, module)
    names = [dict.fromkeys(line, 0.0) | {"step": line["step"]} for line in results.pop("logged")]
    return results, names


@scenario
def simple_profiler(strategy: Any) -> Any:
    """Each action is as often in the profile as on one process, save what a strategy does inside of itself."""
    profiler = SimpleProfiler()
    results = fit(strategy, callbacks=[LambdaCallback(on_train_batch_end=lambda *_: None)], profiler=profiler)
    counted = {name: len(times) for name, times in sorted(profiler.recorded_durations.items())}
    return results, {name: times for name, times in counted.items() if not name.startswith("[Strategy]")}


@scenario
def profilers_with_files(strategy: Any) -> Any:
    with folder(strategy) as name:
        schedule = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1)
        profilers = [
            AdvancedProfiler(name, "advanced"),
            PyTorchProfiler(name, "profile", export_to_chrome=False, schedule=schedule),
        ]
        results = [fit(strategy, profiler=profiler, max_epochs=1) for profiler in profilers]
        return results, len(list(Path(name).iterdir()))


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


@scenario
def model_summary(strategy: Any) -> Any:
    Summary.said = []
    options = {"callbacks": [Summary(max_depth=2)], "enable_model_summary": True, "sync_batchnorm": True}
    with folder(strategy) as name:
        graph = TensorBoardLogger(name, log_graph=True)
        results = fit(strategy, Exemplary(), logger=graph, **options)
        made = trainer(strategy)
        return results, of_rank_zero(made, Summary.said)


@scenario
def rich_model_summary(strategy: Any) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        return fit(strategy, callbacks=[RichModelSummary()], enable_model_summary=True)


@scenario
def csv_and_tensorboard(strategy: Any) -> Any:
    with folder(strategy) as name:
        loggers = [CSVLogger(name, "csv", flush_logs_every_n_steps=1), TensorBoardLogger(name, "board")]
        made, module = trainer(strategy, logger=loggers), Bars()
        made.fit(module, loader(), loader(13, 5, 9))
        made.test(module, loader(13, 5, 9), verbose=False)
        path = Path(name, "csv", "version_0", "metrics.csv")
        lines = path.read_text().splitlines() if made.is_global_zero else []
        rows = [[float(cell) if cell else None for cell in line.split(",")] for line in lines[1:]]
        return outcome(made, module), of_rank_zero(made, [len(lines), rows])


# --- callbacks that decide --------------------------------------------------------------------------------------------


settings(
    "timer",
    {"callbacks": [Timer("00:12:00:00")]},
    {"callbacks": [Timer({"seconds": 0})]},
    {"callbacks": [Timer({"seconds": 0})], "min_steps": 3},
    {"callbacks": [Timer({"seconds": 0}, interval="epoch")], "min_epochs": 1, "max_epochs": 3},
    {"max_time": {"seconds": 0}, "min_steps": 2},
)
settings(
    "gradient_accumulation_scheduler",
    {"callbacks": [GradientAccumulationScheduler({0: 3, 1: 1, 2: 2})], "max_epochs": 3},
)
STRUCTURED: dict[str, Any] = {"pruning_dim": 0, "pruning_norm": 2, "use_global_unstructured": False}
PRUNING: list[Any] = [
    ModelPruning("l1_unstructured", amount=0.3),
    ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False),
    ModelPruning("ln_structured", amount=0.3, parameter_names=["weight"], **STRUCTURED),
    ModelPruning("l1_unstructured", amount=2, prune_on_train_epoch_end=False),
    ModelPruning("random_unstructured", amount=0.2),
]
settings("model_pruning", *({"callbacks": [pruning], "max_epochs": 3} for pruning in PRUNING))


def half(average: Any, new: Any, count: Any) -> Any:
    return (average + new) / 2


AVERAGED: dict[str, Any] = {"module": Normalized(), "max_epochs": 4, "sync_batchnorm": True}
HALFWAY = StochasticWeightAveraging(0.05, swa_epoch_start=0.5, annealing_epochs=1)
settings(
    "averaged_weights",
    {"callbacks": [StochasticWeightAveraging(0.05, swa_epoch_start=1)], "max_epochs": 4},
    {"callbacks": [EMAWeightAveraging(decay=0.7)]},
)
# Their last epoch computes statistics anew. Apart, since Lightning cannot start them again once they have finished.
settings("averaged_weights_and_statistics", {"callbacks": [HALFWAY], **AVERAGED})
settings("averaged_weights_of_two_batches", {"callbacks": [HALFWAY], "accumulate_grad_batches": 2, **AVERAGED})
LINEAR = StochasticWeightAveraging([0.05], 1, 2, "linear", avg_fn=half)
settings("averaged_weights_by_a_function", {"callbacks": [LINEAR], **AVERAGED})


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


@scenario
def spike_detection(strategy: Any) -> Any:
    """A loss of the whole batch is compared, on each process with the same result."""
    found: list[Any] = []
    for at in (20, 29):
        with folder(strategy) as name:
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
        self.backbone = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES)).double()

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


@scenario
def backbone_finetuning(strategy: Any) -> Any:
    tuning = BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_ratio_lr=0.1)
    options: dict[str, Any] = {"max_epochs": 4, "sync_batchnorm": True}
    return [
        fit(strategy, Pretrained(), callbacks=[tuning, LearningRateMonitor()], **options),
        fit(strategy, Pretrained(), callbacks=[OneLayerMore()], accumulate_grad_batches=2, **options),
    ]


class EveryOther(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return (step_idx is not None and step_idx % 2 == 1) or epoch_idx == 1


@scenario
def weight_averaging(strategy: Any) -> Any:
    """With a checkpoint, which has the averaged weights, and training that goes on from it."""
    with folder(strategy) as name:
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


@scenario
def barebones(strategy: Any) -> Any:
    pl.seed_everything(7, verbose=False)
    chosen = strategy.strategy if isinstance(strategy, Within) else strategy
    made = pl.Trainer(barebones=True, max_epochs=2, strategy=chosen, accelerator=ACCELERATOR)
    module = Net()
    made.fit(module, loader(shuffle=True), loader(13, 5, 9))
    return outcome(made, module)


settings("detect_anomaly", {"detect_anomaly": True})
settings("sanity_checks", *({"num_sanity_val_steps": steps} for steps in (0, 1, -1)))
settings(
    "val_check_interval",
    {"val_check_interval": 0.5},
    {"val_check_interval": 0.3, "limit_train_batches": 0.8},
    {"val_check_interval": 3, "check_val_every_n_epoch": None, "max_epochs": 3},
    {"check_val_every_n_epoch": 2, "max_epochs": 5},
    {"val_check_interval": 2, "max_epochs": -1, "max_steps": 6},
)
settings(
    "limits",
    {"max_epochs": 4, "max_steps": 6, "min_steps": 2},
    {"max_steps": 0},
    {"max_epochs": -1, "max_steps": 9},
    {"log_every_n_steps": 3},
    {"accumulate_grad_batches": 4, "max_steps": 3},
    {"overfit_batches": 2},
    {"overfit_batches": 0.5},
    {"limit_train_batches": 3, "limit_val_batches": 0.5},
    {"limit_train_batches": 0.5, "limit_val_batches": 1},
    {"limit_val_batches": 0},
    {"limit_train_batches": 0},
)


class Grows(pl.LightningDataModule):
    """Its data depends on the epoch in which a loader is asked for."""

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return loader(17 + 4 * self.trainer.current_epoch, 4, self.trainer.current_epoch, shuffle=True)

    def val_dataloader(self) -> Any:
        assert self.trainer is not None
        return loader(7 + self.trainer.current_epoch, 3, 8)


def reloaded(strategy: Any, every: int) -> Any:
    made, module = trainer(strategy, reload_dataloaders_every_n_epochs=every, max_epochs=4), Net()
    made.fit(module, datamodule=Grows())
    return outcome(made, module)


@scenario
def loaders_of_each_epoch(strategy: Any) -> Any:
    return reloaded(strategy, 1)


@scenario
def loaders_of_every_second_epoch(strategy: Any) -> Any:
    return reloaded(strategy, 2)


class MadeLate(Net):
    """Has its layers when the Trainer asks for them."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers
        self.layers: Any = None

    def configure_model(self) -> None:
        if self.layers is None:
            self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


@scenario
def configure_model(strategy: Any) -> Any:
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


@scenario
def load_from_checkpoint(strategy: Any) -> Any:
    with folder(strategy) as name:
        checkpoint = ModelCheckpoint(name, monitor="val_loss", save_weights_only=True)
        made, module = trainer(strategy, callbacks=[checkpoint], enable_checkpointing=True), Sized(0.2, 0.5)
        made.fit(module, loader(), loader(13, 5, 9))
        loaded = Sized.load_from_checkpoint(checkpoint.best_model_path)
        best = made.test(ckpt_path="best", dataloaders=loader(13, 5, 9), verbose=False)
        other = trainer(strategy)
        validated = other.validate(loaded, loader(13, 5, 9), verbose=False)
        return [outcome(made, module), loaded.lr, loaded.scale, best, validated, outcome(other, loaded)]


@scenario
def parts_of_the_data(strategy: Any) -> Any:
    made, module = trainer(strategy, limit_test_batches=0.5, limit_predict_batches=2), Net()
    evaluated = [
        made.test(module, loader(29, 8), verbose=False),
        made.predict(module, loader(13, 5, 9)),
        made.predict(module, [loader(13, 5, 9), loader(4, 4, 9)]),
    ]
    return evaluated, fit(strategy, None, loader(29, 8, shuffle=True), overfit_batches=0.3)


@scenario
def fast_dev_run(strategy: Any) -> Any:
    made, module = trainer(strategy, fast_dev_run=2), Net()
    made.fit(module, loader(), loader(13, 5, 9))
    fast = outcome(made, module)
    fast["test"] = made.test(module, loader(13, 5, 9), verbose=False)
    fast["predict"] = made.predict(module, loader(13, 5, 9))
    return fast, fit(strategy, fast_dev_run=True)


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


@scenario
def without_inference_mode(strategy: Any) -> Any:
    made, module = trainer(strategy, inference_mode=False), Forces()
    made.fit(module, loader(), loader(13, 5, 9))
    return outcome(made, module), made.predict(module, loader(13, 5, 9))


@scenario
def reproducible_settings(strategy: Any) -> Any:
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


@scenario
def plugins(strategy: Any) -> Any:
    with folder(strategy) as name:
        files = CountsSaves()
        made = trainer(strategy, plugins=[files, DoublePrecision()], default_root_dir=name, enable_checkpointing=True)
        module = Net()
        made.fit(module, loader(), loader(13, 5, 9))
        return outcome(made, module), of_rank_zero(made, files.saved)


# --- the table --------------------------------------------------------------------------------------------------------

NEEDS = {"rich_progress_bar": "rich", "rich_model_summary": "rich", "device_stats_monitor": "psutil"}

APART: dict[str, Any] = {}

ITS_OWN = "it counts what it has seen itself, which is in no file"
NOT_RESUMED = {
    "loaders_of_every_second_epoch": "in another epoch the script gives other data than that of the cut",
    "logs_behind_the_step": "its attribute is a list, which begins anew on another number of processes",
    "model_pruning": "Lightning's checkpoints have pruned weights, but not which they are",
    "plugins": ITS_OWN,
    "profilers_with_files": ITS_OWN,
    "rich_progress_bar": ITS_OWN,
    "simple_profiler": ITS_OWN,
    "throughput_monitor": ITS_OWN,
    "tqdm_progress_bar": ITS_OWN,
}
"""Why a scenario cannot be compared with one that was not cut."""

LOCAL_STEPS = ["without_momentum", "a_hook_ends_the_epoch", "predictions_of_all_kinds", "throughput_monitor"]
"""Have the numbers of one process although the parameters are averaged in place of the gradients."""


def missing(name: str) -> str | None:
    """The package that a scenario needs and that is not installed."""
    needed = NEEDS.get(name)
    return needed if needed is not None and importlib.util.find_spec(needed) is None else None


def names(way: Way) -> list[str]:
    if way.options:
        return LOCAL_STEPS
    left_out = NOT_RESUMED if way.resumed_on else ()
    return [name for name in SCENARIOS if missing(name) is None and name not in left_out]


def refusal(name: str, way: Way) -> str:
    return ""
