"""Access to the values that ``self.log`` records in a Trainer, by private names, all listed in :data:`PRIVATE`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from ddp_callbacks.lightning._parts import is_accumulating
from ddp_callbacks.lightning.packages import ROOTS
from ddp_callbacks.replacement import Replacements

_RESULT = "trainer.connectors.logger_connector.result"
_LOGGER = "trainer.connectors.logger_connector.logger_connector"

# The contract, as ddp_callbacks.versions.require_names reads it, below ``lightning.pytorch``.
PRIVATE = (
    "trainer:Trainer._results",
    "loops.training_epoch_loop:_TrainingEpochLoop.__init__ uses _results, automatic_optimization",
    "loops.evaluation_loop:_EvaluationLoop.__init__ uses _results",
    "loops.optimization.automatic:_AutomaticOptimization.output_result_cls.from_training_step_output",
    f"{_LOGGER}:_LoggerConnector.epoch_end_reached(self)",
    f"{_LOGGER}:_LoggerConnector.on_batch_end(self)",
    f"{_LOGGER}:_LoggerConnector.on_epoch_end(self)",
    f"{_LOGGER}:_LoggerConnector.reset_metrics uses _progress_bar_metrics, _callback_metrics, _logged_metrics",
    f"{_LOGGER}:_LoggerConnector.should_update_logs",
    f"{_RESULT}:_Metadata.__init__(on_step, on_epoch, reduce_fx, metric_attribute)",
    f"{_RESULT}:_Metadata.__init__(self, fx, name, prog_bar, logger, enable_graph, add_dataloader_idx, dataloader_idx)",
    f"{_RESULT}:_Metadata.is_mean_reduction",
    f"{_RESULT}:_Metadata.sync",
    f"{_RESULT}:_ResultCollection.__init__(self, training)",
    f"{_RESULT}:_ResultCollection._get_cache(result_metric, on_step)",
    f"{_RESULT}:_ResultCollection._get_cache uses _distributed_is_initialized",
    f"{_RESULT}:_ResultCollection.log(self, fx, name, value, sync_dist, sync_dist_group, batch_size)",
    f"{_RESULT}:_ResultCollection.metrics uses _get_cache",
    f"{_RESULT}:_ResultCollection.reset(self, metrics, fx)",
    f"{_RESULT}:_ResultCollection.update_metrics(self, key, value, batch_size)",
    f"{_RESULT}:_ResultMetric.__init__(self, metadata, is_tensor)",
    f"{_RESULT}:_ResultMetric.__init__ uses _forward_cache, cumulated_batch_size, has_reset, is_tensor, meta",
    f"{_RESULT}:_Sync.__init__(fn, _should, rank_zero_only)",
    f"{_RESULT}:_Sync.rank_zero_only",
    f"{_RESULT}:_Sync.should",
)


def results_class(package: str) -> Any:
    """Return the class of the collection that holds a loop's logged values."""
    return importlib.import_module(f"{ROOTS[package]}.{_RESULT}")._ResultCollection


def silence_advice(package: str, replacements: Replacements) -> None:
    """Let Lightning not advise ``sync_dist=True``, as it does in a group of one process, too."""
    home = importlib.import_module(f"{ROOTS[package]}.{_RESULT}")
    replacements.set(home, "_distributed_is_initialized", lambda: False)


def results_of(trainer: Any) -> Any:
    """Return the running loop's collection, into which ``self.log`` records; ``None`` in predictions, between runs."""
    return trainer._results


def results_of_training(trainer: Any) -> Any:
    """Return the training loop's collection, whichever loop runs."""
    return trainer.fit_loop.epoch_loop._results


def results_of_evaluation(trainer: Any) -> Any:
    """Return the collection of a fit's validation loop."""
    return trainer.fit_loop.epoch_loop.val_loop._results


def put_results_back(trainer: Any) -> None:
    """Give each loop an empty collection of Lightning's own class."""
    for loop in loops_with_results(trainer):
        replace_results(loop, results_class(trainer.strategy.package))


def loops_with_results(trainer: Any) -> Sequence[Any]:
    """Return the loops that have such a collection."""
    epoch_loop = trainer.fit_loop.epoch_loop
    return epoch_loop, epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop


def replace_results(loop: Any, make: Callable[[bool], Any]) -> None:
    """Give a loop another collection: the result of ``make``, called with whether the loop trains."""
    loop._results = make(loop._results.training)


def refresh_metrics(trainer: Any, results: Any) -> None:
    """Update the Trainer's ``callback_metrics``, and its other metrics, with a collection's values of the last step.

    Once per step: a validation after it may have logged the same keys.
    """
    if results.is_shown:
        return
    results.is_shown = True
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
    """Whether a ``ReduceLROnPlateau`` scheduler reads a logged value in every step."""
    return any(config.reduce_on_plateau and config.interval == "step" for config in trainer.lr_scheduler_configs)


def operation_of(metric: Any) -> str:
    """Return how the parts of a logged value are combined: ``"mean"``, ``"sum"``, ``"max"`` or ``"min"``."""
    return "mean" if metric.meta.is_mean_reduction else str(metric.meta.reduce_fx.__name__)


# --- a key, for the other ranks and for a file ----------------------------------------------------------------------


_OF_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")


def result_key(metric: Any, is_synced: bool) -> dict[str, Any]:
    """Return as plain data all that :func:`new_result` needs to make a logged metric.

    Args:
        is_synced: Whether ``sync_dist=True`` was hidden from Lightning.
    """
    meta, reduction = metric.meta, metric.meta.reduce_fx
    home = "builtins" if reduction in (sum, max, min) else "torch"
    return {
        "meta": {name: getattr(meta, name) for name in (*_OF_META, "dataloader_idx", "metric_attribute")},
        "reduce_fx": [home, reduction.__name__],
        "syncs": meta.sync.should or is_synced,
        "rank_zero_only": meta.sync.rank_zero_only,
        "is_tensor": metric.is_tensor,
    }


def new_result(trainer: Any, key: dict[str, Any], joint: bool) -> Any:
    """Return a logged metric without a value, as ``self.log`` makes it on the first call.

    Args:
        joint: Whether to hide ``sync_dist=True`` from Lightning.
    """
    home, module = importlib.import_module(f"{ROOTS[trainer.strategy.package]}.{_RESULT}"), trainer.lightning_module
    package, function = key["reduce_fx"]
    meta = home._Metadata(**key["meta"], reduce_fx=getattr(importlib.import_module(package), function))
    meta.sync = home._Sync(
        fn=trainer.strategy.reduce, _should=key["syncs"] and not joint, rank_zero_only=key["rank_zero_only"]
    )
    metric = home._ResultMetric(meta, key["is_tensor"])
    if not key["is_tensor"] and meta.metric_attribute is not None:
        metric.value = module.get_submodule(meta.metric_attribute)
    return metric.to(module.device)


_OF_RESULT = ("has_reset", "_forward_cache", "_update_count")
_OF_NUMBER = ("value", "cumulated_batch_size", "_computed")


def result_states(results: Any, synced: set[str]) -> dict[str, Any]:
    """Return what Lightning has recorded and accumulated under each key, between two batches, for a file.

    Args:
        synced: Keys that were logged with ``sync_dist=True``, which was hidden from Lightning.
    """
    metrics = {
        key: result_key(metric, key in synced) | {"values": _values_of(metric)} for key, metric in results.items()
    }
    return {"metrics": metrics, "dataloader_idx": results.dataloader_idx}


def load_results(results: Any, state: dict[str, Any], trainer: Any, joint: bool) -> set[str]:
    """Inverse of :func:`result_states`. Return the ``synced`` keys if ``joint``, otherwise an empty set.

    Args:
        joint: Whether to hide ``sync_dist=True`` from Lightning.
    """
    results.clear()
    for key, saved in state["metrics"].items():
        results[key] = new_result(trainer, saved, joint)
        for name, value in saved["values"].items():
            setattr(results[key], name, value)
    results.to(trainer.lightning_module.device)
    results.batch, results.batch_size, results.dataloader_idx = None, None, state["dataloader_idx"]
    return {key for key, saved in state["metrics"].items() if saved["syncs"]} if joint else set()


def _values_of(metric: Any) -> dict[str, Any]:
    names = (*_OF_NUMBER, *_OF_RESULT) if metric.is_tensor else _OF_RESULT
    return {name: getattr(metric, name) for name in names if name in vars(metric)}
