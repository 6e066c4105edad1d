"""Flatten each sample to one dimension."""

from __future__ import annotations

from typing import Any

import torch
import torchbearer
from torchbearer import Callback

from ddp_callbacks.torchbearer.base import State


class Flatten(Callback):  # type: ignore[misc]
    """Flatten each sample to one dimension, in training, validation and prediction.

    ``state[X]`` of shape ``[batch, ...]`` becomes ``[batch, features]``. Tensors inside lists, tuples and dicts are
    flattened too. Tensors with fewer than two dimensions are not changed.
    """

    def on_sample(self, state: State) -> None:
        state[torchbearer.X] = flatten(state[torchbearer.X])

    def on_sample_validation(self, state: State) -> None:
        self.on_sample(state)


def flatten(batch: Any) -> Any:
    """Reshape every tensor in ``batch`` with two or more dimensions to ``[batch, features]``."""
    if isinstance(batch, torch.Tensor):
        return batch.flatten(start_dim=1) if batch.dim() > 1 else batch
    if isinstance(batch, dict):
        return {key: flatten(value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        values = [flatten(value) for value in batch]
        return values if isinstance(batch, list) else tuple(values)
    return batch
