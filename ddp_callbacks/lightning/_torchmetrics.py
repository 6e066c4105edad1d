"""What this library uses of torchmetrics beside its public names: each in one function, all listed in :data:`PRIVATE`.

Lightning's own ``_ResultMetric``, in which it keeps what ``self.log`` was given, is a metric, too.
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
    """Raise :class:`ImportError` if the installed torchmetrics lacks a private name, naming the versions that do."""
    require_names("torchmetrics", PRIVATE)


# --- values -------------------------------------------------------------------------------------------------------


def set_step_value(metric: Any, value: Any) -> None:
    """Replace the value of the last batch, which ``forward`` has returned."""
    metric._forward_cache = value


def is_computed(metric: Any) -> bool:
    """Whether ``compute`` has been called since the last update, so that calling it again costs nothing."""
    return metric._computed is not None


# --- states -------------------------------------------------------------------------------------------------------


def copy_states(metric: Metric) -> Callable[[], None]:
    """Copy the states of a metric; a call of what is returned puts them back."""
    states = metric._copy_state_dict()

    def restore() -> None:
        for name, state in states.items():
            setattr(metric, name, state)

    return restore


def remember(metric: Metric) -> tuple[Callable[[], bool], Callable[[], None]]:
    """Two functions: whether the metric has been updated from now on, and one that makes it forget that.

    Lists are copied without their entries, which metrics only append to. What ``compute`` has returned is forgotten,
    too: other ranks have updated the metric, and compute it together with this one.
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
    """The states of a metric, and the number of updates, for a file."""
    return {"states": metric._copy_state_dict(), "updates": metric._update_count}


def set_states(metric: Metric, states: dict[str, Any], updates: int) -> None:
    """Inverse of :func:`plain_states`, on the metric's device; nothing is computed of them yet."""
    for name, state in states.items():
        setattr(metric, name, _on_device(state, metric.device))
    metric._update_count, metric._computed = updates, None


def default_states(metric: Metric) -> dict[str, Any]:
    """The states of a metric that has seen nothing."""
    return {name: _on_device(default, metric.device) for name, default in metric._defaults.items()}


def reductions_of(metric: Metric) -> dict[str, str]:
    """How the ranks' states become one: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``, ``"cat"``; otherwise ``""``."""
    return {name: _KINDS.get(getattr(function, "__name__", ""), "") for name, function in metric._reductions.items()}


_KINDS = {f"dim_zero_{kind}": kind for kind in ("sum", "mean", "max", "min", "cat")} | {
    kind: kind for kind in ("sum", "mean", "max", "min")
}


def _on_device(state: Any, device: Any) -> Any:
    return [part.to(device) for part in state] if isinstance(state, list) else state.clone().to(device)


def merge_states(metric: Metric, gather: Callable[..., list[torch.Tensor]]) -> None:
    """Replace each state by what the metric makes of those that ``gather`` returns for it."""
    metric._sync_dist(gather)


def compute_alone(metric: Metric) -> Any:
    """What the metric's own ``compute`` returns for its states: without communication, and not cached."""
    return metric.compute.__wrapped__()  # type: ignore[attr-defined]


def is_in_forward(metric: Metric) -> bool:
    """Whether ``forward`` asks for the value of a batch, and not ``compute`` for that of the epoch."""
    return not metric._should_unsync


def set_aside(metric: Metric) -> Any:
    """The states that ``sync`` has put aside while it replaces them; another object in each ``sync``."""
    return metric._cache
