"""Read and set the progress of a fit, for the callback ``Resume``. :data:`PRIVATE` lists all private names."""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ddp_callbacks.lightning.packages import ROOTS

_LOGGER = "trainer.connectors.logger_connector.logger_connector"

REGISTER_SIGNALS = "register_signal_handlers"  # of the signal connector
EVALUATION_STEP = "_evaluation_step"  # of an evaluation loop
SHOULD_VALIDATE = "_should_check_val_fx"  # of the training epoch loop
_MAX_SIZE = "_MaxSize"  # an iterator over several loaders

# The contract, as ddp_callbacks.versions.require_names reads it, below ``lightning.pytorch``.
PRIVATE = (
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
    "loops.fit_loop:_FitLoop.__init__ uses _data_fetcher, epoch_progress",
    "loops.fit_loop:_FitLoop.__init__ uses _last_train_dl_reload_epoch",
    "loops.fit_loop:_FitLoop._can_stop_early",
    f"loops.evaluation_loop:_EvaluationLoop.{EVALUATION_STEP}(self, batch, batch_idx, dataloader_idx, dataloader_iter)",
    "loops.evaluation_loop:_EvaluationLoop.__init__ uses _last_val_dl_reload_epoch, _seen_batches_per_dataloader",
    "loops.evaluation_loop:_EvaluationLoop.setup_data uses _combined_loader, _should_reload_val_dl",
    "loops.fetchers:_DataFetcher.__init__ uses done, fetched, length",
    "loops.fetchers:_PrefetchDataFetcher.__init__ uses batches",
    "utilities.combined_loader:CombinedLoader.__init__ uses _iterator",
    "utilities.combined_loader:_MaxSizeCycle.__init__ uses _consumed",
    f"utilities.combined_loader:{_MAX_SIZE}.__next__ uses iterators",
    "utilities.combined_loader:_ModeIterator.__init__ uses _idx",
    f"{_LOGGER}:_LoggerConnector.__init__ uses _current_fx, _first_loop_iter",
)

# The same below ``lightning.fabric``.
PRIVATE_OF_LOGGERS = (
    "loggers.csv_logs:CSVLogger.__init__ uses _version",
    "loggers.tensorboard:TensorBoardLogger.__init__ uses _version",
)

_OF_CONNECTOR = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics", "_current_fx", "_first_loop_iter")
_OF_CHECKPOINTS = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")


def version_of(logger: Any) -> int | str | None:
    """Return the version that a CSVLogger or TensorBoardLogger was given, or chose; ``None`` if it has none yet."""
    return getattr(logger, "_version", None)


def set_version_of(logger: Any, version: int | str) -> None:
    """Give a logger a version, as its constructor does."""
    logger._version = version


def dump_checkpoint(trainer: Any) -> Any:
    """Return the Trainer's checkpoint, as ``save_checkpoint`` writes it. All ranks must call it."""
    return trainer._checkpoint_connector.dump_checkpoint(False)


def set_checkpoint(trainer: Any, checkpoint: dict[str, Any], path: str) -> None:
    """Set the checkpoint from which the Trainer restores its state when the run begins."""
    connector = trainer._checkpoint_connector
    connector._ckpt_path, connector._loaded_checkpoint = path, checkpoint


def restore_again(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Restore what hooks may have changed since the run began.

    Callbacks load the checkpoint once more. One that averages weights needs this: its checkpoint holds both the current
    and the averaged weights, and it swaps them.
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


def _owners(trainer: Any) -> list[tuple[Any, tuple[str, ...]]]:
    """Return the objects with attributes that Lightning's checkpoint lacks, and the names of these attributes."""
    fit_loop = trainer.fit_loop
    return [
        (trainer, ("should_stop",)),
        (trainer._logger_connector, _OF_CONNECTOR),
        (fit_loop, ("_last_train_dl_reload_epoch",)),
        (fit_loop.epoch_loop.val_loop, ("_last_val_dl_reload_epoch",)),
        *((callback, _OF_CHECKPOINTS) for callback in trainer.checkpoint_callbacks),
    ]


def trainer_state(trainer: Any) -> dict[str, Any]:
    """Return the loops' counters, and attributes of the Trainer that Lightning's checkpoint lacks, for a file."""
    fit_loop = trainer.fit_loop
    return {
        "loops": fit_loop.state_dict(),
        "evaluated": dict(fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader),
        "attributes": [
            {name: copy.copy(vars(owner)[name]) for name in names if name in vars(owner)}
            for owner, names in _owners(trainer)
        ],
    }


def load_trainer_state(trainer: Any, state: dict[str, Any]) -> None:
    """Inverse of :func:`trainer_state`. The loops then run as in a new fit, not as in a restarted one."""
    trainer.fit_loop.load_state_dict(state["loops"])
    let_begin(trainer.fit_loop)
    seen = trainer.fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader
    seen.clear()
    seen.update(state["evaluated"])
    for (owner, _), values in zip(_owners(trainer), state["attributes"], strict=False):
        vars(owner).update(values)


def let_begin(loop: Any) -> None:
    """Let a loop, and the loops inside it, run as in a new fit, not as in a restarted one."""
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    for inner in (vars(loop).get("epoch_loop"), vars(loop).get("val_loop")):
        if inner is not None:
            let_begin(inner)


def begin_epoch_again(fit_loop: Any) -> None:
    """Let the epoch that was cut begin once more, with its hooks. Its loaders have begun their passes already."""
    for progress in (fit_loop.epoch_progress.current, fit_loop.epoch_progress.total):
        progress.ready -= 1
        progress.started -= 1
    fit_loop._resuming_from_checkpoint = True


def lift_limits(fit_loop: Any) -> Callable[[], None]:
    """Let a fit begin even if it is over, or has taken its last step. Call the result to restore the limits."""
    fit_loop.trainer.should_stop = False  # a Timer may have set it
    max_epochs, max_steps = fit_loop.max_epochs, fit_loop.max_steps
    if is_done(fit_loop):
        fit_loop.max_epochs = fit_loop.epoch_loop.max_steps = -1

    def put_back() -> None:
        fit_loop.max_epochs, fit_loop.epoch_loop.max_steps = max_epochs, max_steps

    return put_back


def is_done(fit_loop: Any) -> bool:
    """Whether the fit is over. Suppresses Lightning's message, which its own check logs."""
    with _without_information():
        return bool(fit_loop.done)


@contextmanager
def with_more_time(trainer: Any) -> Iterator[bool]:
    """Inside, a fit whose time is over by a ``Timer`` (``max_time``) does not stop for it. Yield whether it is over.

    Process 0's clock counts. A collective if the fit stops.
    """
    is_over = trainer.should_stop and trainer.fit_loop._can_stop_early
    if is_over:
        kind = importlib.import_module(f"{ROOTS[trainer.strategy.package]}.callbacks").Timer
        remaining = [each.time_remaining() for each in trainer.callbacks if isinstance(each, kind)]
        is_over = bool(trainer.strategy.broadcast(any(left is not None and left <= 0 for left in remaining)))
    trainer.should_stop = trainer.should_stop and not is_over
    try:
        yield is_over
    finally:
        trainer.should_stop = trainer.should_stop or is_over


@contextmanager
def _without_information() -> Iterator[None]:
    """Suppress log messages of level INFO and below, which Lightning would repeat."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.INFO))
    try:
        yield
    finally:
        logging.disable(before)


def keep_count(val_loop: Any, set_up: Callable[[], None]) -> None:
    """Set up the loaders of the validations of a fit that goes on, whose batches are counted on."""
    seen = {} if val_loop._should_reload_val_dl else dict(val_loop._seen_batches_per_dataloader)
    set_up()
    val_loop._seen_batches_per_dataloader.update(seen)


def position_in_training(fit_loop: Any) -> dict[str, Any]:
    """Return how many of the fetched batches the epoch has used, and which of several loaders have ended."""
    fetcher = fit_loop._data_fetcher
    ahead = len(getattr(fetcher, "batches", ()))
    consumed = list(getattr(fit_loop._combined_loader._iterator, "_consumed", ()))
    return {"used": fetcher.fetched - ahead, "ahead": ahead, "consumed": consumed}


def set_position(fetcher: Any, combined: Any, position: dict[str, Any]) -> None:
    """Let a loop's fetcher continue from ``position``, where the loaders' passes have begun already."""
    iterator, used = combined._iterator, position["used"]
    if position["consumed"]:
        iterator._consumed = [*position["consumed"]]
    ahead = 0
    if fetcher.length is None and "batches" in vars(fetcher):  # it draws one batch ahead
        fetcher.batches = [(batch, used + n, 0) for n, (batch, *_) in enumerate(fetcher.batches)]
        ahead = len(fetcher.batches)
    iterator._idx = fetcher.fetched = used + ahead
    if fetcher.length is not None:
        fetcher.done = fetcher.fetched >= fetcher.length


def end_loaders(combined: Any, loaders: Sequence[int]) -> None:
    """Mark loaders as ended, if they end one by one (mode ``"max_size"``). In other modes they have begun again."""
    if type(combined._iterator).__name__ == _MAX_SIZE:
        for index in loaders:
            combined._iterator.iterators[index] = iter(())
