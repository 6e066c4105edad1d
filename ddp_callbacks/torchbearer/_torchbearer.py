"""All uses of Torchbearer's private names, each in one function; :data:`PRIVATE` lists them.

Importing this raises :class:`ImportError` if the installed Torchbearer lacks one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torchbearer
from torchbearer import bases
from torchbearer.callbacks import Callback, Tqdm, checkpointers
from torchbearer.callbacks.torch_scheduler import TorchScheduler
from torchbearer.metrics import EpochLambda, Mean, Metric, MetricTree, RunningMean, Var

from ddp_callbacks.data.batch_logs import BatchLog, interleave_rows
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.versions import require_names

_SUMS = ("_sum", "_sum_sq", "_count")  # in Mean, Var and Std; Mean lacks the second
_ROWS = ("_y_pred", "_y_true")  # in EpochLambda
_KEYS = ("Y_PRED", "Y_TRUE")  # of the state, where they come from
_WINDOW = ("_cache", "_i", "_result")  # in RunningMean: the last batches' values, a count of batches, the mean

PRIVATE = (
    "torchbearer.bases:_forward_with_exceptions(x, model, y_pred, state)",
    "torchbearer.bases:_get_param_list(param)",
    "torchbearer.callbacks.checkpointers:_Checkpointer.save_checkpoint(self, model_state, overwrite_most_recent)",
    "torchbearer.callbacks.printer:Tqdm._on_start uses _loader",
    "torchbearer.callbacks.printer:Tqdm.on_start_training uses _on_epoch",
    "torchbearer.callbacks.torch_scheduler:TorchScheduler.on_start uses _scheduler",
    "torchbearer.metrics:EpochLambda.__init__ uses _step, _final",
    "torchbearer.metrics:EpochLambda.process_train uses _y_pred, _y_true",
    "torchbearer.metrics:Mean.process uses _sum, _count",
    "torchbearer.metrics.aggregators:RunningMetric.process_train uses _cache, _i, _result",
    "torchbearer.metrics:RunningMean._process_train uses _kwargs",
    "torchbearer.metrics:Var.process uses _sum, _sum_sq, _count",
)
"""The contract, as :func:`ddp_callbacks.versions.require_names` reads it."""

require_names("torchbearer", PRIVATE)


Checkpointer = checkpointers._Checkpointer
"""The base class of the callbacks that write checkpoints."""


# --- the step -----------------------------------------------------------------------------------------------------


def loss_of(state: Any, batch: Any) -> torch.Tensor:
    """Compute the loss of a batch as Torchbearer's closure does; predictions and loss are in ``state`` afterwards."""
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
    """Whether the Trial uses a closure of the user's (``with_closure``), not Torchbearer's own."""
    module: str = getattr(trial.closure, "__module__", "")
    return module != "torchbearer.bases"


# --- metrics ------------------------------------------------------------------------------------------------------


def held(aggregator: Metric) -> dict[str, Any]:
    """Return the sums or rows in a ``Mean``, ``Var`` or ``EpochLambda`` so far, by attribute; nothing for others."""
    names = (*_SUMS, *_ROWS) if isinstance(aggregator, Mean | Var | EpochLambda) else ()
    return {name: vars(aggregator)[name] for name in names if name in vars(aggregator)}


def add_up(aggregator: Metric, of_ranks: Sequence[dict[str, Any]], logs: Sequence[BatchLog]) -> None:
    """Merge the ranks' sums or rows into a metric: add up the sums, and put the rows into the loader's order.

    Args:
        of_ranks: For each rank, the result of :func:`held`, or all attributes.
        logs: For each rank, the :func:`rows_in` an ``EpochLambda`` after each batch, weighted by the batch's samples.

    Raises:
        ConfigurationError: The rows do not belong to samples.
    """
    for name in held(aggregator):
        parts = [own[name] for own in of_ranks]
        merged = _interleave(aggregator, parts, logs, _ROWS.index(name)) if name in _ROWS else sum(parts)
        setattr(aggregator, name, merged)


def _interleave(
    metric: Metric, parts: Sequence[torch.Tensor | None], logs: Sequence[BatchLog], column: int
) -> torch.Tensor | None:
    rows = []
    for log in logs:
        counts = [0, *(int(value[column]) for value in log.values)]
        rows.append({step: after - before for step, before, after in zip(log.steps, counts, counts[1:], strict=False)})
    try:
        sizes = [count for counts in rows for count in counts.values()]
        samples = {weight for log in logs for weight in log.weights}
        is_constant = len(sizes) > 1 and len(set(sizes)) == 1
        if is_constant and (len(samples) > 1 or sizes[0] % max(samples)):
            raise RuntimeError(f"there are {sizes[0]} rows in each batch, however many samples it has")
        return interleave_rows(parts, rows)
    except (RuntimeError, AttributeError) as error:
        raise ConfigurationError(
            f"the metric {metric.name} needs the samples of an epoch in the first dimension of {_KEYS[column]}, but "
            f"{error}. Let the model and the loader put the samples first, or compute the metric "
            "for each batch (a lambda_metric without on_epoch=True)."
        ) from error


def rows_in(aggregator: EpochLambda) -> list[int]:
    """Return the numbers of rows of predictions and targets that an ``EpochLambda`` has collected."""
    return [0 if rows is None else len(rows) for rows in map(vars(aggregator).get, _ROWS)]


RUNNING = "_step"
"""The name of the function of an ``EpochLambda`` that computes its running value."""


def has_running(aggregator: EpochLambda) -> bool:
    """Whether an ``EpochLambda`` computes a running value."""
    return aggregator._step is aggregator._final


def window_of(aggregator: Metric) -> dict[str, Any]:
    """Return the state of a ``RunningMean`` of one number per batch for :func:`continued_from`, or ``{}``."""
    is_of_scalars = isinstance(aggregator, RunningMean) and not aggregator._kwargs  # without dim
    return {name: copy.copy(getattr(aggregator, name)) for name in _WINDOW} if is_of_scalars else {}


def continued_from(aggregator: RunningMean, window: dict[str, Any], means: Sequence[torch.Tensor]) -> Any:
    """Continue a ``RunningMean`` from ``window`` with the means of batches; return its value then."""
    vars(aggregator).update({name: copy.copy(value) for name, value in window.items()})
    for mean in means:
        aggregator.process_train(mean)
    return aggregator._result


def metrics_within(
    metric: Metric, root: Metric | None = None, seen: set[int] | None = None
) -> Iterator[tuple[Metric, Metric]]:
    """Yield a metric and all metrics inside it (in lists, trees and wrappers), each with the root of its tree.

    Each comes once, in a fixed order.
    """
    seen = set() if seen is None else seen
    if id(metric) not in seen:
        seen.add(id(metric))
        top = metric.root if root is None and isinstance(metric, MetricTree) else root
        yield metric, metric if top is None else top
        for inner in _held_by(metric):
            yield from metrics_within(inner, top, seen)


def _held_by(metric: Metric) -> Iterator[Metric]:
    for value in vars(metric).values():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Metric) and not isinstance(item, torchbearer.state.StateKey):
                yield item


# --- callbacks ----------------------------------------------------------------------------------------------------


def scheduler_of(callback: TorchScheduler) -> Any:
    """Return torch's scheduler inside Torchbearer's; ``None`` before the start of the run."""
    return callback._scheduler


def advance_bar(callback: Callback | None, batches: int) -> None:
    """Let a progress bar over batches show that ``batches`` of them are done already."""
    if isinstance(callback, Tqdm) and not callback._on_epoch and callback._loader is not None:
        callback._loader.update(batches)
