"""A padding batch, which a rank without a sample computes in the place of its part, leaves no trace.

Metrics and running statistics are put back. What a module has collected in a list of its own stays, and the user is
told.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from ddp_callbacks.lightning.metrics import SyncedMetrics
from ddp_callbacks.process_group import get_rank
from ddp_callbacks.replicas import running_statistics


def remember(module: torch.nn.Module, metrics: SyncedMetrics) -> Callable[[], None]:
    """What makes metrics and running statistics forget what happens from now on."""
    buffers = [(buffer, buffer.clone()) for buffer in running_statistics(module)]
    restore = metrics.copy_states()

    def undo() -> None:
        restore()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)

    return undo


class Collections:
    """The lists of tensors of a module; warns, once for each, if it grows by a padding batch."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._warned: set[str] = set()
        self._lengths: dict[str, int] = {}

    def begin(self) -> None:
        """A padding batch begins."""
        self._lengths = self._measure()

    def end(self) -> None:
        """It has ended."""
        before, self._lengths = self._lengths, {}
        for name, length in self._measure().items():
            if length > before.get(name, 0) and name not in self._warned:
                self._warned.add(name)
                warnings.warn(
                    f"{name} has grown in a batch of which rank {get_rank()} has no sample: it computes another batch "
                    "in its place, which counts in nothing that is logged. What you compute from that list counts it; "
                    "use a torchmetrics metric.",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _measure(self) -> dict[str, int]:
        return {
            f"{type(self._module).__name__}.{name}": len(value)
            for name, value in vars(self._module).items()
            if type(value) is list and value and _holds_tensors(value[-1])
        }


def _holds_tensors(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return any(isinstance(part, torch.Tensor) for part in parts)
