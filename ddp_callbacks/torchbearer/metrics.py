"""Metrics of the whole data on every rank, computed by Torchbearer's code from merged state."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torchbearer
from torchbearer.metrics import EpochLambda, Mean, Metric, MetricList, MetricTree, RunningMean, Var
from torchbearer.metrics import Loss as _DecoratedLoss
from torchbearer.metrics.aggregators import RunningMetric

from ddp_callbacks.comm.codec import Json, pack, unpack
from ddp_callbacks.comm.collectives import all_gather_json, all_gather_tensors
from ddp_callbacks.data.batch_logs import BatchLog, interleave_rows, merge_batch_logs
from ddp_callbacks.data.random_state import RunRandomState
from ddp_callbacks.errors import MismatchError
from ddp_callbacks.torchbearer._torchbearer import (
    add_up,
    batches_in_window,
    rows_of,
    run_on,
    set_rows,
    sums_of,
    watching,
    window_of,
    without_running,
)
from ddp_callbacks.torchbearer.base import RUN_RANDOM_STATE, DistributedCallback, State, share_of
from ddp_callbacks.torchbearer.weights import LossWeight, Weight

LossMetric = type(_DecoratedLoss().root)
"""The class inside of Torchbearer's decorators."""


class ReduceMetrics(DistributedCallback):
    """Compute an epoch's metrics over the whole data, before the progress bar and other callbacks see them.

    This is exact for metrics built with Torchbearer's decorators: ``mean``, ``std``, ``var`` over values per sample or
    over one scalar per batch (taken as a mean over the batch's samples), and ``EpochLambda``, which sees all ranks'
    rows in the loader's order. ``running_mean`` (without ``dim``) ends a pass with the window of the whole batches.
    Before the epoch ends, running values are those of this rank, and an ``EpochLambda`` is NaN. For any other metric
    whose value differs between the ranks, you get the mean weighted by samples, and a warning.

    Args:
        weight, reduction: See :class:`ddp_callbacks.torchbearer.weights.LossWeight`; used for the metrics of the loss.
        process_group: ``None`` is the default group.

    Raises:
        MismatchError: A rank lacks a metric; lists all ranks' keys.
    """

    def __init__(
        self,
        weight: Weight | None = None,
        reduction: str | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group)
        self._loss_weight = LossWeight(weight, reduction)
        self._pass: MetricsPass | None = None

    @property
    def current(self) -> MetricsPass | None:
        """The pass under way, if there are several processes."""
        return self._pass

    def on_start_training(self, state: State) -> None:
        if self._pass is not None:
            self._pass.close()  # an earlier run may have raised before its end
        if self.world_size > 1:
            self._pass = MetricsPass(state[torchbearer.METRIC_LIST], self._loss_weight, self.process_group)

    def on_start_validation(self, state: State) -> None:
        self.on_start_training(state)

    def on_end_training(self, state: State) -> None:
        if self._pass is not None:
            self._pass.close()
            self._pass = None

    def on_end_validation(self, state: State) -> None:
        self.on_end_training(state)


class MetricsPass:
    """One pass over the data: records the metrics' inputs, and merges them for the final value."""

    def __init__(self, metric_list: MetricList, loss_weight: LossWeight, group: dist.ProcessGroup | None) -> None:
        self._list = metric_list
        self._loss_weight = loss_weight
        self._group = group
        self._step = -1
        self._samples = 0
        self._rows: list[int] = []
        self._values: dict[str, Any] = {}
        self._weight = 0.0  # of the current batch's loss
        self._local = 0  # samples of the current batch
        self._reduction = "mean"
        self._aggregators = list(aggregators(metric_list))
        self._logs = [BatchLog() for _ in self._aggregators]
        self._windows: dict[str, Any] = {
            str(place): window_of(aggregator)
            for place, (aggregator, _) in enumerate(self._aggregators)
            if isinstance(aggregator, RunningMean)
        }
        self._restore = ExitStack()
        for (aggregator, root), log in zip(self._aggregators, self._logs, strict=True):
            self._record(aggregator, isinstance(root, LossMetric), log)
        self._replace(metric_list, "process", self._process)
        self._replace(metric_list, "process_final", self._process_final)

    def state_dict(self) -> dict[str, Any]:
        """What this rank has recorded, as tensors and plain data; the metrics have their own sums and rows. Local."""
        return {
            "step": self._step,
            "samples": self._samples,
            "rows": list(self._rows),
            "values": dict(self._values),
            "reduction": self._reduction,
            "logs": self._recorded(),
            "windows": dict(self._windows),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the result of :meth:`state_dict`. Local."""
        self._step, self._samples, self._rows = state["step"], state["samples"], list(state["rows"])
        self._values, self._reduction = dict(state["values"]), state["reduction"]
        self._windows = dict(state["windows"])
        for log, saved in zip(self._logs, state["logs"], strict=True):
            log.steps, log.weights, log.values = (list(column) for column in saved)

    def _recorded(self) -> list[Any]:
        """For a running mean only what its window needs."""
        most = [batches_in_window(a) if isinstance(a, RunningMean) else len(self._rows) for a, _ in self._aggregators]
        return [
            [column[-length:] for column in (log.steps, log.weights, log.values)]
            for log, length in zip(self._logs, most, strict=True)
        ]

    def close(self) -> None:
        """Restore the metrics."""
        self._restore.close()

    def _record(self, aggregator: Metric, is_loss: bool, log: BatchLog) -> None:
        """Let scalars of a batch wait in ``log`` for those of the other ranks; values per sample can be summed here."""

        def process(values: torch.Tensor) -> None:
            if values.dim() == 0:
                log.add(self._step, self._weight if is_loss else self._local, values)
            else:
                type(aggregator).process(aggregator, values)

        def note(values: torch.Tensor, mean: torch.Tensor) -> None:
            if mean.dim() == 0:
                weight, total = self._sum_of(values, is_loss)
                log.add(self._step, weight, total)

        if isinstance(aggregator, Mean | Var):
            self._replace(aggregator, "process", process)
        elif isinstance(aggregator, RunningMean):
            self._restore.enter_context(watching(aggregator, note))
        elif isinstance(aggregator, EpochLambda):  # a function of only some of the epoch's rows has no meaning
            self._restore.enter_context(without_running(aggregator))

    def _sum_of(self, values: torch.Tensor, is_loss: bool) -> tuple[float, torch.Tensor]:
        """What this rank adds to the mean of a batch: the number that is divided by, and the sum."""
        if values.dim():
            return values.numel(), values.sum()
        weight = self._weight if is_loss else self._local
        if is_loss and self._reduction == "sum":
            return weight, values
        return weight, values * weight if weight else torch.zeros_like(values)  # not NaN, the mean over nothing

    def _replace(self, metric: Metric, name: str, method: Any) -> None:
        setattr(metric, name, method)
        self._restore.callback(vars(metric).pop, name, None)

    def _process(self, state: State) -> dict[str, Any]:
        self._step += 1
        share = share_of(state)
        self._local = share.local
        self._samples += share.local
        self._reduction = self._loss_weight.reduction(state)
        self._rows.append(0)
        if share.local:
            self._weight, _ = self._loss_weight.of(state)
            prediction = state[torchbearer.Y_PRED]
            self._rows[-1] = prediction.shape[0] if isinstance(prediction, torch.Tensor) and prediction.dim() else 0
            self._values = MetricList.process(self._list, state)
        return dict(self._values)

    def _process_final(self, state: State) -> dict[str, Any]:
        self.close()
        random_state = state.get(RUN_RANDOM_STATE)
        running = self._merge(random_state if random_state is not None and random_state.is_open else None)
        final = running | MetricList.process_final(self._list, state)
        is_settled = not any(_may_differ(metric) for metric, _ in self._aggregators)
        return final if is_settled else _settle(final, self._samples, self._group)

    def _merge(self, random_state: RunRandomState | None) -> dict[str, Any]:
        """Merge the metrics; return the running values, which Torchbearer has no final value for.

        Callbacks draw next, and the same on all ranks, so the random state travels along.
        """
        mine = [[_found_in(aggregator) for aggregator, _ in self._aggregators], self._recorded()]
        tensors: list[torch.Tensor] = []
        names = [aggregator.name for aggregator, _ in self._aggregators]
        header: Json = [self._rows, names, pack([*mine, random_state and random_state.offer()], tensors)]
        gathered = all_gather_tensors(header, tensors, "the merging of the metrics", self._group)
        rows, by_rank, packed = zip(*(header for header, _ in gathered), strict=True)
        if any(other != by_rank[0] for other in by_rank):
            raise MismatchError(_mismatch(list(by_rank)))
        unpacked = [unpack(one, parts) for one, (_, parts) in zip(packed, gathered, strict=True)]
        found, logs, offered = zip(*unpacked, strict=True)
        if random_state is not None:
            random_state.accept(offered[0])
        running: dict[str, Any] = {}
        for position, (aggregator, root) in enumerate(self._aggregators):
            of_ranks = [own[position] for own in found]
            reduction = self._reduction if isinstance(root, LossMetric) else "mean"
            of_batches = [BatchLog(*own[position]) for own in logs]
            if isinstance(aggregator, Mean | Var):
                add_up(aggregator, of_ranks)
                for value in merge_batch_logs(of_batches, reduction).values:
                    aggregator.process(value)
            elif isinstance(aggregator, RunningMean) and any(log.steps for log in of_batches):
                means = means_of_batches(of_batches, reduction)
                running[aggregator.name] = run_on(aggregator, self._windows[str(position)], means.steps, means.values)
            elif isinstance(aggregator, EpochLambda):
                predictions, targets = zip(*of_ranks, strict=True)
                set_rows(aggregator, interleave_rows(predictions, rows), interleave_rows(targets, rows))
        return running


def _found_in(aggregator: Metric) -> Any:
    """What a metric has added up or collected on this rank."""
    if isinstance(aggregator, Mean | Var):
        return sums_of(aggregator)
    return rows_of(aggregator) if isinstance(aggregator, EpochLambda) else None


def means_of_batches(logs: Sequence[BatchLog], reduction: str) -> BatchLog:
    """The values of the whole batches of which each rank has logged its sum for a running mean.

    Args:
        logs: One per rank.
        reduction: ``"mean"``, or ``"sum"`` if the value of a batch is a sum.
    """
    log = merge_batch_logs(logs, "sum")
    if reduction == "mean":
        log.values = [total / weight for total, weight in zip(log.values, log.weights, strict=True)]
    return log


def aggregators(metric: Metric, root: Metric | None = None) -> Iterator[tuple[Metric, Metric]]:
    """The stateful metrics, each with the root of its tree."""
    if isinstance(metric, MetricList):
        for item in metric.metric_list:
            yield from aggregators(item)
    elif isinstance(metric, MetricTree):
        top = metric.root if root is None else root
        yield from aggregators(metric.root, top)
        for child in metric.children:
            yield from aggregators(child, top)
    elif isinstance(getattr(metric, "metric", None), Metric):  # ToDict, DefaultAccuracy
        yield from aggregators(metric.metric, root)
    else:
        yield metric, metric if root is None else root


def _may_differ(metric: Metric) -> bool:
    """Whether the metric's final value may differ between the ranks after the merging."""
    if isinstance(metric, Mean | Var | EpochLambda | RunningMetric):
        return False  # the last has no final value
    return type(metric).process_final is not Metric.process_final


def _settle(final: dict[str, Any], samples: int, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Check that all ranks have the same metrics, and agree on those whose values differ."""
    mine = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in final.items()}
    numbers = {key: value for key, value in mine.items() if _is_numeric(value)}
    gathered = all_gather_json([sorted(mine), numbers, samples], "the final metrics", group)
    if any(keys != gathered[0][0] for keys, _, _ in gathered):
        raise MismatchError(_mismatch([keys for keys, _, _ in gathered]))
    total = sum(count for _, _, count in gathered)
    for key in numbers:
        values = [others.get(key) for _, others, _ in gathered]
        if any(repr(value) != repr(values[0]) for value in values) and total:
            warnings.warn(
                f"The metric {key} is not built from Torchbearer's decorators and differs between processes; its "
                "epoch value is the mean over the processes, weighted by samples.",
                stacklevel=2,
            )
            weighted = [
                torch.tensor(value, dtype=torch.float64) * (count / total)
                for value, (_, _, count) in zip(values, gathered, strict=True)
                if count
            ]
            final[key] = torch.stack(weighted).sum(0).tolist()
    return final


def _is_numeric(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_numeric(item) for item in value)
    return isinstance(value, int | float)


def _mismatch(names: list[list[str]]) -> str:
    lists = "\n".join(f"  rank {rank}: {', '.join(dict.fromkeys(keys))}" for rank, keys in enumerate(names))
    return f"the ranks have different metrics:\n{lists}\nGive every process the same metrics=[...], in the same order."
