"""Compare the gradient of the first batch with that of a single process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torchbearer

from ddp_callbacks.data.iterator import ShardedIterator
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.torchbearer._torchbearer import arguments_of, forward
from ddp_callbacks.torchbearer.base import SHARE, DistributedCallback, LocalStates, State
from ddp_callbacks.torchbearer.weights import LossWeight, Weight
from ddp_callbacks.verification import verify_gradient


class VerifyGradient(DistributedCallback):
    """At the first batch of each ``run``: raise unless the ranks' gradients add up to that of the global batch.

    Each rank also computes model and criterion on the global batch, once or twice, without the Trial's other callbacks;
    see :func:`ddp_callbacks.verify_gradient`. Put it after :class:`ShardData`.

    Args:
        weight, reduction: As in :class:`AllReduceGradients`.
        process_group: ``None`` is the default group.

    Raises:
        MismatchError: Names the parameter that differs most and a remedy.
        ConfigurationError: The global batch is not available, or the model draws random numbers.
    """

    def __init__(
        self,
        weight: Weight | None = None,
        reduction: str | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group)
        self._loss_weight = LossWeight(weight, reduction)
        self._is_due = True

    def on_start(self, state: State) -> None:
        self._is_due = True

    def local_state(self, state: State) -> dict[str, Any]:
        return {"is_due": self._is_due}

    def load_local_state(self, states: LocalStates, state: State) -> None:
        self._is_due = states.mine["is_due"]

    def on_sample(self, state: State) -> None:
        if self.world_size == 1 or not self._is_due:
            return
        self._is_due = False
        iterator = state[torchbearer.ITERATOR]
        if not isinstance(iterator, ShardedIterator):
            raise ConfigurationError(
                'verify="first_batch" needs a loader that is divided among the processes, to get its whole '
                f"batch; got {type(iterator).__name__}. Give the Trial a DataLoader without a DistributedSampler."
            )
        first = iterator.first_batch()
        scratch = torchbearer.State()
        scratch.update(state)
        scratch[SHARE] = first.share

        def loss_of(batch: Any) -> torch.Tensor:
            return _loss_of(scratch, batch)

        def weigh() -> tuple[float, float | None]:
            return self._loss_weight.of(scratch)

        verify_gradient(state[torchbearer.MODEL], loss_of, first.whole, first.part, weigh, self.process_group)


def _loss_of(state: State, batch: Any) -> torch.Tensor:
    """Compute the loss as Torchbearer's closure does."""
    state[torchbearer.ITERATOR] = iter([batch])
    state[torchbearer.SAMPLER](state)
    forward(state)
    criterion = state[torchbearer.CRITERION]
    try:
        loss = criterion(state)
    except TypeError:
        loss = criterion(*arguments_of(state[torchbearer.Y_PRED]), *arguments_of(state[torchbearer.Y_TRUE]))
    state[torchbearer.LOSS] = loss
    return loss  # type: ignore[no-any-return]
