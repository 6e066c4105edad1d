"""What the ranks' metrics have seen, merged: at the end of a pass, or when a run resumes in one on other ranks.

Sums add up, rows come into the loader's order, and scalars of parts of a batch are joined to that of the batch. All of
this is local.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchbearer.metrics import EpochLambda, Mean, Metric, MetricList, RunningMean, Var
from torchbearer.metrics import Loss as _DecoratedLoss

from ddp_callbacks.data.batch_logs import BatchLog, interleave_rows, merge_batch_logs
from ddp_callbacks.torchbearer._torchbearer import (
    add_up,
    aggregators,
    held,
    metrics_within,
    rows_of,
    run_on,
    set_rows,
    window_of,
)
from ddp_callbacks.torchbearer.base import LocalStates

LossMetric = type(_DecoratedLoss().root)
"""The class inside of Torchbearer's decorators."""


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


def join(
    pairs: Sequence[tuple[Metric, Metric]],
    held_by: Sequence[Sequence[dict[str, Any]]],
    logs_by: Sequence[Sequence[Any]],
    rows_by: Sequence[Sequence[int]],
    windows: dict[str, Any],
    loss_reduction: str,
) -> dict[str, Any]:
    """Let each metric hold what those of all ranks have had in a pass; return the values of running means. Local.

    Args:
        pairs: The result of :func:`aggregators`.
        held_by: By rank and metric, what it has added up or collected.
        logs_by: By rank and metric, the columns of its log; none from a single process, which keeps none.
        rows_by: By rank, the number of rows in each batch.
        windows: Of running means, by place in ``pairs``, when the pass began.
        loss_reduction: ``"mean"`` or ``"sum"``, for metrics of the loss.
    """
    running: dict[str, Any] = {}
    for place, (aggregator, root) in enumerate(pairs):
        of_ranks = [own[place] for own in held_by]
        logs = [BatchLog(*own[place]) for own in logs_by]
        reduction = loss_reduction if isinstance(root, LossMetric) else "mean"
        if isinstance(aggregator, Mean | Var):
            add_up(aggregator, of_ranks)
            for value in merge_batch_logs(logs, reduction).values:
                type(aggregator).process(aggregator, value)
        elif isinstance(aggregator, RunningMean) and any(log.steps for log in logs):
            means = means_of_batches(logs, reduction)
            running[aggregator.name] = run_on(aggregator, windows[str(place)], means.steps, means.values)
        elif isinstance(aggregator, EpochLambda):
            set_rows(aggregator, *(interleave_rows(parts, rows_by) for parts in rows_of(of_ranks)))
    return running


def load_merged(metric_list: MetricList, states: LocalStates) -> dict[str, Any]:
    """Give rank 0 what the metrics of all ranks have had, and the others nothing, in the middle of a pass.

    Args:
        states: What :meth:`ReduceMetrics.local_state` has returned on each rank, decoded.

    Returns:
        What this rank's pass is then to have recorded; see :meth:`MetricsPass.load_state_dict`.
    """
    pairs = aggregators(metric_list)
    place_of = {id(metric): place for place, (metric, _) in enumerate(metrics_within(metric_list))}
    held_by = [[state["metrics"][place_of[id(aggregator)]] for aggregator, _ in pairs] for state in states.of_ranks]
    passes = [state["pass"] for state in states.of_ranks if state["pass"] is not None]
    first: dict[str, Any] = passes[0] if passes else {"values": {}, "reduction": "mean", "windows": {}}
    rows_by = [one["rows"] for one in passes] or [[]]
    join(pairs, held_by, [one["logs"] for one in passes], rows_by, first["windows"], first["reduction"])
    collected, windows = 0, {}
    for place, (aggregator, _) in enumerate(pairs):
        if isinstance(aggregator, RunningMean):
            windows[str(place)] = window_of(aggregator)  # of the whole batches, on every rank
        elif states.rank and held(aggregator):
            add_up(aggregator, [])
            if isinstance(aggregator, EpochLambda):
                set_rows(aggregator, None, None)
        elif isinstance(aggregator, EpochLambda):
            ((rows,), _) = rows_of([held(aggregator)])
            collected = 0 if rows is None else rows.shape[0]
    return {
        "step": states.mine["step"],
        "samples": sum(one["samples"] for one in passes) / states.world_size,
        "rows": [collected],
        "values": first["values"],
        "reduction": first["reduction"],
        "logs": [[[], [], []] for _ in pairs],
        "windows": windows,
    }
