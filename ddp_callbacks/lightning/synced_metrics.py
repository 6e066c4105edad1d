"""Merge torchmetrics over the ranks by their own rules, with this package's messages and without padding batches.

A metric's whole state travels in one message. The value of a step must be that of the whole batch, but ``forward`` must
not communicate: a module may call it on some ranks only. So each rank keeps the states of the batch, and the ranks
merge them when they join their logged values.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

import torch
from torchmetrics import MeanMetric, Metric

from ddp_callbacks.comm.collectives import all_gather_object
from ddp_callbacks.lightning._torchmetrics import (
    SYNC,
    counts_batches,
    is_in_forward,
    merge_states,
    remember,
    states_to_send,
)
from ddp_callbacks.replacement import Replaced, Replacements
from ddp_callbacks.replicas.parameters import Trace, remember_statistics


class SyncedMetrics:
    """The torchmetrics of a module and of the Trainer's callbacks, until ``replacements`` are undone.

    Args:
        owners: Modules, and other objects whose attributes may be metrics.
        is_padding: Returns whether this rank is computing a padding batch, whose states must not be merged.
        fraction: Returns how much of the batch this rank computes; ``None`` outside of batches. The mean of a part
            counts so in a ``MeanMetric``, which gets no weight: it is the mean of the batches' means, on any number of
            processes.

    Attributes:
        exchanging: Surrounds the exchange of a metric's states.
    """

    exchanging: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)

    def __init__(
        self,
        owners: Iterable[Any],
        is_padding: Callable[[], bool],
        fraction: Callable[[], float | None],
        replacements: Replacements,
    ) -> None:
        self._metrics = metrics_of(owners)
        self._always = {id(metric) for metric in self._metrics if metric.dist_sync_on_step}
        self._is_padding = is_padding
        self._of_batch: dict[int, dict[str, Any]] = {}  # by metric: the states of the last forward
        replacements.callback(self.watch_steps, lambda metric: False)
        for metric in self._metrics:
            if metric.dist_sync_fn is None and not isinstance(vars(metric).get(SYNC), Replaced):
                replacements.replace(metric, SYNC, functools.partial(self._sync, metric))
                if isinstance(metric, MeanMetric):
                    replacements.replace(metric, "update", functools.partial(_update, fraction))

    @property
    def meet_in_forward(self) -> bool:
        """Whether ``forward`` of some metric is a collective, as the user has chosen by ``dist_sync_on_step=True``."""
        return bool(self._always)

    @property
    def count_batches(self) -> bool:
        """Whether some metric is that of the last batches, also of those of which this rank has no sample."""
        return any(map(counts_batches, self._metrics))

    def watch_steps(self, wanted: Callable[[Metric], bool]) -> None:
        """Begin a batch: keep the states from which ``forward`` computes its value, for the ``wanted`` metrics."""
        self._of_batch = {}
        for metric in self._metrics:
            metric.dist_sync_on_step = id(metric) in self._always or (metric.dist_sync_fn is None and wanted(metric))

    def batch_states(self, metric: Metric) -> dict[str, Any]:
        """Return the states of the last ``forward``, as the ranks send them; empty if they were not kept."""
        return self._of_batch.get(id(metric), {})

    def remember(self) -> list[Trace]:
        """Return a trace for each metric: whether it is updated after this call."""
        return [*map(remember, self._metrics)]

    @contextmanager
    def as_torchmetrics(self) -> Iterator[None]:
        """Inside, metrics have no attribute of ours: a pickle of one may be loaded where few names are allowed."""
        found = [(metric, vars(metric).pop(SYNC)) for metric in self._metrics if SYNC in vars(metric)]
        try:
            yield
        finally:
            for metric, sync in found:
                setattr(metric, SYNC, sync)

    def _sync(self, metric: Metric, sync: Any, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        """Merge the states of all ranks that have samples: a collective. In ``forward``, keep this rank's."""
        own = states_to_send(metric)
        if is_in_forward(metric) and id(metric) not in self._always:
            self._of_batch[id(metric)] = own
            return
        name = f"the states of {type(metric).__name__}"
        with self.exchanging():
            sent = all_gather_object(None if self._is_padding() else own, name, process_group or metric.process_group)
        merge_states(metric, [states for states in sent if states is not None] or [own])


def _update(
    fraction: Callable[[], float | None], update: Callable[..., None], value: Any, *args: Any, **options: Any
) -> None:
    """Update a ``MeanMetric``; a single number without a weight counts by this rank's fraction of the batch."""
    is_alone = not (args or options or getattr(value, "shape", None))
    mine = fraction() if is_alone else None
    update(value, *args, **options) if mine is None else update(value, mine)


def remember_traces(module: torch.nn.Module, metrics: SyncedMetrics) -> list[Trace]:
    """Return the traces that a step leaves from now on in the metrics, and in layers with statistics of this rank."""
    return [*metrics.remember(), *remember_statistics(module)]


def remember_padding(module: torch.nn.Module, metrics: SyncedMetrics) -> Callable[[], None]:
    """Return a function that undoes later changes to the module's metrics and running statistics."""
    traces = remember_traces(module, metrics)

    def undo() -> None:
        for has_changed, forget in traces:
            if has_changed():
                forget()

    return undo


def remember_lists(module: torch.nn.Module) -> Callable[[], None]:
    """Return a function that removes what is appended to the module's lists from now on.

    A list that is empty now keeps its new entries: a hook may compute with them. The result has no weight as long as
    this rank has no sample.
    """
    lists = [(value, len(value)) for value in vars(module).values() if type(value) is list and value]

    def undo() -> None:
        for value, length in lists:
            del value[length:]

    return undo


def samples_of_metrics(owners: Iterable[Any]) -> int:
    """Return how many samples a part of a batch needs, if it has some, so that ``forward`` of no metric raises."""
    return 1 + any(type(metric).__name__ == "R2Score" for metric in metrics_of(owners))


def metrics_of(owners: Iterable[Any]) -> list[Metric]:
    """Return the torchmetrics in modules, and those that are attributes of other objects, each once."""
    return list({id(metric): metric for owner in owners for metric in _metrics_of(owner)}.values())


def metrics_of_program() -> list[Metric]:
    """Return all metrics that exist: a loop of Fabric calls its metrics itself, and may keep them anywhere. Local.

    The first call takes a tenth of a second: it looks at all objects.
    """
    return list(_made().values())


@functools.cache
def _made() -> WeakValueDictionary[int, Metric]:
    """Return all metrics by their id, and note each that is made or copied from now on."""
    found = (each for each in gc.get_objects() if Metric in type(each).__mro__)  # isinstance would ask proxies
    made = WeakValueDictionary({id(metric): metric for metric in found})

    def noting(method: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(method)
        def noted(metric: Metric, *args: Any, **kwargs: Any) -> None:
            made[id(metric)] = metric
            method(metric, *args, **kwargs)

        return noted

    for name in ("__init__", "__setstate__"):
        setattr(Metric, name, noting(getattr(Metric, name)))
    return made


def _metrics_of(owner: Any) -> Iterator[Metric]:
    parts = [owner] if isinstance(owner, torch.nn.Module) else list(vars(owner).values())
    for part in parts:
        if isinstance(part, torch.nn.Module):
            yield from (module for module in part.modules() if isinstance(module, Metric))
