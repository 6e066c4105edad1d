"""What this library uses of Lightning beside its public names: each in one function, all listed in :data:`PRIVATE`.

Lightning comes as two packages. The functions work with the objects of either, or take the package's name.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ddp_callbacks.lightning.packages import FABRIC, ROOTS
from ddp_callbacks.lightning.replacement import Replacements
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

RESUME_START = "resume_start"  # of the checkpoint connector
REGISTER_SIGNALS = "register_signal_handlers"  # of the signal connector
MONITORED = ("_monitor_candidates", "_run_early_stopping_check")  # in which ModelCheckpoint and EarlyStopping read
EVALUATION_STEP = "_evaluation_step"  # of an evaluation loop
SHOULD_VALIDATE = "_should_check_val_fx"  # of the training epoch loop

_MAX_SIZE = "_MaxSize"  # an iterator over several loaders

PRIVATE = (
    "core.module:LightningModule.__init__ uses _trainer, _current_fx_name",
    "core.module:LightningModule._on_before_batch_transfer(self, batch)",
    "core.optimizer:LightningOptimizer.__init__ uses _optimizer",
    # the Trainer
    "trainer:Trainer.__init__(self, strategy, callbacks)",
    "trainer:Trainer.__init__ uses _accelerator_connector, _checkpoint_connector, _data_connector",
    "trainer:Trainer.__init__ uses _logger_connector, _signal_connector",
    "trainer:Trainer.__init__ uses fit_loop, validate_loop, test_loop, predict_loop",
    "trainer:Trainer._active_loop",
    "trainer:Trainer._results",
    "trainer.connectors.accelerator_connector:_AcceleratorConnector.__init__ uses use_distributed_sampler",
    "trainer.connectors.accelerator_connector:_AcceleratorConnector._lazy_init_strategy uses _layer_sync",
    "trainer.connectors.accelerator_connector:_AcceleratorConnector._lazy_init_strategy uses _configure_launcher",
    f"trainer.connectors.data_connector:_DataConnector.{PREPARE_DATA}(self)",
    "trainer.connectors.checkpoint_connector:_CheckpointConnector.resume_start(self, checkpoint_path, weights_only)",
    "trainer.connectors.signal_connector:_SignalConnector.__init__ uses received_sigterm",
    f"trainer.connectors.signal_connector:_SignalConnector.{HANDLE_SIGTERM}(self, signum)",
    f"trainer.connectors.signal_connector:_SignalConnector.{HANDLE_REQUEUE}(self, signum)",
    "trainer.setup:_init_debugging_flags uses _val_check_time_interval",
    f"callbacks:ModelCheckpoint.{MONITORED[0]}(self, trainer)",
    f"callbacks:EarlyStopping.{MONITORED[1]}(self, trainer)",
    "tuner.lr_finder:_LRCallback.on_train_batch_end(self, trainer, pl_module, outputs)",
    "loggers.logger:DummyLogger.experiment",
    # its loops
    "loops.fit_loop:_FitLoop.__init__ uses _combined_loader",
    "loops.fit_loop:_FitLoop._skip_backward",
    "loops.fit_loop:_FitLoop.setup_data uses _last_val_time",
    "loops.training_epoch_loop:_TrainingEpochLoop.__init__ uses _results, automatic_optimization, val_loop",
    f"loops.training_epoch_loop:_TrainingEpochLoop.{BROADCAST_SIGTERM}(self)",
    "loops.fit_loop:_FitLoop._should_accumulate(self)",
    "loops.training_epoch_loop:_TrainingEpochLoop._should_check_val_fx uses _last_val_time, _val_check_time_interval",
    "loops.evaluation_loop:_EvaluationLoop.__init__ uses _combined_loader, _results",
    "loops.prediction_loop:_PredictionLoop.__init__ uses _combined_loader, _results",
    "loops.prediction_loop:_PredictionLoop.__init__ uses batch_progress, epoch_batch_indices",
    f"loops.prediction_loop:_PredictionLoop.{PREDICT_STEP}(self, batch, batch_idx, dataloader_idx, dataloader_iter)",
    f"loops.prediction_loop:_PredictionLoop.{BATCH_INDICES}(self, dataloader)",
    "loops.optimization.automatic:_AutomaticOptimization.output_result_cls.from_training_step_output",
    "utilities.combined_loader:CombinedLoader.__init__ uses _mode",
    # what self.log records
    f"{_LOGGER}:_LoggerConnector.epoch_end_reached(self)",
    f"{_LOGGER}:_LoggerConnector.on_batch_end(self)",
    f"{_LOGGER}:_LoggerConnector.on_epoch_end(self)",
    f"{_LOGGER}:_LoggerConnector.reset_metrics uses _progress_bar_metrics, _callback_metrics, _logged_metrics",
    f"{_LOGGER}:_LoggerConnector.should_update_logs",
    f"{_RESULT}:_Metadata.is_mean_reduction",
    f"{_RESULT}:_Metadata.sync",
    f"{_RESULT}:_ResultCollection.__init__(self, training)",
    f"{_RESULT}:_ResultCollection._get_cache(result_metric, on_step)",
    f"{_RESULT}:_ResultCollection.log(self, fx, name, value, sync_dist, sync_dist_group, batch_size)",
    f"{_RESULT}:_ResultCollection.metrics uses _get_cache",
    f"{_RESULT}:_ResultCollection.reset(self, metrics, fx)",
    f"{_RESULT}:_ResultCollection.update_metrics(self, key, value, batch_size)",
    f"{_RESULT}:_ResultMetric.__init__ uses _forward_cache, has_reset, is_tensor, meta, cumulated_batch_size",
    f"{_RESULT}:_Sync.rank_zero_only",
    f"{_RESULT}:_Sync.should",
    # the strategy
    "strategies:DDPStrategy.__init__ uses _process_group_backend, _timeout",
    "strategies:DDPStrategy._configure_launcher(self)",
    "strategies:DDPStrategy._setup_model(self, model)",
    "strategies:ParallelStrategy.__init__ uses _layer_sync",
)
"""The contract, as :func:`ddp_callbacks.versions.require_names` reads it, below ``lightning.pytorch``."""

PRIVATE_OF_RESUME = (
    f"trainer.connectors.signal_connector:_SignalConnector.{REGISTER_SIGNALS}(self)",
    "trainer.connectors.checkpoint_connector:_CheckpointConnector.dump_checkpoint(self, weights_only)",
    "trainer.connectors.checkpoint_connector:_CheckpointConnector.__init__ uses _ckpt_path, _loaded_checkpoint",
    "trainer.connectors.checkpoint_connector:_CheckpointConnector.restore_optimizers_and_schedulers(self)",
    "trainer.connectors.checkpoint_connector:_CheckpointConnector.restore_precision_plugin_state(self)",
    "trainer.call:_call_callbacks_load_state_dict(trainer, checkpoint)",
    "trainer.call:_call_callbacks_on_load_checkpoint(trainer, checkpoint)",
    f"loops.training_epoch_loop:_TrainingEpochLoop.{SHOULD_VALIDATE}(self, data_fetcher)",
    "loops.training_epoch_loop:_TrainingEpochLoop.__init__ uses _batches_that_stepped, batch_progress",
    "loops.training_epoch_loop:_TrainingEpochLoop.on_advance_end(self, data_fetcher)",
    "loops.training_epoch_loop:_TrainingEpochLoop.on_run_start(self, data_fetcher)",
    "loops.training_epoch_loop:_TrainingEpochLoop.on_run_start uses is_resuming",
    "loops.loop:_Loop.__init__ uses _restarting, _loaded_from_state_dict, _resuming_from_checkpoint",
    "loops.fit_loop:_FitLoop.run(self)",
    "loops.fit_loop:_FitLoop.run uses on_run_start, on_advance_start, on_advance_end, on_run_end",
    "loops.fit_loop:_FitLoop.__init__ uses _combined_loader_states_to_load, _data_fetcher, epoch_progress",
    "loops.fit_loop:_FitLoop.__init__ uses _last_train_dl_reload_epoch",
    f"loops.evaluation_loop:_EvaluationLoop.{EVALUATION_STEP}(self, batch, batch_idx, dataloader_idx, dataloader_iter)",
    "loops.evaluation_loop:_EvaluationLoop.__init__ uses _last_val_dl_reload_epoch, _seen_batches_per_dataloader",
    "loops.fetchers:_DataFetcher.__init__ uses done, fetched, length",
    "loops.fetchers:_PrefetchDataFetcher.__init__ uses batches",
    "utilities.combined_loader:CombinedLoader.__init__ uses _iterator",
    "utilities.combined_loader:_MaxSizeCycle.__init__ uses _consumed",
    f"utilities.combined_loader:{_MAX_SIZE}.__next__ uses iterators",
    "utilities.combined_loader:_ModeIterator.__init__ uses _idx",
    f"{_LOGGER}:_LoggerConnector.__init__ uses _current_fx, _first_loop_iter",
    f"{_RESULT}:_Metadata.__init__(on_step, on_epoch, reduce_fx, metric_attribute)",
    f"{_RESULT}:_Metadata.__init__(self, fx, name, prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph)",
    f"{_RESULT}:_Metadata.__init__(self, add_dataloader_idx, dataloader_idx, metric_attribute)",
    f"{_RESULT}:_ResultMetric.__init__(self, metadata, is_tensor)",
    f"{_RESULT}:_Sync.__init__(fn, _should, rank_zero_only)",
)
"""The same, of what only the callback ``Resume`` uses."""

PRIVATE_OF_BOTH = (
    "utilities.data:_auto_add_worker_init_fn(dataloader, rank)",
    "utilities.imports:_IS_INTERACTIVE",
    "loggers.csv_logs:CSVLogger.__init__ uses _version",
    "loggers.tensorboard:TensorBoardLogger.__init__ uses _version",
)
"""The same below ``lightning.fabric``, of what Trainers and Fabric use."""

PRIVATE_OF_FABRIC = (
    "fabric:Fabric._requires_distributed_sampler uses distributed_sampler_kwargs",
    "strategies:DDPStrategy.__init__ uses _backward_sync_control, _process_group_backend, _timeout",
    "strategies:DDPStrategy._configure_launcher(self)",
    "strategies:DDPStrategy._set_world_ranks(self)",
    "strategies:DDPStrategy._setup_distributed(self)",
)
"""The same, of what only Fabric's strategy uses."""


def require_lightning(package: str) -> None:
    """Raise :class:`ImportError` if the installed package lacks a private name, naming the versions that have it."""
    _require(package, ROOTS, PRIVATE)
    _require(package, FABRIC, PRIVATE_OF_BOTH)


def require_resume(package: str) -> None:
    """As :func:`require_lightning`, for what only ``Resume`` uses."""
    _require(package, ROOTS, PRIVATE_OF_RESUME)


def require_fabric(package: str) -> None:
    """As :func:`require_lightning`, for what only Fabric's strategy uses."""
    _require(package, FABRIC, PRIVATE_OF_FABRIC)


def _require(package: str, roots: dict[str, str], names: Sequence[str]) -> None:
    require_names(package.replace("_", "-"), [f"{roots[package]}.{name}" for name in names])


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


def silent_logger(package: str) -> Any:
    """A logger that writes nothing, whatever is called; Lightning's Tuner uses it."""
    return importlib.import_module(f"{ROOTS[package]}.loggers.logger").DummyLogger()


def silent_profiler(package: str) -> Any:
    """A profiler that notes nothing."""
    return importlib.import_module(f"{ROOTS[package]}.profilers").PassThroughProfiler()


def own_transfer_hooks(package: str, *owners: Any) -> list[str]:
    """The hooks for the transfer of a batch that these modules and datamodules override."""
    hooks = importlib.import_module(f"{ROOTS[package]}.core.hooks").DataHooks
    names = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    return [name for owner in owners for name in names if getattr(type(owner), name, None) is not vars(hooks)[name]]


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


def trainer_of(module: Any) -> Any:
    """The Trainer that runs a module, or has run it last; ``None`` if none has."""
    return vars(module).get("_trainer")


def is_asked_by_loop(trainer: Any) -> bool:
    """Whether a loop has called ``strategy.batch_to_device``, not a hook of the user's."""
    return bool(trainer.lightning_module._current_fx_name == "batch_to_device")


def before_transfer(module: Any, batch: Any) -> Any:
    """What the module's and the datamodule's ``on_before_batch_transfer`` make of a batch."""
    return module._on_before_batch_transfer(batch)


def torch_optimizer(optimizer: Any) -> Any:
    """The optimizer inside of a ``LightningOptimizer``; any other one itself."""
    return getattr(optimizer, "_optimizer", optimizer)


def compares_losses(callback: Any) -> bool:
    """Whether a callback decides by the losses that ``on_train_batch_end`` gets, as ``SpikeDetection`` does."""
    return not {kind.__name__ for kind in type(callback).__mro__}.isdisjoint(("_LRCallback", "SpikeDetection"))


# --- loops ---------------------------------------------------------------------------------------------------------


def results_of(trainer: Any) -> Any:
    """What ``self.log`` records into: the collection of the loop that runs; ``None`` in predictions, between runs."""
    return trainer._results


def results_of_training(trainer: Any) -> Any:
    """The same of the training loop, whatever runs."""
    return trainer.fit_loop.epoch_loop._results


def results_of_evaluation(trainer: Any) -> Any:
    """The same of the validation in a fit."""
    return trainer.fit_loop.epoch_loop.val_loop._results


def refresh_metrics(trainer: Any, results: Any) -> None:
    """Let the Trainer's ``callback_metrics``, and the others, be what a collection has of the last step."""
    connector, metrics = trainer._logger_connector, results.metrics(True)
    connector._progress_bar_metrics.update(metrics["pbar"])
    connector._callback_metrics.update(metrics["callback"])
    connector._logged_metrics.update(metrics["log"])


def logs_step(trainer: Any) -> bool:
    """Whether the loggers write the values of the training batch that has ended."""
    if not trainer.loggers or (trainer.lightning_module.automatic_optimization and is_accumulating(trainer)):
        return False
    return bool(trainer.fast_dev_run or trainer._logger_connector.should_update_logs)


def follows_step(trainer: Any) -> bool:
    """Whether a scheduler follows a logged value from step to step."""
    return any(config.reduce_on_plateau and config.interval == "step" for config in trainer.lr_scheduler_configs)


def operation_of(metric: Any) -> str:
    """How parts of what is logged under a key become one: ``"mean"``, ``"sum"``, ``"max"``, ``"min"``."""
    return "mean" if metric.meta.is_mean_reduction else str(metric.meta.reduce_fx.__name__)


def replace_results(loop: Any, make: Callable[[bool], Any]) -> None:
    """Give a loop another collection, made of whether the loop trains."""
    loop._results = make(loop._results.training)


def loader_of(loop: Any) -> Any:
    """The ``CombinedLoader`` of a loop; ``None`` before it has set up its data."""
    return loop._combined_loader


def active_loader(trainer: Any) -> Any:
    """The ``CombinedLoader`` of the loop that runs."""
    return trainer._active_loop._combined_loader


def loaders_of_batch(combined: Any, dataloader_idx: int) -> list[Any]:
    """The loaders that a batch of a ``CombinedLoader`` comes from."""
    loaders = list(combined.flattened)
    return loaders[dataloader_idx : dataloader_idx + 1] if combined._mode == "sequential" else loaders


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


# --- going on in the middle of a run ---------------------------------------------------------------------------------

_OF_CONNECTOR = (
    "_progress_bar_metrics",
    "_logged_metrics",
    "_callback_metrics",
    "_current_fx",
    "_first_loop_iter",
)
_OF_EVALUATION = ("_last_val_dl_reload_epoch",)
_OF_CHECKPOINTS = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
"""Of ``ModelCheckpoint``, beside its ``state_dict``."""


def version_of(logger: Any) -> int | str | None:
    """The version that a CSVLogger or TensorBoardLogger has been given, or has taken; ``None`` for none so far."""
    return getattr(logger, "_version", None)


def set_version_of(logger: Any, version: int | str) -> None:
    """Give a logger a version, as its constructor does."""
    logger._version = version


def dump_checkpoint(trainer: Any) -> dict[str, Any]:
    """The Trainer's checkpoint, as ``save_checkpoint`` writes it. All ranks must call it."""
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(False)
    return checkpoint


def set_checkpoint(trainer: Any, checkpoint: dict[str, Any], path: str) -> None:
    """What the Trainer restores its state from, when the run begins."""
    connector = trainer._checkpoint_connector
    connector._ckpt_path, connector._loaded_checkpoint = path, checkpoint


def restore_again(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Restore what hooks may have changed since the run began.

    Callbacks see the checkpoint once more: that of an average of the weights has both in its file, and swaps them.
    """
    connector = trainer._checkpoint_connector
    trainer.strategy.load_model_state_dict(checkpoint, strict=trainer.lightning_module.strict_loading)
    before, connector._loaded_checkpoint = connector._loaded_checkpoint, checkpoint
    connector.restore_precision_plugin_state()
    connector.restore_optimizers_and_schedulers()
    connector._loaded_checkpoint = before
    call = importlib.import_module(f"{ROOTS[trainer.strategy.package]}.trainer.call")
    with _without_information():
        call._call_callbacks_on_load_checkpoint(trainer, dict(checkpoint))
    call._call_callbacks_load_state_dict(trainer, checkpoint)


def trainer_state(trainer: Any) -> dict[str, Any]:
    """Counters, and what loops and loggers know beside Lightning's own checkpoint. For a file."""
    fit_loop, connector = trainer.fit_loop, trainer._logger_connector
    evaluation = fit_loop.epoch_loop.val_loop
    loops = fit_loop.state_dict()
    loops["state_dict"] = {}  # of the loaders
    return {
        "loops": loops,
        "should_stop": bool(trainer.should_stop),
        "reloaded": fit_loop._last_train_dl_reload_epoch,
        "connector": {name: _plain(getattr(connector, name)) for name in _OF_CONNECTOR},
        "evaluation": {name: _plain(getattr(evaluation, name)) for name in _OF_EVALUATION},
        "evaluated": dict(evaluation._seen_batches_per_dataloader),
        "checkpoints": [
            {name: vars(callback)[name] for name in _OF_CHECKPOINTS if name in vars(callback)}
            for callback in trainer.checkpoint_callbacks
        ],
    }


def load_trainer_state(trainer: Any, state: dict[str, Any]) -> None:
    """Inverse of :func:`trainer_state`; the loops don't know that they go on."""
    fit_loop, connector = trainer.fit_loop, trainer._logger_connector
    evaluation = fit_loop.epoch_loop.val_loop
    fit_loop.load_state_dict(state["loops"])
    let_begin(fit_loop)
    trainer.should_stop = state["should_stop"]
    fit_loop._last_train_dl_reload_epoch = state["reloaded"]
    for owner, values in ((connector, state["connector"]), (evaluation, state["evaluation"])):
        for name, value in values.items():
            setattr(owner, name, type(value)(value) if isinstance(value, dict | list) else value)
    evaluation._seen_batches_per_dataloader.clear()
    evaluation._seen_batches_per_dataloader.update(state["evaluated"])
    for callback, values in zip(trainer.checkpoint_callbacks, state["checkpoints"], strict=False):
        vars(callback).update(values)


def let_begin(loop: Any) -> None:
    """A loop, and those inside of it, take no other way than in a run that begins."""
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    for inner in (vars(loop).get("epoch_loop"), vars(loop).get("val_loop")):
        if inner is not None:
            let_begin(inner)


def forget_loaders(trainer: Any, checkpoint: dict[str, Any] | None = None) -> None:
    """Lightning has read states of the loaders, which are not for these; with a checkpoint, it has written them."""
    trainer.fit_loop._combined_loader_states_to_load = []
    if checkpoint is not None:
        checkpoint["loops"]["fit_loop"].get("state_dict", {}).pop("combined_loader", None)


def is_accumulating(trainer: Any) -> bool:
    """Whether the gradients of the last training batch wait for those of the next."""
    return bool(trainer.fit_loop._should_accumulate())


def begin_epoch_again(fit_loop: Any) -> None:
    """The epoch that has begun begins once more, with its hooks; its loaders have begun their passes."""
    for progress in (fit_loop.epoch_progress.current, fit_loop.epoch_progress.total):
        progress.ready -= 1
        progress.started -= 1
    fit_loop._resuming_from_checkpoint = True


def lift_limits(fit_loop: Any) -> Callable[[], None]:
    """Let a fit that is over, or has taken its last step, begin all the same, until what is returned is called."""
    fit_loop.trainer.should_stop = False  # a Timer may have set it
    max_epochs, max_steps = fit_loop.max_epochs, fit_loop.max_steps
    if is_done(fit_loop):
        fit_loop.max_epochs = fit_loop.epoch_loop.max_steps = -1

    def put_back() -> None:
        fit_loop.max_epochs, fit_loop.epoch_loop.max_steps = max_epochs, max_steps

    return put_back


def is_done(fit_loop: Any) -> bool:
    """Whether the fit is over. Lightning says so when it asks itself, and not twice."""
    with _without_information():
        return bool(fit_loop.done)


@contextmanager
def _without_information() -> Iterator[None]:
    """Inside, nothing of the level INFO is logged: Lightning has said it once."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.INFO))
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def silent(loggers: Sequence[Any]) -> Iterator[None]:
    """Inside, loggers get no rows."""
    with Replacements() as replacements:
        for logger in loggers:
            replacements.replace(logger, "log_metrics", lambda *_, **__: None)
        yield


def position_in_training(fit_loop: Any) -> dict[str, Any]:
    """How many batches the epoch has used of those that were fetched, and which of several loaders have ended."""
    fetcher = fit_loop._data_fetcher
    ahead = len(getattr(fetcher, "batches", ()))
    consumed = list(getattr(fit_loop._combined_loader._iterator, "_consumed", ()))
    return {"used": fetcher.fetched - ahead, "ahead": ahead, "consumed": consumed}


def set_position(fetcher: Any, combined: Any, position: dict[str, Any]) -> None:
    """Let a loop's fetcher go on from there; the loaders have begun their passes there."""
    iterator, used = combined._iterator, position["used"]
    if position["consumed"]:
        iterator._consumed = [*position["consumed"]]
    ahead = 0
    if fetcher.length is None and "batches" in vars(fetcher):  # it draws one batch more than it hands out
        fetcher.batches = [(batch, used + n, 0) for n, (batch, *_) in enumerate(fetcher.batches)]
        ahead = len(fetcher.batches)
    iterator._idx = fetcher.fetched = used + ahead
    if fetcher.length is not None:
        fetcher.done = fetcher.fetched >= fetcher.length


def end_loaders(combined: Any, loaders: Sequence[int]) -> None:
    """Where several loaders end one by one (``"max_size"``), let those have ended; elsewhere they have begun again."""
    if type(combined._iterator).__name__ == _MAX_SIZE:
        for index in loaders:
            combined._iterator.iterators[index] = iter(())


def result_states(results: Any, synced: set[str]) -> dict[str, Any]:
    """What Lightning has recorded and accumulated under each key, between two batches. For a file.

    Args:
        synced: Keys that were logged with ``sync_dist=True``, although Lightning was not told so.
    """
    metrics = {key: _result_state(metric, key in synced) for key, metric in results.items()}
    return {"metrics": metrics, "dataloader_idx": results.dataloader_idx}


def load_results(results: Any, state: dict[str, Any], trainer: Any, joint: bool) -> set[str]:
    """Inverse of :func:`result_states`, and what this takes.

    Args:
        joint: Whether Lightning is not to be told of ``sync_dist=True``.
    """
    home, module = importlib.import_module(f"{ROOTS[trainer.strategy.package]}.{_RESULT}"), trainer.lightning_module
    results.clear()
    for key, saved in state["metrics"].items():
        meta = home._Metadata(**saved["meta"])
        meta.sync = home._Sync(
            fn=trainer.strategy.reduce, _should=saved["syncs"] and not joint, rank_zero_only=saved["rank_zero_only"]
        )
        results[key] = metric = home._ResultMetric(meta, saved["is_tensor"])
        for name, value in saved["values"].items():
            setattr(metric, name, value)
        if not saved["is_tensor"] and meta.metric_attribute is not None:
            metric.value = module.get_submodule(meta.metric_attribute)
    results.to(module.device)
    results.batch, results.batch_size, results.dataloader_idx = None, None, state["dataloader_idx"]
    return {key for key, saved in state["metrics"].items() if saved["syncs"]} if joint else set()


_OF_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
_OF_RESULT = ("has_reset", "_forward_cache", "_update_count")
_OF_NUMBER = ("value", "cumulated_batch_size", "_computed")


def _result_state(metric: Any, is_synced: bool) -> dict[str, Any]:
    meta = metric.meta
    names = (*_OF_NUMBER, *_OF_RESULT) if metric.is_tensor else _OF_RESULT
    own = [name for name in names if name in vars(metric)]
    return {
        "meta": {name: getattr(meta, name) for name in (*_OF_META, "dataloader_idx", "metric_attribute")}
        | {"reduce_fx": meta.reduce_fx.__name__},
        "syncs": meta.sync.should or is_synced,
        "rank_zero_only": meta.sync.rank_zero_only,
        "is_tensor": metric.is_tensor,
        "values": {name: getattr(metric, name) for name in own},
    }


def _plain(value: Any) -> Any:
    """A copy of what is a dict or a list."""
    return (
        {key: _plain(item) for key, item in value.items()}
        if isinstance(value, dict)
        else ([_plain(item) for item in value] if isinstance(value, list) else value)
    )
