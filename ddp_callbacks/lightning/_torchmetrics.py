"""Access to private parts of torchmetrics: each name in one function, all listed in :data:`PRIVATE`.

Lightning's ``_ResultMetric``, which holds a value of ``self.log``, is a metric, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchmetrics import Metric

from ddp_callbacks.versions import require_names

# The contract, as ddp_callbacks.versions.require_names reads it.
PRIVATE = (
    "torchmetrics:Metric.__init__ uses _cache, _computed, _forward_cache, _should_unsync, _update_count",
    "torchmetrics:Metric.__init__ uses dist_sync_fn, dist_sync_on_step",
    "torchmetrics:Metric.add_state uses _defaults, _reductions",
    "torchmetrics:Metric._copy_state_dict(self)",
    "torchmetrics:Metric._sync_dist(self, dist_sync_fn)",
    "torchmetrics:Metric._wrap_compute(self, compute)",
    "torchmetrics:Metric.sync uses _cache, _copy_state_dict, _sync_dist",
)


def require_torchmetrics() -> None:
    """Raise :class:`ImportError` if torchmetrics lacks a private name, naming the versions that have it."""
    require_names("torchmetrics", PRIVATE)


# --- values -------------------------------------------------------------------------------------------------------


def set_step_value(metric: Any, value: Any) -> None:
    """Replace the value of the last batch, which ``forward`` returned."""
    metric._forward_cache = value


def is_computed(metric: Any) -> bool:
    """Whether ``compute`` has been called since the last update, so that calling it again costs nothing."""
    return metric._computed is not None


# --- states -------------------------------------------------------------------------------------------------------


def copy_states(metric: Metric) -> Callable[[], None]:
    """Copy the states of a metric. Call the result to restore them."""
    states = metric._copy_state_dict()

    def restore() -> None:
        for name, state in states.items():
            setattr(metric, name, state)

    return restore


def remember(metric: Metric) -> tuple[Callable[[], bool], Callable[[], None]]:
    """Return two functions: one says whether the metric was updated since this call, the other undoes the updates.

    Entries of lists are not copied, as metrics only append to lists. Undoing also clears the cached result of
    ``compute``: other ranks have updated the metric, and compute it together with this one.
    """
    states = {
        name: state.detach().clone() if isinstance(state, torch.Tensor) else [*state]
        for name, state in metric.metric_state.items()
    }
    count, value = metric._update_count, metric._forward_cache

    def forget() -> None:
        for name, state in states.items():
            setattr(metric, name, state)
        metric._update_count, metric._computed, metric._forward_cache = count, None, value

    return lambda: bool(metric._update_count != count), forget


def plain_states(metric: Metric) -> dict[str, Any]:
    """Return the states of a metric, and its number of updates, for a file."""
    return {"states": metric._copy_state_dict(), "updates": metric._update_count}


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


def merge_states(metric: Metric, gather: Callable[..., list[torch.Tensor]]) -> None:
    """Replace each state by the metric's reduction of the states that ``gather`` returns for it."""
    metric._sync_dist(gather)


def compute_alone(metric: Metric) -> Any:
    """Compute the metric from its own states, without communication or caching."""
    return metric.compute.__wrapped__()  # type: ignore[attr-defined]


def is_in_forward(metric: Metric) -> bool:
    """Whether ``forward`` is computing the value of a batch, rather than ``compute`` the value of the epoch."""
    return not metric._should_unsync


def set_aside(metric: Metric) -> Any:
    """Return the states that ``sync`` saved before it replaced them. Each ``sync`` makes a new object."""
    return metric._cache
