"""What this library uses of Torchbearer except its public names: each in one function, all listed in :data:`PRIVATE`.

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
from torchbearer.metrics import EpochLambda, Mean, Metric, MetricTree, RunningMean, Var

from ddp_callbacks.versions import require_names

_SUMS = ("_sum", "_sum_sq", "_count")  # of Mean, Var and Std; Mean lacks the second
_ROWS = ("_y_pred", "_y_true")  # of EpochLambda

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


def loss_of(state: Any, batch: Any) -> torch.Tensor:
    """The loss of a batch, computed as Torchbearer's closure does; predictions and loss are in ``state`` afterwards."""
    state[torchbearer.ITERATOR] = iter([batch])
    state[torchbearer.SAMPLER](state)
    bases._forward_with_exceptions(torchbearer.X, torchbearer.MODEL, torchbearer.Y_PRED, state)
    criterion = state[torchbearer.CRITERION]
    try:
        loss = criterion(state)
    except TypeError:
        both = state[torchbearer.Y_PRED], state[torchbearer.Y_TRUE]
        loss = criterion(*(argument for value in both for argument in bases._get_param_list(value)))
    state[torchbearer.LOSS] = loss
    return loss  # type: ignore[no-any-return]


def has_own_closure(trial: Any) -> bool:
    """Whether the step is not Torchbearer's own, but a closure of the user's (``with_closure``)."""
    module: str = getattr(trial.closure, "__module__", "")
    return module != "torchbearer.bases"


# --- metrics ------------------------------------------------------------------------------------------------------


def held(aggregator: Metric) -> dict[str, Any]:
    """What a ``Mean``, a ``Var`` or an ``EpochLambda`` has added up or collected so far, by attribute."""
    names = (*_SUMS, *_ROWS) if isinstance(aggregator, Mean | Var | EpochLambda) else ()
    return {name: vars(aggregator)[name] for name in names if name in vars(aggregator)}


def add_up(aggregator: Metric, of_ranks: Sequence[dict[str, Any]]) -> None:
    """Give a ``Mean`` or ``Var`` the total of what ranks have added up: of their :func:`held`, or all attributes."""
    for name in _SUMS:
        if name in vars(aggregator):
            setattr(aggregator, name, sum(own[name] for own in of_ranks))


def rows_of(of_ranks: Sequence[dict[str, Any]]) -> list[list[torch.Tensor | None]]:
    """The predictions, and the targets, that an ``EpochLambda`` has collected on each rank."""
    return [[own[name] for own in of_ranks] for name in _ROWS]


def set_rows(aggregator: EpochLambda, predictions: torch.Tensor | None, targets: torch.Tensor | None) -> None:
    """Let an ``EpochLambda`` compute the value of the epoch from these rows."""
    aggregator._y_pred, aggregator._y_true = predictions, targets


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
    """What a ``RunningMean`` holds now; to continue from it, give it to :func:`run_on`."""
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
    """Continue a ``RunningMean`` from ``window`` with the means of these batches of the pass; return its value then.

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


def metrics_within(
    metric: Metric, root: Metric | None = None, seen: set[int] | None = None
) -> Iterator[tuple[Metric, Metric]]:
    """A metric and all that it holds, with the root of the tree of each: of a list, of a tree, or inside a wrapper.

    Each is there once, in a fixed order.
    """
    seen = set() if seen is None else seen
    if id(metric) not in seen:
        seen.add(id(metric))
        top = metric.root if root is None and isinstance(metric, MetricTree) else root
        yield metric, metric if top is None else top
        for inner in _held_by(metric):
            yield from metrics_within(inner, top, seen)


def aggregators(metric: Metric) -> list[tuple[Metric, Metric]]:
    """The metrics that hold no others, each with the root of its tree."""
    return [(found, root) for found, root in metrics_within(metric) if not any(True for _ in _held_by(found))]


def _held_by(metric: Metric) -> Iterator[Metric]:
    for value in vars(metric).values():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Metric) and not isinstance(item, torchbearer.state.StateKey):
                yield item


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
