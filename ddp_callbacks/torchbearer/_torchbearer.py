"""What this library uses of Torchbearer beside its public names: each in one function, all listed in :data:`PRIVATE`.

Importing this raises :class:`ImportError` if the installed Torchbearer lacks one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torchbearer
from torchbearer import bases
from torchbearer.callbacks import Callback, Tqdm, checkpointers
from torchbearer.callbacks.torch_scheduler import TorchScheduler
from torchbearer.metrics import EpochLambda, Metric, RunningMean

from ddp_callbacks.versions import require_names

_SUMS = ("_sum", "_sum_sq", "_count")  # of Mean, Var and Std; Mean lacks the second

PRIVATE = (
    "torchbearer.bases:_forward_with_exceptions(x, model, y_pred, state)",
    "torchbearer.bases:_get_param_list(param)",
    "torchbearer.callbacks.checkpointers:_Checkpointer.save_checkpoint(self, model_state, overwrite_most_recent)",
    "torchbearer.callbacks.checkpointers:_Checkpointer.__init__ uses fileformat, most_recent, save_model_params_only",
    "torchbearer.callbacks.checkpointers:_Checkpointer.__init__ uses pickle_module, pickle_protocol",
    "torchbearer.callbacks.printer:Tqdm._on_start uses _loader",
    "torchbearer.callbacks.printer:Tqdm.on_start_training uses _on_epoch",
    "torchbearer.callbacks.torch_scheduler:TorchScheduler.on_start uses _scheduler",
    "torchbearer.metrics:EpochLambda.__init__ uses _step, _final",
    "torchbearer.metrics:EpochLambda.process_train uses _y_pred, _y_true",
    "torchbearer.metrics:Mean.process uses _sum, _count",
    "torchbearer.metrics:RunningMean._process_train(self, args)",
    "torchbearer.metrics.aggregators:RunningMetric.process_train uses _process_train, _cache, _i, _result",
    "torchbearer.metrics.aggregators:RunningMetric.process_train uses _batch_size, _step_size",
    "torchbearer.metrics:Var.process uses _sum, _sum_sq, _count",
    "torchbearer.trial:Trial._fit_pass(self, state)",
    "torchbearer.trial:Trial.run uses _fit_pass",
)
"""The contract, as :func:`ddp_callbacks.versions.require_names` reads it."""

require_names("torchbearer", PRIVATE)


Checkpointer = checkpointers._Checkpointer
"""The base class of the callbacks that write checkpoints."""


# --- the step -----------------------------------------------------------------------------------------------------


def forward(state: Any) -> None:
    """Call the model in ``state`` as Torchbearer's closure does: with the state if it takes it, else without."""
    bases._forward_with_exceptions(torchbearer.X, torchbearer.MODEL, torchbearer.Y_PRED, state)


def has_own_closure(trial: Any) -> bool:
    """Whether the step is not Torchbearer's own, but a closure of the user's (``with_closure``)."""
    module: str = getattr(trial.closure, "__module__", "")
    return module != "torchbearer.bases"


def arguments_of(value: Any) -> list[Any]:
    """The arguments that a prediction or a target makes for a criterion: a list or a tuple is several."""
    arguments: list[Any] = bases._get_param_list(value)
    return arguments


# --- metrics ------------------------------------------------------------------------------------------------------


def sums_of(aggregator: Metric) -> dict[str, Any]:
    """What a ``Mean`` or ``Var`` has added up so far."""
    return {name: getattr(aggregator, name, None) for name in _SUMS}


def add_up(aggregator: Metric, sums: Sequence[dict[str, Any]]) -> None:
    """Give a ``Mean`` or ``Var`` the total of what several have added up."""
    for name in _SUMS:
        if hasattr(aggregator, name):
            setattr(aggregator, name, sum(own[name] for own in sums))


def rows_of(aggregator: EpochLambda) -> list[torch.Tensor | None]:
    """The predictions and the targets that an ``EpochLambda`` has collected; ``None`` before the first batch."""
    return [aggregator._y_pred, aggregator._y_true]


def set_rows(aggregator: EpochLambda, predictions: torch.Tensor | None, targets: torch.Tensor | None) -> None:
    """Let an ``EpochLambda`` compute the value of the epoch from these rows."""
    aggregator._y_pred, aggregator._y_true = predictions, targets


def rows_in(attributes: dict[str, Any]) -> list[torch.Tensor | None]:
    """:func:`rows_of`, from its attributes."""
    return [attributes["_y_pred"], attributes["_y_true"]]


@contextmanager
def without_running(aggregator: EpochLambda) -> Iterator[None]:
    """Have NaN for the running value of an ``EpochLambda`` inside, if it has one."""
    step = aggregator._step
    if step is aggregator._final:
        aggregator._step = lambda *_: math.nan
    try:
        yield
    finally:
        aggregator._step = step


WINDOW = ("_cache", "_i", "_result")
"""What a ``RunningMean`` holds: the values of the last batches, the number of batches of the pass, and its value."""


def window_of(aggregator: RunningMean) -> dict[str, Any]:
    """What a ``RunningMean`` holds now; to go on from it, give it to :func:`run_on`."""
    return {name: copy.copy(getattr(aggregator, name)) for name in WINDOW}


@contextmanager
def watching(aggregator: RunningMean, note: Callable[[torch.Tensor, torch.Tensor], None]) -> Iterator[None]:
    """Call ``note`` with the input and the mean of each batch inside."""

    def mean_of(batch: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = type(aggregator)._process_train(aggregator, batch)
        note(batch, mean)
        return mean

    aggregator._process_train = mean_of
    try:
        yield
    finally:
        del aggregator._process_train


def run_on(aggregator: RunningMean, window: dict[str, Any], steps: Sequence[int], means: Sequence[torch.Tensor]) -> Any:
    """Let a ``RunningMean`` go on from ``window`` with the means of these batches of the pass; return its value then.

    Means before the last :func:`batches_in_window` make no difference.
    """
    vars(aggregator).update({name: copy.copy(value) for name, value in window.items()})
    for step, mean in zip(steps, means, strict=True):
        aggregator._i = step
        aggregator.process_train(mean)
    return aggregator._result


def batches_in_window(aggregator: RunningMean) -> int:
    """How many of the last batches the value of a ``RunningMean`` may depend on."""
    return int(aggregator._batch_size + aggregator._step_size)


def metrics_within(metric: Metric) -> Iterator[Metric]:
    """A metric and all that it holds: those of a list, of a tree, or inside a wrapper; each once, in a fixed order."""
    seen: set[int] = set()
    waiting = [metric]
    while waiting:
        found = waiting.pop()
        if id(found) not in seen:
            seen.add(id(found))
            yield found
            for value in vars(found).values():
                waiting.extend(item for item in (value if isinstance(value, list) else [value]) if _is_metric(item))


def _is_metric(value: object) -> bool:
    return isinstance(value, Metric) and not isinstance(value, torchbearer.state.StateKey)


# --- callbacks ----------------------------------------------------------------------------------------------------


def scheduler_of(callback: TorchScheduler) -> Any:
    """torch's scheduler inside of Torchbearer's; ``None`` before the start of the run."""
    return callback._scheduler


def advance_bar(callback: Callback | None, batches: int) -> None:
    """Let a progress bar of batches show that some of them are done already."""
    if isinstance(callback, Tqdm) and not callback._on_epoch and callback._loader is not None:
        callback._loader.update(batches)


# --- the loop -----------------------------------------------------------------------------------------------------


def replace_training_pass(trial: Any, replacement: Callable[[Any], Any]) -> None:
    """Let the next training pass of ``run`` be a call of ``replacement`` with the state, which it returns."""

    def once(state: Any) -> Any:
        del trial._fit_pass
        return replacement(state)

    trial._fit_pass = once
