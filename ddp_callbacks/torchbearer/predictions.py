"""All predictions, in the loader's order, on every rank."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torchbearer
from torchbearer.callbacks import AggregatePredictions
from torchbearer.trial import CallbackListInjection

from ddp_callbacks.data.outputs import gather_outputs
from ddp_callbacks.torchbearer.base import DistributedCallback, State, share_of


class GatherPredictions(DistributedCallback):
    """Make ``predict()`` return the rows of the whole data, in the loader's order, on every rank.

    The model's output for a batch is a tensor with the samples along one dimension, or tensors in lists, tuples and
    dicts. Every rank ends up with all rows. Objects other than tensors and plain data are pickled.

    Args:
        process_group: ``None`` is the default group.

    Raises:
        ConfigurationError: The outputs for the parts of a batch cannot be joined; names their place and kind.
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
        aggregator.predictions_list = gather_outputs(aggregator.predictions_list, self._counts, self.process_group)
        aggregator.on_end_validation(state)


def _aggregator(callbacks: Any) -> AggregatePredictions | None:
    """The callback that ``predict()`` injects; ``None`` in other passes."""
    while isinstance(callbacks, CallbackListInjection):
        if isinstance(callbacks.callback, AggregatePredictions):
            return callbacks.callback
        callbacks = callbacks.callback_list
    return None
