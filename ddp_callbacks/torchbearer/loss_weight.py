"""The weight of a rank's loss, and how the ranks' losses combine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torchbearer

from ddp_callbacks.comm.collectives import all_reduce
from ddp_callbacks.data.shares import Share, loss_weight
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.gradients.cross_entropy import cross_entropy_weight
from ddp_callbacks.torchbearer.state import State, share_of

Weight: TypeAlias = Callable[[State], float | torch.Tensor]


class LossWeight:
    """The weight of a rank's loss, and how the ranks' losses combine to the loss of the global batch.

    Args:
        weight: A function of the Trial's state, called after the loss is computed. It returns the number that this
            rank's loss is the mean over, for example tokens that count. ``None``: the number of samples; for cross
            entropy and negative log likelihood torch's divisor, the sum of the class weights of the targets that are
            not ignored.
        reduction: ``"mean"`` or ``"sum"``. ``None``: the criterion's ``reduction`` if it has one, else ``"mean"``. With
            a sum, what callbacks add in ``on_criterion`` is a sum, too, except for terms of parameters alone, such as
            weight decay: these count once.
    """

    def __init__(self, weight: Weight | None = None, reduction: str | None = None) -> None:
        if reduction not in (None, "mean", "sum"):
            raise ConfigurationError(f'reduction must be "mean", "sum" or None, got {reduction!r}.')
        if weight is not None and not callable(weight):
            raise ConfigurationError(f"weight must be a function of the Trial's state, got {weight!r}.")
        self._weight = weight or _weight_by_criterion
        self._reduction = reduction

    def reduction(self, state: State) -> str:
        """Return ``"mean"`` or ``"sum"``, for the criterion in the Trial's ``state``.

        Args:
            state: The Trial's state.
        """
        if self._reduction is not None:
            return self._reduction
        return "sum" if getattr(state[torchbearer.CRITERION], "reduction", None) == "sum" else "mean"

    def of(self, state: State) -> tuple[float, float | None]:
        """Return this rank's weight, and the sum over all ranks if it is known without communication. Local.

        Args:
            state: The Trial's state, after the loss is computed.
        """
        own = None if self.reduction(state) == "sum" else self._weight(state)
        return loss_weight(share_of(state), self.reduction(state), own)

    def joined(self, state: State) -> torch.Tensor:
        """Return the loss of the global batch, from those of the ranks. A collective.

        Args:
            state: The Trial's state, after the loss is computed.
        """
        loss, (weight, total) = state[torchbearer.LOSS].detach(), self.of(state)
        wide = loss.double()
        part = wide * weight if weight else torch.zeros_like(wide)  # the mean over no sample is NaN
        sums = all_reduce(torch.stack([part, torch.full_like(wide, weight)]), "the loss")
        return (sums[0] / (sums[1] if total is None else total)).to(loss.dtype)

    def of_samples(self, state: State) -> tuple[float, float | None]:
        """Return the same from the numbers of samples alone, before the loss is computed. Local.

        Args:
            state: The Trial's state.
        """
        return loss_weight(share_of(state), self.reduction(state))


def _weight_by_criterion(state: State) -> float | torch.Tensor | None:
    return cross_entropy_weight(state[torchbearer.CRITERION], state.get(torchbearer.Y_TRUE))


def fraction_of(share: Share, world_size: int) -> float:
    """Return this rank's fraction of the batch's samples; if the total is unknown, that of equal parts."""
    return 1 / world_size if share.fraction is None else share.fraction
