"""The weight of this rank's loss and gradient: the number that the loss is the mean over."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torchbearer

from ddp_callbacks.cross_entropy import cross_entropy_weight
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.torchbearer.base import State, share_of

Weight = Callable[[State], float | torch.Tensor]


class LossWeight:
    """The weight of a rank's loss, and how the ranks' losses combine to the loss of the global batch.

    Args:
        weight: A function of the Trial's state, called after the loss is computed. It returns the number that this
            rank's loss is the mean over, for example tokens that count. ``None``: the number of samples; for cross
            entropy and negative log likelihood torch's divisor, the sum of the class weights of the targets that are
            not ignored.
        reduction: ``"mean"`` or ``"sum"``. ``None``: the criterion's ``reduction`` if it has one, else ``"mean"``.
    """

    def __init__(self, weight: Weight | None = None, reduction: str | None = None) -> None:
        if reduction not in (None, "mean", "sum"):
            raise ConfigurationError(f'reduction must be "mean", "sum" or None, got {reduction!r}.')
        if weight is not None and not callable(weight):
            raise ConfigurationError(f"weight must be a function of the Trial's state, got {weight!r}.")
        self._weight = weight
        self._reduction = reduction

    def reduction(self, state: State) -> str:
        """``"mean"`` or ``"sum"``, for the criterion in the Trial's ``state``.

        Args:
            state: The Trial's state.
        """
        if self._reduction is not None:
            return self._reduction
        return "sum" if getattr(state[torchbearer.CRITERION], "reduction", None) == "sum" else "mean"

    def of(self, state: State) -> tuple[float, float | None]:
        """This rank's weight, and the sum over all ranks if it is known without communication. Local.

        Args:
            state: The Trial's state, after the loss is computed.
        """
        share = share_of(state)
        if self.reduction(state) == "sum":
            return float(share.local > 0), 1.0
        own: float | torch.Tensor | None
        if self._weight is not None:
            own = self._weight(state)
        else:
            own = cross_entropy_weight(state[torchbearer.CRITERION], state.get(torchbearer.Y_TRUE))
        if own is None:
            return float(share.local), None if share.total is None else float(share.total)
        return (float(own) if share.local else 0.0), None
