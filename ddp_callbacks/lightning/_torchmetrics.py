"""Access to private parts of torchmetrics: each name in one function, all listed in :data:`PRIVATE`.

Lightning's ``_ResultMetric``, which holds a value of ``self.log``, is a metric, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchmetrics import Metric, SumMetric
from torchmetrics.utilities.data import dim_zero_cat

from ddp_callbacks.data.attributes import plain_attributes

_OF_FORWARD = ("_is_synced", "_should_unsync", "_to_sync", "_enable_grad")
SYNC = "_sync_dist"  # the method that merges the ranks' states

# The contract, as ddp_callbacks.versions.require_names reads it.
PRIVATE = (
    "torchmetrics:Metric.__init__ uses _computed, _forward_cache, _should_unsync, _update_count",
    "torchmetrics:Metric.__init__ uses dist_sync_fn, dist_sync_on_step",
    "torchmetrics:Metric.add_state uses _defaults, _reductions",
    "torchmetrics:Metric._copy_state_dict(self)",
    "torchmetrics:Metric._sync_dist(self, dist_sync_fn)",
    "torchmetrics:Metric._wrap_compute(self, compute)",
    "torchmetrics:Metric.sync uses _copy_state_dict, _sync_dist",
    "torchmetrics.wrappers:Running.update uses _num_vals_seen, window, base_metric",
)


# --- values -------------------------------------------------------------------------------------------------------


def set_step_value(metric: Any, value: Any) -> None:
    """Replace the value of the last batch, which ``forward`` returned."""
    metric._forward_cache = value


def begin_again(metric: Any) -> None:
    """Let a logged torchmetric compute again, though this rank may have reset or computed it since its last update."""
    metric.has_reset = False
    metric._computed = metric.value._computed = None


def is_computed(metric: Any) -> bool:
    """Whether ``compute`` has been called since the last update, so that calling it again costs nothing."""
    return metric._computed is not None


# --- states -------------------------------------------------------------------------------------------------------


def states_to_send(metric: Metric) -> dict[str, Any]:
    """Return the states that the ranks exchange, all in one message: tensors, and lists of tensors.

    A list that the metric concatenates anyway has one tensor.
    """
    states = {name: getattr(metric, name) for name in metric._reductions}
    for name, kind in reductions_of(metric).items():
        if kind == "cat" and isinstance(states[name], list) and len(states[name]) > 1:
            states[name] = [dim_zero_cat(states[name])]
    return {name: state for name, state in states.items() if _holds_tensors(state)}


def _holds_tensors(state: Any) -> bool:
    parts = state if isinstance(state, list) else [state]
    return all(isinstance(part, torch.Tensor) for part in parts)


def merge_states(metric: Metric, states: Sequence[dict[str, Any]]) -> None:
    """Replace each state by the metric's reduction of the ranks' :func:`states_to_send`.

    Lists of different lengths merge entry by entry, in the order of the ranks.
    """
    of_ranks: dict[int, list[torch.Tensor]] = {}
    for name in set[str].intersection(*(set(state) for state in states)):
        parts = [_on_device(state[name], metric.device) for state in states]
        if isinstance(parts[0], list):
            entries = itertools.chain.from_iterable(itertools.zip_longest(*parts))
            setattr(metric, name, [entry for entry in entries if entry is not None])
        else:
            of_ranks[id(getattr(metric, name))] = parts
    type(metric)._sync_dist(metric, lambda state, group=None: of_ranks.get(id(state), [state]))


def value_of(metric: Metric, states: Sequence[dict[str, Any]]) -> Any:
    """Compute the metric from the ranks' :func:`states_to_send`, without communication. Its own states stay."""
    before = metric._copy_state_dict()
    try:
        merge_states(metric, states)
        with torch.no_grad():
            value = metric.compute.__wrapped__()  # type: ignore[attr-defined]
    finally:
        for name, state in before.items():
            setattr(metric, name, state)
    return value.squeeze() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def remember(metric: Any) -> tuple[Callable[[], bool], Callable[[], None]]:
    """Return two functions: one says whether the metric was updated since this call, the other undoes the updates.

    Entries of lists are not copied, as metrics only append to lists. Undoing also clears the cached result of
    ``compute``: other ranks have updated the metric, and compute it together with this one. In the window of a
    ``Running`` the undone batch stays one of the last, without a value, as other ranks have samples of it.
    """
    states = {
        name: state.detach().clone() if isinstance(state, torch.Tensor) else [*state]
        for name, state in metric.metric_state.items()
    }
    count, value, seen = metric._update_count, metric._forward_cache, _batches_seen(metric)
    flags = {name: vars(metric)[name] for name in _OF_FORWARD if name in vars(metric)}  # if it raises

    def forget() -> None:
        for name, state in states.items():
            setattr(metric, name, [*state] if isinstance(state, list) else state.clone())  # updates change it in place
        for number in range(seen, _batches_seen(metric)):
            for name, default in default_states(metric.base_metric).items():
                setattr(metric, f"{name}_{number % metric.window}", default)
        metric._update_count, metric._computed, metric._forward_cache = count, None, value
        vars(metric).update(flags)

    return lambda: (metric._update_count, _batches_seen(metric)) != (count, seen), forget


def counts_batches(metric: Metric) -> bool:
    """Whether the value is that of the last batches, so that each rank must count those without a sample, too."""
    return type(metric).__name__ == "Running"


def _batches_seen(metric: Any) -> int:
    return int(metric._num_vals_seen) if counts_batches(metric) else 0


def plain_states(metric: Metric) -> dict[str, Any]:
    """Return the states of a metric, and its number of updates, for a file."""
    return {"states": metric._copy_state_dict(), "updates": metric._update_count}


def attributes_beside(metric: Metric) -> dict[str, Any]:
    """Return the plain attributes of a metric that are no states, such as what a ``MinMaxMetric`` has seen so far."""
    names = vars(metric).keys() - vars(SumMetric()).keys() - metric._defaults.keys()
    return {name: value for name, value in plain_attributes(metric).items() if name in names}


def set_states(metric: Metric, states: dict[str, Any], updates: int) -> None:
    """Inverse of :func:`plain_states`, on the metric's device. Clears the cached result of ``compute``."""
    for name, state in states.items():
        setattr(metric, name, _on_device(state, metric.device))
    metric._update_count, metric._computed = updates, None


def default_states(metric: Metric) -> dict[str, Any]:
    """Return the states of a metric without updates, on its device."""
    return {name: _on_device(default, metric.device) for name, default in metric._defaults.items()}


def reductions_of(metric: Metric) -> dict[str, str]:
    """Return each state's reduction: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``, ``"cat"``; otherwise ``""``."""
    return {name: _KINDS.get(getattr(function, "__name__", ""), "") for name, function in metric._reductions.items()}


_KINDS = {f"dim_zero_{kind}": kind for kind in ("sum", "mean", "max", "min", "cat")} | {
    kind: kind for kind in ("sum", "mean", "max", "min")
}


def _on_device(state: Any, device: Any) -> Any:
    return [part.to(device) for part in state] if isinstance(state, list) else state.clone().to(device)


def is_in_forward(metric: Metric) -> bool:
    """Whether ``forward`` is computing the value of a batch, rather than ``compute`` the value of the epoch."""
    return not metric._should_unsync
