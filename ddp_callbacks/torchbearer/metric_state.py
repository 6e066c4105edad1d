"""The metrics of a pass under way: saved on each rank, and put back on as many ranks or on another number.

On as many ranks each gets back what it had. On another number rank 0 gets what all had, merged as at the end of a pass,
and the others begin with nothing: sums add up, rows come into the loader's order, and scalars of parts of a batch are
joined to that of the batch. A metric of any other kind goes on from rank 0's values on every rank.
"""

from __future__ import annotations

from typing import Any

from torchbearer.metrics import EpochLambda, Mean, Metric, MetricList, RunningMean, Var

from ddp_callbacks.checkpoints.attributes import encode, plain_attributes
from ddp_callbacks.data.batch_logs import BatchLog, interleave_rows, merge_batch_logs
from ddp_callbacks.torchbearer._torchbearer import add_up, metrics_within, rows_in, run_on, set_rows, window_of
from ddp_callbacks.torchbearer.base import LocalStates
from ddp_callbacks.torchbearer.metrics import LossMetric, MetricsPass, aggregators, means_of_batches


def kept_state(metric_list: MetricList) -> list[dict[str, Any]]:
    """What this rank's metrics keep from pass to pass, such as the last values of a running mean. Local."""
    return [
        {} if isinstance(metric, Mean | Var | EpochLambda) else encode(plain_attributes(metric))
        for metric in metrics_within(metric_list)
    ]


def load_kept_state(metric_list: MetricList, kept: list[dict[str, Any]]) -> None:
    """Inverse of :func:`kept_state`."""
    for metric, attributes in zip(metrics_within(metric_list), kept, strict=True):
        vars(metric).update(attributes)


def metric_state(metric_list: MetricList, current: MetricsPass | None, samples: int) -> dict[str, Any]:
    """What this rank's metrics hold in the middle of a pass. Local.

    Args:
        current: What :class:`ReduceMetrics` records of the pass; ``None`` with a single process.
        samples: Of this rank, so far in the pass.
    """
    return {
        "metrics": [encode(plain_attributes(metric)) for metric in metrics_within(metric_list)],
        "pass": None if current is None else encode(current.state_dict()),
        "samples": samples,
    }


def load_metric_state(metric_list: MetricList, current: MetricsPass | None, states: LocalStates, batches: int) -> None:
    """Go on from what :func:`metric_state` has returned. Local.

    Args:
        states: What it has returned on each rank, decoded.
        batches: The number of batches of the pass so far.
    """
    load_kept_state(metric_list, states.mine["metrics"])
    if not states.is_same_world:
        _Merging(metric_list, states, batches).load(metric_list, current)
    elif current is not None and states.mine["pass"] is not None:
        current.load_state_dict(states.mine["pass"])


class _Merging:
    """Gives what all ranks had to rank 0."""

    def __init__(self, metric_list: MetricList, states: LocalStates, batches: int) -> None:
        self._states, self._batches = states, batches
        self._places = {id(metric): place for place, metric in enumerate(metrics_within(metric_list))}
        self._passes = [state["pass"] for state in states.of_ranks if state["pass"] is not None]
        self._reduction = self._passes[0]["reduction"] if self._passes else "mean"
        self._rows = [recorded["rows"] for recorded in self._passes]

    def load(self, metric_list: MetricList, current: MetricsPass | None) -> None:
        logs: list[list[Any]] = []
        windows: dict[str, Any] = {}
        collected = 0
        for position, (aggregator, root) in enumerate(aggregators(metric_list)):
            log: list[Any] = [[], [], []]
            if isinstance(aggregator, Mean | Var):
                log = self._load_sums(aggregator, position, isinstance(root, LossMetric), current is None)
            elif isinstance(aggregator, EpochLambda):
                collected = self._load_rows(aggregator) or collected
            elif isinstance(aggregator, RunningMean):
                self._load_window(aggregator, position, isinstance(root, LossMetric))
                windows[str(position)] = window_of(aggregator)
            logs.append(log)
        if current is not None:
            current.load_state_dict(self._recorded(logs, collected) | {"windows": windows})

    def _load_window(self, aggregator: RunningMean, position: int, is_loss: bool) -> None:
        """That of the whole batches, from which each rank goes on; that of a single process is there."""
        logs = [BatchLog(*recorded["logs"][position]) for recorded in self._passes]
        log = means_of_batches(logs, self._reduction if is_loss else "mean")
        if log.steps:
            run_on(aggregator, self._passes[0]["windows"][str(position)], log.steps, log.values)

    def _load_sums(self, aggregator: Mean | Var, position: int, is_loss: bool, is_alone: bool) -> list[Any]:
        is_first = self._states.rank == 0
        add_up(aggregator, self._attributes(aggregator) if is_first else [])
        logs = [BatchLog(*recorded["logs"][position]) for recorded in self._passes]
        log = merge_batch_logs(logs, self._reduction if is_loss else "mean")
        if is_alone:
            for value in log.values:
                type(aggregator).process(aggregator, value)
        return [log.steps, log.weights, log.values] if is_first else [[], [], []]

    def _load_rows(self, aggregator: EpochLambda) -> int:
        """Returns the number of rows of this rank."""
        if self._states.rank != 0:
            set_rows(aggregator, None, None)
            return 0
        predictions, targets = zip(*map(rows_in, self._attributes(aggregator)), strict=True)
        rows = self._rows or [[0 if part is None else part.shape[0]] for part in predictions]
        joined = interleave_rows(predictions, rows)
        set_rows(aggregator, joined, interleave_rows(targets, rows))
        return 0 if joined is None else joined.shape[0]

    def _attributes(self, aggregator: Metric) -> list[dict[str, Any]]:
        place = self._places[id(aggregator)]
        return [state["metrics"][place] for state in self._states.of_ranks]

    def _recorded(self, logs: list[list[Any]], collected: int) -> dict[str, Any]:
        """What rank 0 has recorded if it has had all samples, and another rank if it has had none."""
        is_first = self._states.rank == 0
        values = self._passes[0]["values"] if self._passes else {}
        return {
            "step": self._batches - 1,
            "samples": sum(state["samples"] for state in self._states.of_ranks) if is_first else 0,
            "rows": ([collected] + [0] * self._batches)[: self._batches],
            "values": values,
            "reduction": self._reduction,
            "logs": logs,
        }
