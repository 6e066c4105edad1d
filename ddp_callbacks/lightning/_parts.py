"""Access to private parts of a Trainer and of its package; all names are listed in :data:`PRIVATE`.

Lightning comes as two packages. The functions work with the objects of either, or take the package's name.
"""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from ddp_callbacks._torch import computes_gradient_of
from ddp_callbacks.lightning.packages import FABRIC, ROOTS, require

# Methods and attributes that this library replaces during a run.
BROADCAST_SIGTERM = "_broadcast_sigterm_tensor"  # of the training epoch loop, before each batch
HANDLE_SIGTERM = "_sigterm_notifier_fn"  # of the signal connector
HANDLE_REQUEUE = "_slurm_sigusr_handler_fn"  # of the signal connector
PREPARE_DATA = "prepare_data"  # of the data connector
PREDICT_STEP = "_predict_step"  # of the prediction loop
BATCH_INDICES = "_get_batch_indices"  # of the prediction loop
PREDICT_EPOCH_END = "_on_predict_epoch_end"  # of the prediction loop
RESUME_START = "resume_start"  # of the checkpoint connector
VALIDATION_INTERVAL = "_val_check_time_interval"  # of the Trainer, in seconds
MONITORED = ("_monitor_candidates", "_run_early_stopping_check")  # where ModelCheckpoint and EarlyStopping read

# The contract, as ddp_callbacks.versions.require_names reads it, below ``lightning.pytorch``.
PRIVATE = (
    "core.module:LightningModule.__init__ uses _current_fx_name",
    "core.module:LightningModule._on_before_batch_transfer(self, batch)",
    "core.optimizer:LightningOptimizer.__init__ uses _optimizer",
    # the Trainer
    "trainer:Trainer.__init__ uses _accelerator_connector, _checkpoint_connector, _data_connector",
    "trainer:Trainer.__init__ uses _logger_connector, _signal_connector",
    "trainer:Trainer._active_loop",
    "trainer:Trainer._teardown(self)",
    "trainer.connectors.accelerator_connector:_AcceleratorConnector.__init__ uses use_distributed_sampler",
    "trainer.connectors.accelerator_connector:_AcceleratorConnector._lazy_init_strategy uses _layer_sync",
    "trainer.connectors.accelerator_connector:_AcceleratorConnector._lazy_init_strategy uses _configure_launcher",
    f"trainer.connectors.data_connector:_DataConnector.{PREPARE_DATA}(self)",
    f"trainer.connectors.checkpoint_connector:_CheckpointConnector.{RESUME_START}(self, checkpoint_path, weights_only)",
    "trainer.connectors.signal_connector:_SignalConnector.__init__ uses received_sigterm",
    f"trainer.connectors.signal_connector:_SignalConnector.{HANDLE_SIGTERM}(self, signum)",
    f"callbacks:ModelCheckpoint.{MONITORED[0]}(self, trainer)",
    f"callbacks:EarlyStopping.{MONITORED[1]}(self, trainer)",
    # its loops
    "loops.fit_loop:_FitLoop.__init__ uses _combined_loader",
    "loops.fit_loop:_FitLoop._skip_backward",
    "loops.fit_loop:_FitLoop.on_run_start(self)",
    "loops.fit_loop:_FitLoop._should_accumulate(self)",
    f"loops.training_epoch_loop:_TrainingEpochLoop.{BROADCAST_SIGTERM}(self)",
    "loops.training_epoch_loop:_TrainingEpochLoop._should_check_val_fx uses _last_val_time, _val_check_time_interval",
    "loops.evaluation_loop:_EvaluationLoop.__init__ uses _combined_loader",
    "loops.evaluation_loop:_EvaluationLoop.on_run_start(self)",
    "utilities.combined_loader:CombinedLoader.__init__ uses _mode, _flattened",
    "utilities.data:_extract_batch_size(batch)",
    # the strategy
    "strategies:DDPStrategy.__init__ uses _process_group_backend, _timeout",
    "strategies:DDPStrategy._configure_launcher(self)",
    "strategies:DDPStrategy._setup_model(self, model)",
    "strategies:ParallelStrategy.__init__ uses _layer_sync",
)

# The same for what some programs use, checked when they do.
PRIVATE_OF_PREDICTIONS = (
    "loops.prediction_loop:_PredictionLoop.__init__ uses _combined_loader",
    f"loops.prediction_loop:_PredictionLoop.{PREDICT_STEP}(self, batch, batch_idx, dataloader_idx, dataloader_iter)",
    f"loops.prediction_loop:_PredictionLoop.{BATCH_INDICES}(self, dataloader)",
    f"loops.prediction_loop:_PredictionLoop.{PREDICT_EPOCH_END}(self)",
)
PRIVATE_OF_REQUEUES = (f"trainer.connectors.signal_connector:_SignalConnector.{HANDLE_REQUEUE}(self, signum)",)
PRIVATE_OF_TUNER = ("tuner.lr_finder:_LRCallback.on_train_batch_end(self, trainer, pl_module, outputs)",)

# The same below ``lightning.fabric``, for names that both Trainers and Fabric use.
PRIVATE_OF_BOTH = ("utilities.data:_auto_add_worker_init_fn(dataloader, rank)",)

# The same for names that only Fabric's strategy uses.
PRIVATE_OF_FABRIC = (
    "fabric:Fabric._requires_distributed_sampler uses distributed_sampler_kwargs",
    "strategies:DDPStrategy.__init__ uses _backward_sync_control, _process_group_backend, _timeout",
    "strategies:DDPStrategy._configure_launcher(self)",
    "strategies:DDPStrategy._set_world_ranks(self)",
    "strategies:DDPStrategy._setup_distributed(self)",
    "wrappers:_FabricModule._register_backward_hook(self, tensor)",
    "wrappers:_backward_hook(requires_backward)",
    "wrappers:_in_fabric_backward",
)


# --- the package ---------------------------------------------------------------------------------------------------


def seed_workers(package: str, loader: object, rank: int) -> None:
    """Seed a loader's workers by the rank, if the program has called ``seed_everything(workers=True)``."""
    importlib.import_module(f"{FABRIC[package]}.utilities.data")._auto_add_worker_init_fn(loader, rank)


def allow_gradients_of_inputs(package: str) -> None:
    """Let ``torch.autograd.grad`` compute gradients of a model's inputs, where Fabric asks for ``fabric.backward``."""
    wrappers = importlib.import_module(f"{FABRIC[package]}.wrappers")
    asks = wrappers._FabricModule._register_backward_hook
    if hasattr(asks, "__wrapped__"):
        return

    def hook(module: Any, _: Any) -> None:
        if not wrappers._in_fabric_backward and computes_gradient_of(module.parameters()):
            wrappers._backward_hook(True)

    @functools.wraps(asks)
    def register(module: Any, tensor: Any) -> Any:
        if tensor.requires_grad:
            tensor.register_hook(functools.partial(hook, module))
        return tensor

    wrappers._FabricModule._register_backward_hook = register


def silent_logger(package: str) -> Any:
    """Return a logger that writes nothing, whichever method you call; Lightning's Tuner uses it."""
    return importlib.import_module(f"{ROOTS[package]}.loggers.logger").DummyLogger()


def silent_profiler(package: str) -> Any:
    """Return a profiler that records nothing."""
    return importlib.import_module(f"{ROOTS[package]}.profilers").PassThroughProfiler()


def size_taken(package: str, batch: Any) -> int | None:
    """Return what Lightning takes for the number of samples in a batch: the first size that it finds."""
    sizes = importlib.import_module(f"{ROOTS[package]}.utilities.data")._extract_batch_size(batch)
    return next((size for size in sizes if size is not None), None)


TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def own_transfer_hooks(trainer: Any) -> dict[str, Any]:
    """Return, by name, the module or the datamodule that overrides a batch transfer hook and is asked for it."""
    owners = [owner for owner in (trainer.lightning_module, trainer.datamodule) if owner is not None]
    hooks = vars(importlib.import_module(f"{ROOTS[trainer.strategy.package]}.core.hooks").DataHooks)
    return {n: owner for owner in owners for n in TRANSFER_HOOKS if getattr(type(owner), n, None) is not hooks[n]}


def own_batch_hooks(*owners: Any) -> Iterator[tuple[Any, str]]:
    """Yield the hooks of batches that these modules and callbacks override, without Lightning's classes and ours."""
    for owner, stage, moment in itertools.product(owners, ("train", "validation", "test"), ("start", "end")):
        name = f"on_{stage}_batch_{moment}"
        if getattr(owner, name).__module__.partition(".")[0] not in (*ROOTS, "ddp_callbacks"):
            yield owner, name


# --- the Trainer's parts -------------------------------------------------------------------------------------------


def connector(trainer: Any, kind: Literal["accelerator", "checkpoint", "data", "logger", "signal"]) -> Any:
    """Return one of the Trainer's connectors.

    ``"accelerator"`` knows ``use_distributed_sampler``, ``"checkpoint"`` restores the Trainer's state, ``"data"`` calls
    ``prepare_data``, ``"logger"`` is called at the end of batches and epochs, ``"signal"`` handles SIGTERM and Slurm's
    warning.
    """
    return getattr(trainer, f"_{kind}_connector")


def requeues(trainer: Any) -> bool:
    """Whether Lightning requeues the job at Slurm's warning."""
    return bool(getattr(trainer._accelerator_connector.cluster_environment, "auto_requeue", False))


def requeue(trainer: Any, number: int) -> None:
    """Do what Lightning does at Slurm's warning, signal ``number``: save a checkpoint and requeue the job."""
    handler = connector(trainer, "signal")
    type(handler)._slurm_sigusr_handler_fn(handler, number, None)


def is_asked_by_loop(trainer: Any) -> bool:
    """Whether a loop has called ``strategy.batch_to_device``, not a hook of the user's."""
    return bool(trainer.lightning_module._current_fx_name == "batch_to_device")


def torch_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside a ``LightningOptimizer``; any other optimizer unchanged."""
    return getattr(optimizer, "_optimizer", optimizer)


def is_lightnings_callback(package: str, callback: Any) -> bool:
    """Whether a callback's class is Lightning's own, or derived from one; no progress bar, which continues."""
    callbacks = importlib.import_module(f"{ROOTS[package]}.callbacks")
    kinds = (kind for kind in type(callback).__mro__ if kind.__module__.startswith(f"{ROOTS[package]}."))
    return next(kinds, callbacks.Callback) is not callbacks.Callback and not isinstance(callback, callbacks.ProgressBar)


def loss_in(output: Any) -> Any:
    """Return the loss in what ``training_step`` returns; ``None`` if there is none."""
    return output.get("loss") if isinstance(output, Mapping) else output


def compares_losses(callback: Any) -> bool:
    """Whether a callback decides by the losses that ``on_train_batch_end`` gets, as ``SpikeDetection`` does."""
    if ".tuner." in (home := type(callback).__module__):
        require(home.partition(".")[0], PRIVATE_OF_TUNER)
    return not {kind.__name__ for kind in type(callback).__mro__}.isdisjoint(("_LRCallback", "SpikeDetection"))


# --- loops ---------------------------------------------------------------------------------------------------------


def loader_of(loop: Any) -> Any:
    """Return the ``CombinedLoader`` of a loop; ``None`` before the loop has set up its data."""
    return loop._combined_loader


def mode_of(combined: Any) -> str:
    """Return how a ``CombinedLoader`` combines the batches of its loaders."""
    return str(combined._mode)


def combined_batch(loop: Any, batches: list[Any]) -> Any:
    """Return one batch of each loader of a loop as a step gets them."""
    combined = copy.copy(loop._combined_loader)
    combined.flattened = batches
    return combined.iterables


def show(combined: Any, loaders: list[Any]) -> None:
    """Let the Trainer show these loaders to its user, while its loops draw from those that they have."""
    drawn_from, combined.flattened = combined.flattened, loaders
    combined._flattened = drawn_from


def active_loop(trainer: Any) -> Any:
    """Return the running loop."""
    return trainer._active_loop


def loaders_of(loop: Any) -> list[Any]:
    """Return the loaders of a loop; none before the loop has set up its data."""
    return [] if loop._combined_loader is None else list(loop._combined_loader.flattened)


def loaders_of_batch(loop: Any, dataloader_idx: int) -> list[Any]:
    """Return the loaders that a batch of a loop comes from."""
    is_sequential = mode_of(loop._combined_loader) == "sequential"
    return loaders_of(loop)[dataloader_idx : dataloader_idx + 1] if is_sequential else loaders_of(loop)


def skips_backward(trainer: Any) -> bool:
    """Whether the fit runs without backward and steps, as for updating the BatchNorm statistics of averaged weights."""
    return bool(trainer.fit_loop._skip_backward)


def is_accumulating(trainer: Any) -> bool:
    """Whether the gradients of the last training batch wait for those of the next."""
    return bool(trainer.fit_loop._should_accumulate())


def tear_down(trainer: Any) -> None:
    """Let a Trainer forget a run, as it does after an exception, without its hooks."""
    trainer._teardown()


def validation_interval(trainer: Any) -> Any:
    """Return the seconds between validations, if time decides when to validate; otherwise ``None``."""
    return getattr(trainer, VALIDATION_INTERVAL)


def last_validation(trainer: Any) -> Any:
    """Return the time of the last validation, or of the start, by ``time.monotonic()``. Only if time decides."""
    return trainer._last_val_time


def set_last_validation(trainer: Any, time: float) -> None:
    """Set the time of the last validation. Minus infinity lets Lightning validate after the next batch."""
    trainer._last_val_time = time
