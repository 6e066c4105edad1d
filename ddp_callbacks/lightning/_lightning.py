"""What this library uses of Lightning beside its public names: each in one function, all listed in :data:`PRIVATE`.

Lightning comes as two packages. The functions work with the objects of either, or take the package's name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ddp_callbacks._torch import TreeSpec, leaf_spec
from ddp_callbacks.lightning.which_package import FABRIC, ROOTS
from ddp_callbacks.versions import require_names

_RESULT = "trainer.connectors.logger_connector.result"
_LOGGER = "trainer.connectors.logger_connector.logger_connector"

# Methods that are replaced while a run lasts.
BROADCAST_SIGTERM = "_broadcast_sigterm_tensor"  # of the training epoch loop, before each batch
HANDLE_SIGTERM = "_sigterm_notifier_fn"  # of the signal connector
HANDLE_REQUEUE = "_slurm_sigusr_handler_fn"  # likewise
PREPARE_DATA = "prepare_data"  # of the data connector
PREDICT_STEP = "_predict_step"  # of the prediction loop
BATCH_INDICES = "_get_batch_indices"  # likewise

# A function that is replaced as long as the program runs: the Tuner asks it before the strategy hears of anything.
CHECK_SEARCH = "_check_scale_batch_size_configuration"  # of the module of the Tuner

PRIVATE = (
    "core.module:LightningModule.__init__ uses _trainer",
    "core.module:LightningModule._on_before_batch_transfer(self, batch)",
    "core.optimizer:LightningOptimizer.__init__ uses _optimizer",
    # the Trainer
    "trainer:Trainer.__init__ uses _accelerator_connector, _checkpoint_connector, _data_connector",
    "trainer:Trainer.__init__ uses _logger_connector, _signal_connector",
    "trainer:Trainer.__init__ uses fit_loop, validate_loop, test_loop, predict_loop",
    "trainer:Trainer._active_loop",
    "trainer:Trainer._results",
    "trainer.connectors.accelerator_connector:_AcceleratorConnector.__init__ uses use_distributed_sampler",
    "trainer.connectors.accelerator_connector:_AcceleratorConnector._lazy_init_strategy uses _layer_sync",
    "trainer.connectors.accelerator_connector:_AcceleratorConnector._lazy_init_strategy uses _configure_launcher",
    f"trainer.connectors.data_connector:_DataConnector.{PREPARE_DATA}(self)",
    "trainer.connectors.accelerator_connector:_AcceleratorConnector.is_distributed",
    "trainer.connectors.checkpoint_connector:_CheckpointConnector.resume_start(self, checkpoint_path, weights_only)",
    "trainer.connectors.signal_connector:_SignalConnector.__init__ uses received_sigterm",
    f"trainer.connectors.signal_connector:_SignalConnector.{HANDLE_SIGTERM}(self, signum)",
    f"trainer.connectors.signal_connector:_SignalConnector.{HANDLE_REQUEUE}(self, signum)",
    "trainer.setup:_init_debugging_flags uses _val_check_time_interval",
    f"tuner.tuning:{CHECK_SEARCH}(trainer)",
    "tuner.lr_finder:_LRCallback.on_train_batch_end(self, trainer, pl_module, outputs)",
    # its loops
    "loops.fit_loop:_FitLoop.__init__ uses _combined_loader",
    "loops.fit_loop:_FitLoop._skip_backward",
    "loops.fit_loop:_FitLoop.setup_data uses _last_val_time",
    "loops.training_epoch_loop:_TrainingEpochLoop.__init__ uses _results, automatic_optimization, val_loop",
    f"loops.training_epoch_loop:_TrainingEpochLoop.{BROADCAST_SIGTERM}(self)",
    "loops.training_epoch_loop:_TrainingEpochLoop._should_check_val_fx uses _last_val_time, _val_check_time_interval",
    "loops.evaluation_loop:_EvaluationLoop.__init__ uses _combined_loader, _results",
    "loops.prediction_loop:_PredictionLoop.__init__ uses _combined_loader, _data_fetcher, _predictions, _results",
    "loops.prediction_loop:_PredictionLoop.__init__ uses batch_progress, epoch_batch_indices",
    f"loops.prediction_loop:_PredictionLoop.{PREDICT_STEP}(self, batch, batch_idx, dataloader_idx, dataloader_iter)",
    f"loops.prediction_loop:_PredictionLoop.{BATCH_INDICES}(self, dataloader)",
    "loops.fetchers:_DataLoaderIterDataFetcher.__init__ uses _dataloader_idx",
    "loops.optimization.automatic:_AutomaticOptimization.output_result_cls.from_training_step_output",
    "utilities.combined_loader:CombinedLoader.__init__ uses _mode, _spec",
    # what self.log records
    f"{_LOGGER}:_LoggerConnector.epoch_end_reached(self)",
    f"{_LOGGER}:_LoggerConnector.on_batch_end(self)",
    f"{_LOGGER}:_LoggerConnector.on_epoch_end(self)",
    f"{_LOGGER}:_LoggerConnector.reset_metrics uses _progress_bar_metrics, _callback_metrics, _logged_metrics",
    f"{_LOGGER}:_LoggerConnector.should_update_logs",
    f"{_RESULT}:_Metadata.__init__(on_step, on_epoch, reduce_fx, metric_attribute)",
    f"{_RESULT}:_Metadata.is_mean_reduction",
    f"{_RESULT}:_Metadata.sync",
    f"{_RESULT}:_ResultCollection.__init__(self, training)",
    f"{_RESULT}:_ResultCollection._get_cache(result_metric, on_step)",
    f"{_RESULT}:_ResultCollection.log(self, fx, name, value, sync_dist, sync_dist_group, batch_size)",
    f"{_RESULT}:_ResultCollection.metrics uses _get_cache",
    f"{_RESULT}:_ResultCollection.reset(self, metrics, fx)",
    f"{_RESULT}:_ResultCollection.update_metrics(self, key, value, batch_size)",
    f"{_RESULT}:_ResultMetric.__init__ uses _forward_cache, has_reset, is_tensor, meta",
    f"{_RESULT}:_Sync.rank_zero_only",
    f"{_RESULT}:_Sync.should",
    # the strategy
    "strategies:DDPStrategy.__init__ uses _process_group_backend, _timeout",
    "strategies:DDPStrategy._configure_launcher(self)",
    "strategies:DDPStrategy._setup_model(self, model)",
    "strategies:ParallelStrategy.__init__ uses _layer_sync",
)
"""The contract, as :func:`ddp_callbacks.versions.require_names` reads it, below ``lightning.pytorch``."""

PRIVATE_OF_FABRIC = (
    "utilities.data:_auto_add_worker_init_fn(dataloader, rank)",
    "utilities.imports:_IS_INTERACTIVE",
    "fabric:Fabric._setup_dataloader(self, dataloader, use_distributed_sampler)",
    "strategies:DDPStrategy.__init__ uses _backward_sync_control, _process_group_backend, _timeout",
    "strategies:DDPStrategy._configure_launcher(self)",
    "strategies:DDPStrategy._set_world_ranks(self)",
    "strategies:DDPStrategy._setup_distributed(self)",
)
"""The same below ``lightning.fabric``."""


def require_lightning(package: str) -> None:
    """Raise :class:`ImportError` if the installed package lacks a private name, naming the versions that have it."""
    require_names(package.replace("_", "-"), names_in(package))


def require_fabric(package: str) -> None:
    """As :func:`require_lightning`, for what is used of Fabric."""
    require_names(package.replace("_", "-"), names_in_fabric(package))


def names_in(package: str) -> list[str]:
    """The contract for ``"lightning"`` or ``"pytorch_lightning"``."""
    return [f"{ROOTS[package]}.{name}" for name in PRIVATE] + names_in_fabric(package)


def names_in_fabric(package: str) -> list[str]:
    """The part of the contract that is Fabric's."""
    return [f"{FABRIC[package]}.{name}" for name in PRIVATE_OF_FABRIC]


# --- the package ---------------------------------------------------------------------------------------------------


def results_class(package: str) -> type:
    """The class of what keeps the logged values of a loop."""
    found: type = importlib.import_module(f"{ROOTS[package]}.{_RESULT}")._ResultCollection
    return found


def add_worker_init_fn(package: str) -> Callable[[object, int], None]:
    """The function that seeds the workers of a loader by the rank, after ``seed_everything(workers=True)``."""
    found: Callable[[object, int], None] = importlib.import_module(
        f"{FABRIC[package]}.utilities.data"
    )._auto_add_worker_init_fn
    return found


def is_interactive(package: str) -> bool:
    """Whether the program runs in a notebook or a shell of Python."""
    return bool(importlib.import_module(f"{FABRIC[package]}.utilities.imports")._IS_INTERACTIVE)


# --- the Trainer's parts -------------------------------------------------------------------------------------------


def logger_connector(trainer: Any) -> Any:
    """The part of the Trainer that is called at the end of batches and epochs, to log."""
    return trainer._logger_connector


def data_connector(trainer: Any) -> Any:
    """The part of the Trainer that calls ``prepare_data`` on one process of each host."""
    return trainer._data_connector


def signal_connector(trainer: Any) -> Any:
    """The part of the Trainer that handles SIGTERM and Slurm's warning."""
    return trainer._signal_connector


def requeue(trainer: Any, number: int) -> None:
    """Do what Lightning does at Slurm's warning, signal ``number``: save a checkpoint and requeue the job."""
    connector = signal_connector(trainer)
    type(connector)._slurm_sigusr_handler_fn(connector, number, None)


def checkpoint_connector(trainer: Any) -> Any:
    """The part of the Trainer that restores its state from a checkpoint."""
    return trainer._checkpoint_connector


def accelerator_connector(trainer: Any) -> Any:
    """The part of the Trainer that has chosen the devices, and knows ``use_distributed_sampler``."""
    return trainer._accelerator_connector


@contextmanager
def undivided(trainer: Any) -> Iterator[None]:
    """Inside, the Trainer says that it is not distributed, for which the search for a batch size asks."""
    connector = accelerator_connector(trainer)
    kind = type(connector)
    connector.__class__ = type(kind.__name__, (kind,), {"is_distributed": False})
    try:
        yield
    finally:
        connector.__class__ = kind


def tuner_module(package: str) -> Any:
    """The module of the Tuner."""
    return importlib.import_module(f"{ROOTS[package]}.tuner.tuning")


def trainer_of(module: Any) -> Any:
    """The Trainer that runs a module, or has run it last; ``None`` if none has."""
    return vars(module).get("_trainer")


def before_transfer(module: Any, batch: Any) -> Any:
    """What the module's and the datamodule's ``on_before_batch_transfer`` make of a batch."""
    return module._on_before_batch_transfer(batch)


def torch_optimizer(optimizer: Any) -> Any:
    """The optimizer inside of a ``LightningOptimizer``; any other one itself."""
    return getattr(optimizer, "_optimizer", optimizer)


def compares_losses(callback: Any) -> bool:
    """Whether a callback decides by the losses that ``on_train_batch_end`` gets, as ``SpikeDetection`` does."""
    return not {kind.__name__ for kind in type(callback).__mro__}.isdisjoint(("_LRCallback", "SpikeDetection"))


# --- Fabric --------------------------------------------------------------------------------------------------------


def is_to_divide(frame: FrameType | None) -> bool:
    """What ``use_distributed_sampler`` is in the call of ``Fabric.setup_dataloaders`` that this code runs in.

    Fabric does not tell the strategy.
    """
    while frame is not None:
        if frame.f_code.co_name == "_setup_dataloader" and "use_distributed_sampler" in frame.f_locals:
            return bool(frame.f_locals["use_distributed_sampler"])
        frame = frame.f_back
    return True


# --- loops ---------------------------------------------------------------------------------------------------------


def results_of(trainer: Any) -> Any:
    """What ``self.log`` records into: the collection of the loop that runs; ``None`` in predictions, between runs."""
    return trainer._results


def results_of_training(trainer: Any) -> Any:
    """The same of the training loop, whatever runs."""
    return trainer.fit_loop.epoch_loop._results


def refresh_metrics(trainer: Any, results: Any) -> None:
    """Let the Trainer's ``callback_metrics``, and the others, be what a collection has of the last step."""
    connector, metrics = trainer._logger_connector, results.metrics(True)
    connector._progress_bar_metrics.update(metrics["pbar"])
    connector._callback_metrics.update(metrics["callback"])
    connector._logged_metrics.update(metrics["log"])


def logs_step(trainer: Any) -> bool:
    """Whether the loggers write the values of the batch that has ended; in evaluations they do after each."""
    return bool(not trainer.training or trainer.fast_dev_run or trainer._logger_connector.should_update_logs)


def replace_results(loop: Any, make: Callable[[bool], Any]) -> None:
    """Give a loop another collection, made of whether the loop trains."""
    loop._results = make(loop._results.training)


def loader_of(loop: Any) -> Any:
    """The ``CombinedLoader`` of a loop; ``None`` before it has set up its data."""
    return loop._combined_loader


def active_loop(trainer: Any) -> Any:
    """The loop that runs."""
    return trainer._active_loop


def active_loader(trainer: Any) -> Any:
    """The ``CombinedLoader`` of the loop that runs."""
    return trainer._active_loop._combined_loader


def loaders_of_batch(combined: Any, dataloader_idx: int) -> tuple[list[Any], TreeSpec]:
    """The loaders that a batch of a ``CombinedLoader`` comes from, and how their batches make one."""
    loaders = list(combined.flattened)
    if combined._mode == "sequential":
        return loaders[dataloader_idx : dataloader_idx + 1], leaf_spec()
    return loaders, combined._spec


def skips_backward(trainer: Any) -> bool:
    """Whether the fit runs without backward and steps, as for updating the BatchNorm statistics of averaged weights."""
    return bool(trainer.fit_loop._skip_backward)


def validation_interval(trainer: Any) -> float | None:
    """Seconds between validations, if it is time that decides."""
    interval: float | None = getattr(trainer, "_val_check_time_interval", None)
    return interval


def last_validation(trainer: Any) -> float:
    """When the last one was, by ``time.monotonic()``; where time decides."""
    time: float = trainer._last_val_time
    return time


def set_last_validation(trainer: Any, time: float) -> None:
    """Let Lightning compare its clock with another time."""
    trainer._last_val_time = time


def drawn_from(predict_loop: Any) -> int:
    """The index of the loader that ``predict_step(dataloader_iter)`` has drawn from."""
    index: int = predict_loop._data_fetcher._dataloader_idx
    return index


def predictions_of(predict_loop: Any) -> list[list[Any]]:
    """What the prediction loop has collected, by loader."""
    predictions: list[list[Any]] = predict_loop._predictions
    return predictions
