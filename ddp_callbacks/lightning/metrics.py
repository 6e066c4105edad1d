"""torchmetrics: their own merging over the ranks, fed by this package's messages, and blind to stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchmetrics import Metric

from ddp_callbacks.broadcast import running_statistics
from ddp_callbacks.collectives import all_gather_tensors
from ddp_callbacks.rows import RowExchange

_SMALL = 24  # numbers of a state that travel in a row
_IN_A_ROW = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)


class SyncedMetrics:
    """The torchmetrics of a module, while a Trainer runs it.

    Args:
        module: Searched for metrics.
        is_stand_in: Whether this rank computes a stand-in at the moment, whose states are not to be merged.
        exchange: To the other ranks.
    """

    def __init__(self, module: torch.nn.Module, is_stand_in: Callable[[], bool], exchange: RowExchange) -> None:
        self._metrics = [part for part in module.modules() if isinstance(part, Metric)]
        self._before = [(metric, metric.dist_sync_fn, metric.dist_sync_on_step) for metric in self._metrics]
        self._is_stand_in = is_stand_in
        self._exchange = exchange
        for metric in self._metrics:
            if metric.dist_sync_fn is None:
                metric.dist_sync_fn = self._gather

    def sync_each_step(self, wanted: Callable[[Metric], bool]) -> None:
        """From now on ``forward`` returns the value of the whole batch for the metrics that are ``wanted``."""
        for metric, _, always in self._before:
            metric.dist_sync_on_step = always or wanted(metric)

    def close(self) -> None:
        """Leave the metrics as they were found."""
        for metric, function, on_step in self._before:
            metric.dist_sync_fn, metric.dist_sync_on_step = function, on_step
        self._before = []

    def copy_states(self) -> Callable[[], None]:
        """What makes the metrics forget what happens from now on."""
        kept = [(metric, metric._copy_state_dict(), metric._update_count, metric._computed) for metric in self._metrics]

        def restore() -> None:
            for metric, states, count, computed in kept:
                for name, state in states.items():
                    setattr(metric, name, state)
                metric._update_count, metric._computed = count, computed

        return restore

    def _gather(self, state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        """torchmetrics' ``dist_sync_fn``: every rank's state, of those that count."""
        numbers: list[float] = []
        if group is None and state.numel() <= _SMALL and state.dim() < 6 and state.dtype in _IN_A_ROW:
            header = [self._is_stand_in(), _IN_A_ROW.index(state.dtype), state.dim(), *state.shape]
            numbers = [*map(float, header), *state.detach().reshape(-1).double().tolist()]
        rows = self._exchange.exchange(numbers, "a metric's state")
        if all(rows):
            gathered = [(bool(row[0]), _state(row).to(state.device)) for row in rows]
        else:
            sent = all_gather_tensors(self._is_stand_in(), [state], "a metric's state", group)
            gathered = [(stand_in, tensor.to(state.device)) for stand_in, (tensor,) in sent]
        counted = [tensor for stand_in, tensor in gathered if not stand_in]
        # A rank without any sample sends an empty float, which would turn the others' class indices into floats.
        return [tensor for tensor in counted if tensor.numel()] or [tensor for _, tensor in gathered]


def _state(row: list[float]) -> torch.Tensor:
    code, dims = int(row[1]), int(row[2])
    shape = [int(size) for size in row[3 : 3 + dims]]
    return torch.tensor(row[3 + dims :], dtype=torch.float64).to(_IN_A_ROW[code]).reshape(shape)


@contextmanager
def without_trace(module: torch.nn.Module, metrics: SyncedMetrics | None) -> Iterator[None]:
    """Metrics and running statistics are afterwards as before: for a stand-in."""
    buffers = [(buffer, buffer.clone()) for buffer in running_statistics(module)]
    restore = metrics.copy_states() if metrics is not None else None
    try:
        yield
    finally:
        if restore is not None:
            restore()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
