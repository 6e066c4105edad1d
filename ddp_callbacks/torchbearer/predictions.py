"""All predictions, in the loader's order, on every rank."""

from __future__ import annotations

import itertools

import torch.distributed as dist
import torchbearer
from torchbearer.callbacks import AggregatePredictions
from torchbearer.trial import CallbackListInjection

from ddp_callbacks.data.outputs import gather_outputs
from ddp_callbacks.torchbearer.base import DistributedCallback, State, share_of


class GatherPredictions(DistributedCallback):
    """Make ``predict()`` return the rows of the whole data, in the loader's order, on every rank.

    Each rank computes whole batches in turn, and every rank ends up with the outputs of all. Those that are no tensors
    are pickled.

    Args:
        process_group: ``None`` is the default group.

    Raises:
        ConfigurationError: An output cannot be pickled.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(process_group)
        self._is_mine: list[bool] = []

    def on_start_validation(self, state: State) -> None:
        self._is_mine = []

    def on_step_validation(self, state: State) -> None:
        self._is_mine.append(share_of(state).local > 0)

    def on_end_validation(self, state: State) -> None:
        aggregator = aggregator_of(state)
        if self.world_size == 1 or aggregator is None:
            return
        mine = list(itertools.compress(aggregator.predictions_list, self._is_mine))
        limit = getattr(state[torchbearer.GENERATOR], "limit", None)
        aggregator.predictions_list = gather_outputs(mine, self.process_group)[:limit]
        aggregator.on_end_validation(state)


def aggregator_of(state: State) -> AggregatePredictions | None:
    """The callback that ``predict()`` injects; ``None`` in other passes."""
    callbacks = state[torchbearer.CALLBACK_LIST]
    while isinstance(callbacks, CallbackListInjection):
        if isinstance(callbacks.callback, AggregatePredictions):
            return callbacks.callback
        callbacks = callbacks.callback_list
    return None
