"""A padding batch leaves no trace: in running statistics, and in torchmetrics, wherever the program keeps them.

A loop calls its metrics itself, and may keep them in a variable. So Python is asked for those that there are: at the
start of a pass over a divided loader, and where this rank has no sample of a batch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torchmetrics import Metric

from ddp_callbacks.lightning.metrics import SyncedMetrics
from ddp_callbacks.lightning.padding import remember


class Traces:
    """What batches leave behind, by the pass over a loader that they belong to. Local."""

    def __init__(self) -> None:
        self._undo: dict[object, Callable[[], None]] = {}

    def begin_padding(self, running: object, models: torch.nn.Module) -> None:
        """A padding batch begins."""
        self._undo[running] = remember(models, SyncedMetrics(_all_metrics(), _never))

    def end_batch(self, running: object) -> None:
        """The batch of a pass has ended: forget it, if it was a padding batch."""
        undo = self._undo.pop(running, None)
        if undo is not None:
            undo()


def merge_metrics_by_messages() -> None:
    """Let the metrics merge their states by this package's messages from now on. Local."""
    for metric in _all_metrics():
        SyncedMetrics([metric], _never)


def _never() -> bool:
    return False


def _all_metrics() -> list[Metric]:
    kinds = _with_subclasses(Metric)
    return [found for found in gc.get_objects() if type(found) in kinds]  # isinstance is slow, and would ask proxies


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))
