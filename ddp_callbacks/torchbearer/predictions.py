"""All predictions, in the loader's order, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torchbearer
from torchbearer.callbacks import AggregatePredictions
from torchbearer.trial import CallbackListInjection

from ddp_callbacks.collectives import all_gather_tensors, pack, unpack
from ddp_callbacks.sharding import join_batch
from ddp_callbacks.torchbearer.base import DistributedCallback, State, share_of


class GatherPredictions(DistributedCallback):
    """Make ``predict()`` return the rows of the whole data, in the loader's order, on every rank.

    The model's output for a batch is a tensor with the samples along its first dimension, or tensors in lists, tuples
    and dicts. Every rank holds all rows in the end.

    Args:
        process_group: ``None`` is the default group.

    Raises:
        TypeError: The output holds something that is neither a tensor nor plain data.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(process_group)
        self._counts: list[int] = []

    def on_start_validation(self, state: State) -> None:
        self._counts = []

    def on_step_validation(self, state: State) -> None:
        self._counts.append(share_of(state).local)

    def on_end_validation(self, state: State) -> None:
        aggregator = _aggregator(state[torchbearer.CALLBACK_LIST])
        if self.world_size == 1 or aggregator is None:
            return
        outputs = zip(aggregator.predictions_list, self._counts, strict=True)
        tensors: list[torch.Tensor] = []
        mine = pack([output if count else None for output, count in outputs], tensors)
        header = {"outputs": mine, "sizes": self._counts}
        gathered = all_gather_tensors(header, tensors, "the predictions", self.process_group)
        by_rank = [unpack(header["outputs"], parts) for header, parts in gathered]
        sizes = [header["sizes"] for header, _ in gathered]
        aggregator.predictions_list = [
            join_batch(*_counted(outputs, counts))
            for outputs, counts in zip(zip(*by_rank, strict=True), zip(*sizes, strict=True), strict=True)
        ]
        aggregator.on_end_validation(state)


def _aggregator(callbacks: Any) -> AggregatePredictions | None:
    """The callback that ``predict()`` injects; ``None`` in any other pass."""
    while isinstance(callbacks, CallbackListInjection):
        if isinstance(callbacks.callback, AggregatePredictions):
            return callbacks.callback
        callbacks = callbacks.callback_list
    return None


def _counted(outputs: Sequence[Any], sizes: Sequence[int]) -> tuple[list[Any], list[int]]:
    """Without those of ranks that had no sample."""
    counted = [(output, size) for output, size in zip(outputs, sizes, strict=True) if size]
    return [output for output, _ in counted], [size for _, size in counted]
