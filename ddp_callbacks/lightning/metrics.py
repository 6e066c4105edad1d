"""Merge torchmetrics over the ranks by their own rules, with this package's messages and without padding batches.

The value of a step must be that of the whole batch. But ``forward`` must not communicate: a module may call it on some
ranks only. So each rank keeps the states of the batch, and the ranks merge them when they join their logged values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torchmetrics import Metric

from ddp_callbacks.comm.collectives import all_gather_object
from ddp_callbacks.lightning._torchmetrics import (
    compute_alone,
    copy_states,
    is_in_forward,
    merge_states,
    remember,
    set_aside,
)
from ddp_callbacks.replicas import running_statistics


class SyncedMetrics:
    """The torchmetrics of a module and of the Trainer's callbacks, while a Trainer runs.

    Args:
        owners: Modules, and other objects whose attributes may be metrics.
        is_padding: Returns whether this rank is computing a padding batch, whose states must not be merged.
    """

    def __init__(self, owners: Iterable[Any], is_padding: Callable[[], bool]) -> None:
        self._owners = list(owners)
        self._metrics = metrics_of(self._owners)
        self._before = [(metric, metric.dist_sync_fn, metric.dist_sync_on_step) for metric in self._metrics]
        self._is_padding = is_padding
        self._syncs: dict[int, _Sync] = {}
        for metric, function, on_step in self._before:
            if function is None:
                metric.dist_sync_fn = self._syncs[id(metric)] = _Sync(metric, self._gather, captures=not on_step)

    def watch_steps(self, wanted: Callable[[Metric], bool]) -> None:
        """Begin a batch: keep the states from which ``forward`` computes its value, for the ``wanted`` metrics."""
        for sync in self._syncs.values():
            sync.captured = []
        for metric, _, always in self._before:
            metric.dist_sync_on_step = always or (id(metric) in self._syncs and wanted(metric))

    def batch_states(self, metric: Metric) -> list[torch.Tensor]:
        """Return the states of the last ``forward``, as the ranks send them; empty if they were not kept."""
        sync = self._syncs.get(id(metric))
        return sync.captured if sync is not None else []

    def value_of(self, metric: Metric, states: list[list[torch.Tensor]]) -> torch.Tensor:
        """Return the value of a batch from the :meth:`batch_states` of all ranks that have samples. Local."""
        restore = copy_states(metric)
        merged = iter([[part.to(metric.device) for part in parts] for parts in zip(*states, strict=True)])
        try:
            merge_states(metric, lambda *_, **__: next(merged))
            with torch.no_grad():
                value: torch.Tensor = compute_alone(metric)
        finally:
            restore()
        return value.squeeze() if isinstance(value, torch.Tensor) and value.numel() == 1 else value

    def compute(self, attribute: str) -> None:
        """Take part in computing a metric of the module (the first owner) that only other ranks have logged."""
        self._owners[0].get_submodule(attribute).compute()

    def close(self) -> None:
        """Restore the metrics' own settings."""
        for metric, function, on_step in self._before:
            metric.dist_sync_fn, metric.dist_sync_on_step = function, on_step
        self._before = []

    def remember(self) -> list[tuple[Callable[[], bool], Callable[[], None]]]:
        """Return two functions per metric: one says whether it was updated since this call, the other undoes that."""
        return [*map(remember, self._metrics)]

    def _gather(self, state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        """Return the states of all ranks that have samples. A collective."""
        sent = all_gather_object((self._is_padding(), state), "a metric's state", group)
        counted = [tensor.to(state.device) for padding, tensor in sent if not padding]
        # A rank without any sample sends an empty float, which would turn the others' class indices into floats.
        return [tensor for tensor in counted if tensor.numel()] or counted or [state]


class _Sync:
    """A metric's ``dist_sync_fn``. A copy of the metric has none."""

    def __init__(self, metric: Metric, gather: Callable[..., list[torch.Tensor]], captures: bool) -> None:
        self._metric = weakref.ref(metric)
        self._gather = gather
        self._captures = captures
        self._of: Any = None  # the states that the last forward has set aside
        self.captured: list[torch.Tensor] = []

    def __call__(self, state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        metric = self._metric()
        if metric is None or not is_in_forward(metric) or not self._captures:
            return self._gather(state, group)
        if set_aside(metric) is not self._of:  # forward has begun to compute the value of a batch
            self._of, self.captured = set_aside(metric), []
        self.captured.append(state)
        return [state]

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def remember_padding(module: torch.nn.Module, metrics: SyncedMetrics) -> Callable[[], None]:
    """Return a function that undoes later changes to the module's metrics, running statistics and lists.

    A list that is empty now keeps its new entries: a hook may compute with them. The result has no weight as long as
    this rank has no sample.
    """
    buffers = [(buffer, buffer.clone()) for buffer in running_statistics(module)]
    lists = [(value, len(value)) for value in vars(module).values() if type(value) is list and value]
    updates = metrics.remember()

    def undo() -> None:
        for is_updated, forget in updates:
            if is_updated():
                forget()
        for value, length in lists:
            del value[length:]
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)

    return undo


def metrics_of(owners: Iterable[Any]) -> list[Metric]:
    """Return the torchmetrics in modules, and those that are attributes of other objects, each once."""
    return list({id(metric): metric for owner in owners for metric in _metrics_of(owner)}.values())


def _metrics_of(owner: Any) -> Iterator[Metric]:
    parts = [owner] if isinstance(owner, torch.nn.Module) else list(vars(owner).values())
    for part in parts:
        if isinstance(part, torch.nn.Module):
            yield from (module for module in part.modules() if isinstance(module, Metric))
