"""Remove the traces of a padding batch from running statistics and torchmetrics, wherever the program keeps them.

A loop calls its metrics itself, and may keep them in a variable. So we search all Python objects for metrics: at the
start of a pass over a divided loader, and for each batch of which this rank has no sample.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torchmetrics import Metric

from ddp_callbacks.lightning.metrics import SyncedMetrics, remember_padding


def remember_all(models: torch.nn.Module) -> Callable[[], None]:
    """Return a function that undoes later changes to the models and to all metrics of the program."""
    return remember_padding(models, SyncedMetrics(_all_metrics(), _never))


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
