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
import program_parts_trainer  # noqa: F401  (it adds scenarios)
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
    Stream,
    Within,
    data,
    fail,
    fit,
    folder,
    halving,
    joined,
    loader,
    outcome,
    run,
    scenario,
    settings,
    trainer,
)
from ways import Way

__all__ = ["APART", "SCENARIOS", "fail", "joined", "names", "run"]  # see ways.Table


def of_rank_zero(made: pl.Trainer, value: Any) -> Any:
    """What rank 0 alone has, on all ranks."""
    return made.strategy.broadcast(value)


def floats(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in sorted(metrics.items())}


# --- callbacks that report --------------------------------------------------------------------------------------------


def warming_up(optimizer: Any) -> Any:
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6)
    return {"scheduler": schedule, "interval": "step"}


@scenario
def learning_rate_monitor(strategy: Any) -> Any:
    detailed = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    by_epoch: dict[str, Any] = {"callbacks": [LearningRateMonitor("epoch")], "accumulate_grad_batches": 2}
    return [
        fit(strategy, Net(scheduler=warming_up), callbacks=[detailed]),
        fit(strategy, Net(scheduler=halving), **by_epoch),
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


@scenario
def tqdm_progress_bar(strategy: Any) -> Any:
    class Shown(TQDMProgressBar):
        shown: ClassVar[list[dict[str, float]]] = []

        def get_metrics(self, made: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
            metrics = super().get_metrics(made, module)
            metrics.pop("loss_step", None)  # of the process's own part, where no logger has written the step
            self.shown.append(floats(metrics))
            return metrics

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        made, module = trainer(strategy, callbacks=[Shown()], enable_progress_bar=True), Bars()
        made.fit(module, loader(shuffle=True), loader(13, 5, 9))
    return outcome(made, module), of_rank_zero(made, Shown.shown)


@scenario
def rich_bar_and_summary(strategy: Any) -> Any:
    options: dict[str, Any] = {"enable_progress_bar": True, "enable_model_summary": True}
    with contextlib.redirect_stdout(io.StringIO()):
        return fit(strategy, Bars(), callbacks=[RichProgressBar(), RichModelSummary()], **options)


@scenario
def throughput_monitor(strategy: Any) -> Any:
    """What it counts on the process of rank 0: batches, and a time for each."""
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[1]), window_size=3)
    made, module = trainer(strategy, callbacks=[monitor]), Net()
    made.fit(module, loader(32, 8), loader(16, 8, 9))
    counts = ("|batches", "|epoch", "step")
    lines = outcome(made, module)["logged"]
    counted = [{name: value for name, value in line.items() if name.endswith(counts)} for line in lines]
    return of_rank_zero(made, [line for line in counted if len(line) > 1])


@scenario
def device_stats_monitor(strategy: Any) -> Any:
    """The rows of rank 0, which alone writes: a rank without a sample of a validation batch has no hooks for it."""
    made, module = trainer(strategy, callbacks=[DeviceStatsMonitor(cpu_stats=True)]), Net()
    made.fit(module, loader(shuffle=True), loader(13, 5, 9))
    results = outcome(made, module)
    return results | {"logged": of_rank_zero(made, [dict.fromkeys(line, 0.0) for line in results["logged"]])}


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


class Exemplary(Normalized):
    """A summary computes sizes in a forward of its own, and a logger the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = data(4).tensors[0]


@scenario
def model_summary(strategy: Any) -> Any:
    options: dict[str, Any] = {"callbacks": [ModelSummary(max_depth=2)], "enable_model_summary": True}
    with folder(strategy) as name:
        return fit(
            strategy, Exemplary(), logger=TensorBoardLogger(name, log_graph=True), sync_batchnorm=True, **options
        )


@scenario
def loggers_with_files(strategy: Any) -> Any:
    with folder(strategy) as name:
        loggers = [CSVLogger(name, "csv", flush_logs_every_n_steps=1), TensorBoardLogger(name, "board")]
        made, module = trainer(strategy, logger=loggers), Bars()
        made.fit(module, loader(), loader(13, 5, 9))
        made.test(module, loader(13, 5, 9), verbose=False)
        path = Path(name, "csv", "version_0", "metrics.csv")
        lines = path.read_text().splitlines() if made.is_global_zero else []
        rows = [[float(cell) if cell else None for cell in line.split(",")] for line in lines[1:]]
        return outcome(made, module), of_rank_zero(made, rows)


# --- callbacks that decide --------------------------------------------------------------------------------------------


settings(
    "timer",
    {"callbacks": [Timer({"seconds": 0})]},
    {"callbacks": [Timer({"seconds": 0}, interval="epoch")], "min_epochs": 1, "max_epochs": 3},
    {"max_time": {"seconds": 0}, "min_steps": 3},
)
settings(
    "gradient_accumulation_scheduler",
    {"callbacks": [GradientAccumulationScheduler({0: 3, 1: 1, 2: 2})], "max_epochs": 3},
)
STRUCTURED: dict[str, Any] = {"pruning_dim": 0, "pruning_norm": 2, "use_global_unstructured": False}
PRUNING: list[Any] = [
    ModelPruning("l1_unstructured", amount=0.3),
    ModelPruning("ln_structured", amount=0.3, parameter_names=["weight"], **STRUCTURED),
    ModelPruning("l1_unstructured", amount=2, use_lottery_ticket_hypothesis=False, prune_on_train_epoch_end=False),
    ModelPruning("random_unstructured", amount=0.2),
]
settings("model_pruning", *({"callbacks": [pruning]} for pruning in PRUNING))


def half(average: Any, new: Any, count: Any) -> Any:
    return (average + new) / 2


class EveryOther(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return (step_idx is not None and step_idx % 2 == 1) or epoch_idx == 1


settings(
    "averaged_weights",
    {"callbacks": [StochasticWeightAveraging(0.05, swa_epoch_start=1)], "max_epochs": 4},
    {"callbacks": [EMAWeightAveraging(decay=0.7)]},
    {"callbacks": [EveryOther(avg_fn=get_ema_avg_fn(0.8))], "module": Normalized(), "sync_batchnorm": True},
)
# Their last epoch computes statistics anew. Apart, since Lightning cannot start them again once they have finished.
AVERAGED: dict[str, Any] = {"module": Normalized(), "max_epochs": 4, "sync_batchnorm": True}
HALFWAY = StochasticWeightAveraging(0.05, swa_epoch_start=0.5, annealing_epochs=1)
LINEAR = StochasticWeightAveraging([0.05], 1, 2, "linear", avg_fn=half)
settings("averaged_weights_of_two_batches", {"callbacks": [HALFWAY], "accumulate_grad_batches": 2, **AVERAGED})
settings("averaged_weights_by_a_function", {"callbacks": [LINEAR], **AVERAGED})


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
    x, y = data(32).tensors
    x[29] *= 1e3
    with folder(strategy) as name:
        detection = Noted(window=3, warmup=1, rtol=3.0, exclude_batches_path=f"{name}/bad.json")
        made, module = trainer(strategy, callbacks=[detection]), Spiky(lr=1e-6)
        with contextlib.suppress(TrainingSpikeException):
            made.fit(module, DataLoader(TensorDataset(x, y), 8))
        path = Path(str(detection.exclude_batches_path))
        bad = json.loads(path.read_text()) if made.is_global_zero and path.exists() else []
        return of_rank_zero(made, bad), detection.bad_batches, detection.losses, outcome(made, module)


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
    options: dict[str, Any] = {"max_epochs": 3, "sync_batchnorm": True}
    return [
        fit(strategy, Pretrained(), callbacks=[tuning, LearningRateMonitor()], **options),
        fit(strategy, Pretrained(), callbacks=[OneLayerMore()], accumulate_grad_batches=2, **options),
    ]


# --- settings of the loop ---------------------------------------------------------------------------------------------


@scenario
def barebones(strategy: Any) -> Any:
    pl.seed_everything(7, verbose=False)
    chosen = strategy.strategy if isinstance(strategy, Within) else strategy
    made = pl.Trainer(barebones=True, max_epochs=2, strategy=chosen, accelerator=ACCELERATOR)
    module = Net()
    made.fit(module, loader(shuffle=True), loader(13, 5, 9))
    return outcome(made, module)


settings("sanity_checks", *({"num_sanity_val_steps": steps} for steps in (1, -1)))
settings(
    "val_check_interval",
    {"val_check_interval": 0.3, "limit_train_batches": 0.8},
    {"val_check_interval": 3, "check_val_every_n_epoch": None, "max_epochs": 3},
    {"check_val_every_n_epoch": 2, "max_epochs": 3},
    {"val_check_interval": 2, "max_epochs": -1, "max_steps": 6},
)
settings(
    "limits",
    {"max_epochs": -1, "max_steps": 9},
    {"accumulate_grad_batches": 4, "max_steps": 3, "log_every_n_steps": 3},
    {"overfit_batches": 2},
    {"overfit_batches": 0.5},
    {"limit_train_batches": 3, "limit_val_batches": 0.5},
    {"limit_train_batches": 0.5, "limit_val_batches": 0},
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


SCENARIOS["loaders_of_each_epoch"] = lambda strategy: reloaded(strategy, 1)
SCENARIOS["loaders_of_every_second_epoch"] = lambda strategy: reloaded(strategy, 2)


class MadeLate(Net):
    """Has its layers when the Trainer asks for them."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers
        self.layers: Any = None

    def configure_model(self) -> None:
        if self.layers is None:
            self.layers = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def fit_and_evaluate(strategy: Any, module: Net, **options: Any) -> Any:
    """A test and a prediction behind the fit."""
    made = trainer(strategy, **options)
    made.fit(module, loader(), loader(13, 5, 9))
    return {
        "fit": outcome(made, module),
        "test": made.test(module, loader(13, 5, 9), verbose=False),
        "predict": made.predict(module, loader(13, 5, 9)),
    }


SCENARIOS["configure_model"] = lambda strategy: fit_and_evaluate(strategy, MadeLate())
SCENARIOS["fast_dev_run"] = lambda strategy: fit_and_evaluate(strategy, Net(), fast_dev_run=2)


@scenario
def load_from_checkpoint(strategy: Any) -> Any:
    with folder(strategy) as name:
        saving = ModelCheckpoint(name, monitor="val_loss", save_weights_only=True)
        made, module = trainer(strategy, callbacks=[saving], enable_checkpointing=True), Net()
        made.fit(module, loader(), loader(13, 5, 9))
        loaded = Net.load_from_checkpoint(saving.best_model_path)
        best = made.test(ckpt_path="best", dataloaders=loader(13, 5, 9), verbose=False)
        other = trainer(strategy)
        validated = other.validate(loaded, loader(13, 5, 9), verbose=False)
        return [outcome(made, module), best, validated, outcome(other, loaded)]


@scenario
def parts_of_the_data(strategy: Any) -> Any:
    made, module = trainer(strategy, limit_test_batches=0.5, limit_predict_batches=2), Net()
    return [
        made.test(module, loader(29, 8), verbose=False),
        made.predict(module, [loader(13, 5, 9), loader(4, 4, 9), DataLoader(Stream(11), 4)]),
        trainer(strategy).predict(module, DataLoader(Stream(11), 4)),
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


SCENARIOS["without_inference_mode"] = lambda strategy: fit_and_evaluate(strategy, Forces(), inference_mode=False)


@scenario
def reproducible_settings(strategy: Any) -> Any:
    before = torch.are_deterministic_algorithms_enabled()
    options: dict[str, Any] = {"precision": "64-true", "enable_autolog_hparams": False, "detect_anomaly": True}
    try:
        return fit(strategy, deterministic=True, benchmark=False, **options)
    finally:
        torch.use_deterministic_algorithms(before)


settings("plugins", {"plugins": [TorchCheckpointIO(), DoublePrecision()]})


# --- the table --------------------------------------------------------------------------------------------------------

NEEDS = {"rich_bar_and_summary": "rich", "device_stats_monitor": "psutil"}

APART: dict[str, Any] = {}

ITS_OWN = "it counts what it has seen itself, which is in no file"
NOT_RESUMED = {
    "a_fit_behind_one_that_raised": "it would raise again",
    "a_stream_fitted_longer": "the second fit of one Trainer begins where the first has ended",
    "loaders_of_every_second_epoch": "in another epoch the script gives other data than that of the cut",
    "logs_behind_the_step": "its attribute is a list, which begins anew on another number of processes",
    "model_pruning": "Lightning's checkpoints have pruned weights, but not which they are",
    "profilers_with_files": ITS_OWN,
    "simple_profiler": ITS_OWN,
    "spike_detection": "Lightning's callback cannot load what it has saved: it has no attribute running",
    "throughput_monitor": ITS_OWN,
    "tqdm_progress_bar": ITS_OWN,
}
"""Why a scenario cannot be compared with one that was not cut."""

LOCAL_STEPS = ["without_momentum", "predictions_of_all_kinds", "throughput_monitor"]
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
