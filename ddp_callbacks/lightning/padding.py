"""A padding batch, which a rank without a sample computes in the place of its part, leaves no trace."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ddp_callbacks.lightning.metrics import SyncedMetrics
from ddp_callbacks.replicas import running_statistics


def remember(module: torch.nn.Module, metrics: SyncedMetrics) -> Callable[[], None]:
    """What makes metrics, running statistics and lists of the module forget what happens from now on.

    A list that is empty now keeps what it gets: a hook may compute with it. The result counts nothing, as long as this
    rank has no sample.
    """
    buffers = [(buffer, buffer.clone()) for buffer in running_statistics(module)]
    lists = [(value, len(value)) for value in vars(module).values() if type(value) is list and value]
    updates = metrics.remember()

    def undo() -> None:
        for is_updated, forget in updates:
            if is_updated():
                forget()
        for value, length in lists:
            del value[length:]
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)

    return undo
