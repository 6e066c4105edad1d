"""The outer step of DiLoCo (https://arxiv.org/abs/2311.08105), with all replicas in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class OuterStep:
    """Nesterov's momentum over what the replicas have changed, beginning with ``anchor``, the parameters of all.

    Args:
        sent_as: What each replica's part of the outer gradient is rounded to.
    """

    def __init__(
        self, anchor: torch.Tensor, lr: float = 0.7, momentum: float = 0.9, sent_as: torch.dtype = torch.float64
    ) -> None:
        self.anchor = anchor
        self._velocity = torch.zeros_like(anchor)
        self._lr, self._momentum, self._sent_as = lr, momentum, sent_as

    def __call__(self, replicas: Sequence[nn.Module], weights: Sequence[float]) -> None:
        """Step by the replicas' weighted mean, and let all of them go on from there."""
        shares = [weight / sum(weights) for weight in weights]
        changes = [share * (self.anchor - vector(own)) for share, own in zip(shares, replicas, strict=True)]
        gradient = torch.stack([change.to(self._sent_as).to(change.dtype) for change in changes]).sum(0)
        self._velocity = self._momentum * self._velocity + gradient
        self.anchor = self.anchor - self._lr * (gradient + self._momentum * self._velocity)
        for replica in replicas:
            nn.utils.vector_to_parameters(self.anchor.clone(), replica.parameters())


def vector(model: nn.Module) -> torch.Tensor:
    """A copy of the parameters."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()
