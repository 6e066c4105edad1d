"""Metrics of the whole data on every rank, computed by Torchbearer's code from merged state."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torchbearer
from torchbearer.metrics import EpochLambda, Mean, Metric, MetricList, MetricTree, Var
from torchbearer.metrics import Loss as _DecoratedLoss
from torchbearer.metrics.aggregators import RunningMetric

from ddp_callbacks.comm.codec import Json, pack, unpack
from ddp_callbacks.comm.collectives import all_gather_json, all_gather_tensors
from ddp_callbacks.data.batch_logs import BatchLog, interleave_rows, join_batch_logs
from ddp_callbacks.data.random_state import RunRandomState
from ddp_callbacks.errors import MismatchError
from ddp_callbacks.torchbearer._torchbearer import (
    add_up,
    disable_running,
    enable_running,
    is_running,
    rows_of,
    set_rows,
    sums_of,
)
from ddp_callbacks.torchbearer.base import RUN_RANDOM_STATE, DistributedCallback, State, share_of
from ddp_callbacks.torchbearer.weights import LossWeight, Weight

LossMetric = type(_DecoratedLoss().root)
"""The class inside of Torchbearer's decorators."""


class ReduceMetrics(DistributedCallback):
    """Compute an epoch's metrics over the whole data, before the progress bar and other callbacks see them.

    This is exact for metrics built with Torchbearer's decorators: ``mean``, ``std``, ``var`` over values per sample or
    over one scalar per batch (taken as a mean over the batch's samples), and ``EpochLambda``, which sees all ranks'
    rows in the loader's order. Before the epoch ends, ``running_*`` values are local, and an ``EpochLambda`` is NaN.
    For any other metric whose value differs between the ranks, you get the mean weighted by samples, and a warning.

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
        self._recorders = {id(a): _record(a, root, self) for a, root in self._aggregators if isinstance(a, Mean | Var)}
        # A function of only some of the epoch's rows has no meaning, so the running value is NaN.
        self._running = [a for a, _ in self._aggregators if isinstance(a, EpochLambda) and is_running(a)]
        for aggregator in self._running:
            disable_running(aggregator)
        metric_list.process = self._process
        metric_list.process_final = self._process_final

    def state_dict(self) -> dict[str, Any]:
        """What this rank has recorded, as tensors and plain data; the metrics have their own sums and rows. Local."""
        logs = [self._recorders.get(id(aggregator)) for aggregator, _ in self._aggregators]
        return {
            "step": self._step,
            "samples": self._samples,
            "rows": list(self._rows),
            "values": dict(self._values),
            "reduction": self._reduction,
            "logs": [None if log is None else [log.steps, log.weights, log.values] for log in logs],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the result of :meth:`state_dict`. Local."""
        self._step, self._samples, self._rows = state["step"], state["samples"], list(state["rows"])
        self._values, self._reduction = dict(state["values"]), state["reduction"]
        for (aggregator, _), log in zip(self._aggregators, state["logs"], strict=True):
            if log is not None:
                recorder = self._recorders[id(aggregator)]
                recorder.steps, recorder.weights, recorder.values = (list(column) for column in log)

    def close(self) -> None:
        """Restore the metrics."""
        self._list.__dict__.pop("process", None)
        self._list.__dict__.pop("process_final", None)
        for aggregator, _ in self._aggregators:
            aggregator.__dict__.pop("process", None)
        for aggregator in self._running:
            enable_running(aggregator)

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

    def log(self, aggregator: Metric, root: Metric, value: torch.Tensor) -> None:
        """Keep a scalar of this batch until the end of the pass."""
        weight = self._weight if isinstance(root, LossMetric) else float(self._local)
        self._recorders[id(aggregator)].add(self._step, weight, value)

    def _process_final(self, state: State) -> dict[str, Any]:
        random_state = state.get(RUN_RANDOM_STATE)
        self._merge(random_state if random_state is not None and random_state.is_open else None)
        for aggregator, _ in self._aggregators:
            aggregator.__dict__.pop("process", None)
        final = MetricList.process_final(self._list, state)
        is_settled = not any(_may_differ(metric) for metric, _ in self._aggregators)
        return final if is_settled else _settle(final, self._samples, self._group)

    def _merge(self, random_state: RunRandomState | None) -> None:
        """Callbacks draw next, and the same on all ranks, so the random state travels along."""
        mine = [self._export(aggregator) for aggregator, _ in self._aggregators]
        tensors: list[torch.Tensor] = []
        names = [aggregator.name for aggregator, _ in self._aggregators]
        header: Json = [self._rows, names, pack([mine, random_state and random_state.offer()], tensors)]
        gathered = all_gather_tensors(header, tensors, "the merging of the metrics", self._group)
        rows, by_rank, packed = zip(*(header for header, _ in gathered), strict=True)
        if any(other != by_rank[0] for other in by_rank):
            raise MismatchError(_mismatch(list(by_rank)))
        states, offered = zip(
            *(unpack(own, parts) for own, (_, parts) in zip(packed, gathered, strict=True)), strict=True
        )
        if random_state is not None:
            random_state.accept(offered[0])
        for position, (aggregator, root) in enumerate(self._aggregators):
            self._import(aggregator, root, [state[position] for state in states], list(rows))

    def _export(self, aggregator: Metric) -> Any:
        if isinstance(aggregator, Mean | Var):
            log = self._recorders[id(aggregator)]
            return [sums_of(aggregator), [log.steps, log.weights, log.values]]
        if isinstance(aggregator, EpochLambda):
            return rows_of(aggregator)
        return None

    def _import(self, aggregator: Metric, root: Metric, states: list[Any], rows: list[list[int]]) -> None:
        if isinstance(aggregator, Mean | Var):
            add_up(aggregator, [sums for sums, _ in states])
            reduction = self._reduction if isinstance(root, LossMetric) else "mean"
            for value in join_batch_logs([BatchLog(*log) for _, log in states], reduction):
                type(aggregator).process(aggregator, value)
        elif isinstance(aggregator, EpochLambda):
            predictions, targets = ([own[column] for own in states] for column in (0, 1))
            set_rows(aggregator, interleave_rows(predictions, rows), interleave_rows(targets, rows))


def _record(aggregator: Metric, root: Metric, current: MetricsPass) -> BatchLog:
    """Make ``aggregator`` log scalars instead of aggregating them; values per sample pass through."""

    def process(value: torch.Tensor) -> None:
        if value.dim() == 0:
            current.log(aggregator, root, value)
        else:
            type(aggregator).process(aggregator, value)

    aggregator.process = process
    return BatchLog()


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
