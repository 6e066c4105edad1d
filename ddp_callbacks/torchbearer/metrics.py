"""Metrics of the whole data on every rank, computed by Torchbearer's code from merged state."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torchbearer
from torchbearer.metrics import EpochLambda, Mean, Metric, MetricList, RunningMean, Var

from ddp_callbacks.checkpoints.attributes import decode, encode, plain_attributes
from ddp_callbacks.comm.codec import Json, pack, unpack
from ddp_callbacks.comm.collectives import all_gather_json, all_gather_tensors
from ddp_callbacks.data.batch_logs import BatchLog
from ddp_callbacks.data.random_state import RunRandomState
from ddp_callbacks.errors import MismatchError
from ddp_callbacks.torchbearer._torchbearer import (
    aggregators,
    batches_in_window,
    held,
    metrics_within,
    watching,
    window_of,
    without_running,
)
from ddp_callbacks.torchbearer.base import (
    RUN_RANDOM_STATE,
    DistributedCallback,
    LocalStates,
    LossWeight,
    State,
    Weight,
    share_of,
)
from ddp_callbacks.torchbearer.merging import LossMetric, join, load_merged

_RECORDED = ("step", "samples", "rows", "values", "reduction", "windows")  # of a pass, next to its logs


class ReduceMetrics(DistributedCallback):
    """Compute an epoch's metrics over the whole data, before the progress bar and other callbacks see them.

    This is exact for metrics built with Torchbearer's decorators: ``mean``, ``std``, ``var`` over values per sample or
    over one scalar per batch (taken as a mean over the batch's samples), and ``EpochLambda``, which sees all ranks'
    rows in the loader's order. ``running_mean`` (without ``dim``) ends a pass with the window of the whole batches.
    Before the epoch ends, running values are those of this rank, and an ``EpochLambda`` is NaN. For any other metric
    whose value differs between the ranks, you get the mean weighted by samples, and a warning.

    Args:
        weight, reduction: See :class:`ddp_callbacks.torchbearer.base.LossWeight`; used for the metrics of the loss.
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
        self._is_in_pass = False
        self._pass: MetricsPass | None = None  # on several processes

    def on_start_training(self, state: State) -> None:
        self.on_end_training(state)  # an earlier run may have raised before its end
        self._is_in_pass = True
        if self.world_size > 1:
            self._pass = MetricsPass(state[torchbearer.METRIC_LIST], self._loss_weight, self.process_group)

    def on_end_training(self, state: State) -> None:
        self._is_in_pass = False
        if self._pass is not None:
            self._pass.close()
            self._pass = None

    on_start_validation, on_end_validation = on_start_training, on_end_training

    def local_state(self, state: State) -> dict[str, Any]:
        """In a pass all that the metrics hold; else what they keep from pass to pass, as running means do."""
        return {
            "step": state[torchbearer.BATCH] if self._is_in_pass else None,
            "metrics": [
                encode(plain_attributes(metric)) if self._is_in_pass or not held(metric) else {}
                for metric, _ in metrics_within(state[torchbearer.METRIC_LIST])
            ],
            "pass": None if self._pass is None else encode(self._pass.state_dict()),
        }

    def load_local_state(self, states: LocalStates, state: State) -> None:
        """On another number of ranks, a metric that cannot be merged continues from rank 0's values on each."""
        metrics, is_in_pass = state[torchbearer.METRIC_LIST], states.mine["step"] is not None
        if not is_in_pass:
            metrics.reset(state)  # one that the criterion chooses is chosen there
        states = LocalStates(decode(states.of_ranks, state[torchbearer.DEVICE]), states.rank, states.world_size)
        for (metric, _), attributes in zip(metrics_within(metrics), states.mine["metrics"], strict=True):
            vars(metric).update(attributes)
        recorded = states.mine["pass"]
        if is_in_pass and not states.is_same_world:
            recorded = load_merged(metrics, states)
        if self._pass is not None and recorded is not None:
            self._pass.load_state_dict(recorded)


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
        self._aggregators = aggregators(metric_list)
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
        return {name: getattr(self, f"_{name}") for name in _RECORDED} | {"logs": self._recorded()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of :meth:`state_dict`. Local."""
        for name in _RECORDED:
            setattr(self, f"_{name}", state[name])
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
        is_settled = not any(_may_differ(metric) for metric, _ in metrics_within(self._list))
        return final if is_settled else _settle(final, self._samples, self._group)

    def _merge(self, random_state: RunRandomState | None) -> dict[str, Any]:
        """Merge the metrics; return the running values, which Torchbearer has no final value for.

        Callbacks draw next, and the same on all ranks, so the random state travels along.
        """
        mine = [[held(aggregator) for aggregator, _ in self._aggregators], self._recorded()]
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
        return join(self._aggregators, found, logs, rows, self._windows, self._reduction)


def _may_differ(metric: Metric) -> bool:
    """Whether the metric's final value may differ between the ranks after the merging: a user's that has one."""
    kind = type(metric)
    return kind.process_final is not Metric.process_final and not kind.__module__.startswith("torchbearer.")


def _settle(final: dict[str, Any], samples: float, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """Check that all ranks have the same metrics, and agree on those whose values differ."""
    mine = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in final.items()}
    numbers = {key: value for key, value in mine.items() if _is_numeric(value)}
    gathered = all_gather_json([sorted(mine), numbers, samples], "the final metrics", group)
    by_rank, found, counts = zip(*gathered, strict=True)
    if any(keys != by_rank[0] for keys in by_rank):
        raise MismatchError(_mismatch(list(by_rank)))
    for key in numbers:
        values = [others.get(key) for others in found]
        if any(repr(value) != repr(values[0]) for value in values) and sum(counts):
            warnings.warn(
                f"The metric {key} is not built from Torchbearer's decorators and differs between processes; its "
                "epoch value is the mean over the processes, weighted by samples.",
                stacklevel=2,
            )
            counted = [torch.tensor(v, dtype=torch.float64) * n for v, n in zip(values, counts, strict=True) if n]
            final[key] = (torch.stack(counted).sum(0) / sum(counts)).tolist()
    return final


def _is_numeric(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_numeric(item) for item in value)
    return isinstance(value, int | float)


def _mismatch(names: list[list[str]]) -> str:
    lists = "\n".join(f"  rank {rank}: {', '.join(dict.fromkeys(keys))}" for rank, keys in enumerate(names))
    return f"the ranks have different metrics:\n{lists}\nGive every process the same metrics=[...], in the same order."
