"""All predictions, in the loader's order, on every rank."""

from __future__ import annotations

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
    """Make ``predict()`` return the rows of the whole data, in the loader's order, on every rank."""

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
        gathered = all_gather_tensors(mine, tensors, "the predictions", self.process_group)
        by_rank = [unpack(header, parts) for header, parts in gathered]
        aggregator.predictions_list = [
            join_batch([output for output in step if output is not None]) for step in zip(*by_rank, strict=True)
        ]
        aggregator.on_end_validation(state)


def _aggregator(callbacks: Any) -> AggregatePredictions | None:
    """The callback that ``predict()`` injects; ``None`` in any other pass."""
    while isinstance(callbacks, CallbackListInjection):
        if isinstance(callbacks.callback, AggregatePredictions):
            return callbacks.callback
        callbacks = callbacks.callback_list
    return None
