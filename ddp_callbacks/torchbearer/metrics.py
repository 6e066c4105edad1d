"""Compute metrics of the whole data on every rank, by Torchbearer's code from merged state.

Sums are added up, rows put into the loader's order, and scalars of the parts of a batch combined to that of the batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torchbearer
from torchbearer import Callback
from torchbearer.metrics import EpochLambda, Mean, Metric, MetricList, RunningMean, Var

from ddp_callbacks.checkpoints import LocalStates
from ddp_callbacks.comm.collectives import all_gather_object, broadcast_object
from ddp_callbacks.data.attributes import changed, checksums_of, decode, encode, plain_attributes
from ddp_callbacks.data.batch_logs import BatchLog, by_step, merge_batch_logs
from ddp_callbacks.data.collected import Collected
from ddp_callbacks.data.nested import without_rows
from ddp_callbacks.data.random_state import RunRandomState
from ddp_callbacks.errors import MismatchError, warn
from ddp_callbacks.process_group import get_rank, get_world_size
from ddp_callbacks.replacement import Replaced, Replacements
from ddp_callbacks.torchbearer import _torchbearer
from ddp_callbacks.torchbearer.base import Call, DistributedCallback, aggregator_of, has_event
from ddp_callbacks.torchbearer.loss_weight import LossWeight, Weight
from ddp_callbacks.torchbearer.metric_check import REMEDY, LossMetric, MetricCheck, rows_of
from ddp_callbacks.torchbearer.state import ROWS, RUN_RANDOM_STATE, Event, State, share_of

_ADDING = ("on_criterion", "on_criterion_validation")  # events in which callbacks add to the loss


class ReduceMetrics(DistributedCallback):
    """Compute an epoch's metrics over the whole data, before the progress bar and other callbacks see them.

    This is exact for metrics built with Torchbearer's decorators: ``mean``, ``std``, ``var`` over values per sample or
    over one scalar per batch (taken as a mean over the batch's samples), and ``EpochLambda``, which sees all ranks'
    rows in the loader's order. ``running_mean`` (without ``dim``) ends a pass with the window of the whole batches, and
    forgets those of a pass that has raised.
    Before the epoch ends, running values are those of this rank, and an ``EpochLambda`` is NaN. For any other metric
    whose value differs between the ranks, you get the mean weighted by samples, and a warning.

    Args:
        weight, reduction: For metrics of the loss, see :class:`ddp_callbacks.torchbearer.loss_weight.LossWeight`.

    Raises:
        ConfigurationError: An ``EpochLambda`` gets predictions or targets whose first dimension does not hold samples,
            or rows of samples.
        MismatchError: A rank lacks a metric; lists all ranks' keys.
    """

    def __init__(self, weight: Weight | None = None, reduction: str | None = None) -> None:
        super().__init__()
        self._loss_weight = LossWeight(weight, reduction)
        self._is_in_pass = False
        self._pass: MetricsPass | None = None  # the current pass, on several processes
        self._collected = Collected()
        self._check = MetricCheck()

    def on_init(self, state: State) -> None:
        super().on_init(state)
        for name in ("on_start_training", "on_start_validation"):
            Replaced(state[torchbearer.CALLBACK_LIST], name, self._beginning)

    @contextmanager
    def calling(self, call: Call) -> Iterator[None]:
        """Restore the metrics of a pass that has raised."""
        try:
            yield
        finally:
            self._end()

    def _beginning(self, event: Event, state: State) -> None:
        """Begin a pass after all callbacks: they may replace the list of metrics."""
        event(state)
        self._end()
        self._is_in_pass = True
        if self.world_size > 1:
            self._pass = MetricsPass(state, self._loss_weight, self._collected, self._check)

    def on_end_training(self, state: State) -> None:
        self._end()

    on_end_validation = on_end_training

    def _end(self) -> None:
        self._is_in_pass = False
        if self._pass is not None:
            self._pass.close()
            self._pass = None

    def local_state(self, state: State) -> dict[str, Any]:
        """Return the metrics' whole state in a pass; otherwise only the part that they keep from pass to pass."""
        return {
            "is_in_pass": self._is_in_pass,
            "metrics": [
                encode(plain_attributes(metric)) if self._is_in_pass or not _torchbearer.held(metric) else {}
                for metric, _ in _torchbearer.metrics_within(self._list_in(state))
            ],
            "pass": None if self._pass is None else encode(self._pass.state_dict()),
        }

    def load_local_state(self, states: LocalStates, state: State) -> None:
        """Continue. A user's metric whose state cannot be saved, or given to another number of ranks, begins again."""
        metric_list, is_in_pass = self._list_in(state), states.mine["is_in_pass"]
        if not is_in_pass:
            metric_list.reset(state)  # this chooses a metric that depends on the criterion
        states = LocalStates(decode(states.of_ranks, state[torchbearer.DEVICE]), states.rank, states.world_size)
        metrics = list(_torchbearer.metrics_within(metric_list))
        for place, (metric, _) in enumerate(metrics):
            of_ranks = [found["metrics"][place] for found in states.of_ranks]
            lost = _lost(metric, of_ranks, states.is_same_world, state) if is_in_pass else []
            vars(metric).update({} if lost else states.mine["metrics"][place])
            if lost and states.rank == 0:
                warn(_cannot_continue(metric, lost, len(of_ranks), states.is_same_world))
        recorded = states.mine["pass"]
        if is_in_pass and not states.is_same_world:
            recorded, running = _load_merged(metrics, states, self._loss_weight.reduction(state))
            state[torchbearer.METRICS].update(running)
        if self._pass is not None and recorded is not None:
            self._pass.load_state_dict(recorded)

    def _list_in(self, state: State) -> MetricList:
        """Return the pass's list of metrics, between two passes the Trial's: callbacks may replace it for a pass."""
        return (state if self._is_in_pass else state[torchbearer.SELF].state)[torchbearer.METRIC_LIST]


class MetricsPass:
    """One pass over the data: records the metrics' inputs, and merges them for the final value."""

    def __init__(self, state: State, loss_weight: LossWeight, collected: Collected, check: MetricCheck) -> None:
        self._list = state[torchbearer.METRIC_LIST]
        self._loss_weight, self._collected = loss_weight, collected
        collected.begin([state[torchbearer.MODEL], *state[torchbearer.CALLBACK_LIST]])
        self._reduction = loss_weight.reduction(state)
        self._samples = 0
        is_dealt = aggregator_of(state) is not None  # in predict(), the ranks compute whole batches in turn
        self._stride = get_world_size() if is_dealt else 1
        self._step = (get_rank() if is_dealt else 0) - self._stride  # the current batch
        self._terms: dict[Callback, torch.Tensor] = {}  # that callbacks have added to its loss, if losses are sums
        self._added = BatchLog()  # the loss, and these terms, of each batch
        self._local, self._weight = 0, 0.0  # the current batch's number of samples, and the weight of its loss
        self._metrics = list(_torchbearer.metrics_within(self._list))
        self._check, self._compared = check, check.begin(self._metrics, state[torchbearer.MODEL].training)
        self._first: list[torch.Tensor] | None = None  # this rank's rows of the first batch, to compare
        self._logs = [BatchLog() for _ in self._metrics]
        self._windows = [_torchbearer.window_of(metric) for metric, _ in self._metrics]  # at the start of the pass
        self._restore = Replacements()
        for place, (metric, root) in enumerate(self._metrics):
            self._record(place, metric, isinstance(root, LossMetric))
        for callback in state[torchbearer.CALLBACK_LIST] if self._reduction == "sum" else ():
            for event in _ADDING:
                if has_event(callback, event):
                    self._restore.replace(callback, event, functools.partial(self._note_term, callback))
        self._restore.replace(self._list, "process", self._process)
        self._restore.replace(self._list, "process_final", self._process_final)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's records as tensors and plain data, without the metrics' own sums and rows. Local."""
        logs = [log.columns() for log in (self._added, *self._logs)]
        return {"samples": self._samples, "step": self._step, "windows": self._windows, "logs": logs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of :meth:`state_dict`. Local."""
        self._samples, self._step, self._windows = state["samples"], state["step"], state["windows"]
        self._added, *self._logs = map(_log, state["logs"])

    def close(self) -> None:
        """Restore the metrics."""
        self._restore.close()

    def _record(self, place: int, metric: Metric, is_loss: bool) -> None:
        """Log scalars of batches, to merge with the other ranks' at the end; let the metric sum values per sample."""

        def process(own: Callable[[Any], Any], values: torch.Tensor) -> None:
            if values.dim():
                own(values)
            else:
                self._logs[place].add(self._step, self._weight if is_loss else self._local, values)

        def process_running(own: Callable[[Any], Any], values: torch.Tensor) -> Any:
            shown = own(values)
            if shown is not None:  # in training
                self._logs[place].add(self._step, *self._sum_of(values, is_loss))
            return shown

        def process_rows(own: Callable[[Any], Any], state: State) -> Any:
            shown = own(state)
            self._logs[place].add(self._step, self._local, torch.tensor(_torchbearer.rows_in(metric)))
            return shown

        if isinstance(metric, Mean | Var):
            self._restore.replace(metric, "process", process)
        elif isinstance(metric, RunningMean) and self._windows[place]:
            self._restore.replace(metric, "process", process_running)
            # If the pass ends by an exception, the ranks forget its batches: they have different parts of them.
            self._restore.callback(lambda: _torchbearer.continued_from(metric, self._windows[place], []))
        elif isinstance(metric, EpochLambda):  # a function of only some of the epoch's rows has no meaning
            self._restore.replace(metric, "process", process_rows)
            if _torchbearer.has_running(metric):
                self._restore.replace(metric, _torchbearer.RUNNING, lambda *_: math.nan)

    def _sum_of(self, values: torch.Tensor, is_loss: bool) -> tuple[float, torch.Tensor]:
        """Return this rank's part of a batch's mean: the divisor and the sum, which rounds less than a mean."""
        if values.dim():
            return values.numel(), values.sum()
        weight = self._weight if is_loss else self._local
        if is_loss and self._reduction == "sum":
            return weight, values
        return weight, values * weight if weight else torch.zeros_like(values)  # not NaN, the mean over nothing

    def _note_term(self, callback: Callback, event: Event, state: State) -> None:
        before = state.get(torchbearer.LOSS, torch.zeros(())).detach().clone()  # a callback may add in place
        event(state)
        if torchbearer.LOSS in state:  # a closure of the user's may have other losses
            self._terms[callback] = state[torchbearer.LOSS].detach() - before

    def _process(self, own: Callable[[State], dict[str, Any]], state: State) -> dict[str, Any]:
        self._local = share_of(state).local
        self._samples += self._local
        self._collected.note(self._local)
        self._step += self._stride
        terms, self._terms = [*self._terms.values()], {}
        if not self._local:
            self._process_no_row(state)
            return dict(state[torchbearer.METRICS])
        self._weight, _ = self._loss_weight.of(state)
        if terms and not state[torchbearer.LOSS].dim():
            self._added.add(self._step, self._local, torch.stack([state[torchbearer.LOSS], *terms]))
        shown = own(state)
        if self._step == 0 and any(self._logs[place].steps for place in self._compared):
            self._first = rows_of(state)
        return shown

    def _process_no_row(self, state: State) -> None:
        """Give metrics of the user's, which may collect rows to join at the end, a batch without any, if it is all."""
        if self._samples:
            return
        without = {**state, **{key: without_rows(state[key]) for key in ROWS if key in state}}
        for metric in (metric for metric, _ in self._metrics if _may_differ(metric)):
            try:
                metric.process(without)
            except Exception:  # it may refuse that; its value does not count
                metric.process(state)

    def _process_final(self, own: Callable[[State], dict[str, Any]], state: State) -> dict[str, Any]:
        self.close()
        random_state: RunRandomState | None = state.get(RUN_RANDOM_STATE)
        final = self._merge(state, random_state) | own(state)
        is_settled = not any(_may_differ(metric) for metric, _ in self._metrics)
        return final if is_settled else _settle(final, self._samples)

    def _merge(self, state: State, random_state: RunRandomState | None) -> dict[str, Any]:
        """Merge the metrics; return running means, which have no final value, and what a rank has not. A collective.

        Callbacks draw next, alike on all ranks, so the message also carries the random state.
        """
        self._collected.end()
        mine = {
            "collected": self._collected.checksums(),
            "names": [metric.name for metric, _ in self._metrics[1:]],  # without the list
            "held": [_torchbearer.held(metric) for metric, _ in self._metrics],
            "logs": [log.columns() for log in (self._added, *self._logs)],
            "random": random_state and random_state.report(),
            "samples": self._samples,
            "first": self._first,
        }
        of_ranks = all_gather_object(mine, "the merging of the metrics")
        _require_same([found["names"] for found in of_ranks])
        self._collected.warn([found["collected"] for found in of_ranks], get_rank())
        if random_state is not None:
            random_state.take(found["random"] for found in of_ranks)
        shown: dict[str, Any] = {}
        if not all(found["samples"] for found in of_ranks):  # such a rank has not computed any
            shown = {key: value for key, value in state[torchbearer.METRICS].items() if _is_numeric(_plain(value))}
            shown = broadcast_object(shown, "the running values of the metrics")
        if get_rank() == 0:
            self._compare(of_ranks)
        return shown | _join(self._metrics, of_ranks, self._windows, self._reduction)

    def _compare(self, of_ranks: Sequence[dict[str, Any]]) -> None:
        """Compare the metrics of the first batch with those of its parts."""
        for place in self._compared:
            logs = [(found["logs"][place + 1], found["first"]) for found in of_ranks]
            parts = [(log[1][0], float(log[2][0]), rows) for log, rows in logs if log[0] and log[0][0] == 0]
            metric, root = self._metrics[place]
            self._check.compare(metric.name, root, parts)


def _join(
    metrics: Sequence[tuple[Metric, Metric]],
    of_ranks: Sequence[dict[str, Any]],
    windows: Sequence[dict[str, Any]],
    reduction: str,
) -> dict[str, Any]:
    """Merge the ranks' state of a pass into each metric; return the values of running means. Local.

    Args:
        metrics: Each metric with the root of its tree.
        of_ranks: For each rank, each metric's sums or rows (``held``), and the columns of the log of what was added to
            the loss, and of each metric's log (``logs``).
        windows: The state of running means at the start of the pass.
        reduction: ``"mean"`` or ``"sum"``, for metrics of the loss.
    """
    running: dict[str, Any] = {}
    added, *logs_of_metrics = zip(*(map(_log, found["logs"]) for found in of_ranks), strict=True)
    surplus = _surplus(added)  # empty unless losses are sums
    for place, ((metric, root), logs) in enumerate(zip(metrics, logs_of_metrics, strict=True)):
        is_loss = isinstance(root, LossMetric)
        kind = reduction if is_loss else "mean"
        _torchbearer.add_up(metric, [found["held"][place] for found in of_ranks], logs)
        too_much = surplus if is_loss else {}
        if isinstance(metric, RunningMean) and any(log.steps for log in logs):
            merged = merge_batch_logs(logs, "sum")
            sums = _without(merged, too_much)
            means = sums if kind == "sum" else [total / n for total, n in zip(sums, merged.weights, strict=True)]
            running[metric.name] = _torchbearer.continued_from(metric, windows[place], means)
        elif isinstance(metric, Mean | Var):
            for value in _without(merge_batch_logs(logs, kind), too_much):
                type(metric).process(metric, value)
    return running


def _lost(metric: Metric, of_ranks: Sequence[dict[str, Any]], is_same_world: bool, state: State) -> list[str]:
    """Return the attributes of a user's metric with which it cannot continue in the middle of a pass.

    Args:
        of_ranks: For each rank, the attributes that it has saved.
    """
    if type(metric).__module__.startswith("torchbearer."):
        return []
    before = dict(vars(metric))
    metric.reset(state)
    fresh = plain_attributes(metric)
    begun = {name for name, value in vars(metric).items() if value is not before.get(name)}
    if is_same_world:
        return sorted(begun - fresh.keys())
    known = checksums_of(fresh)
    return sorted({name for saved in of_ranks for name in changed(saved, known)} | (begun - fresh.keys()))


def _cannot_continue(metric: Metric, lost: Sequence[str], ranks: int, is_same_world: bool) -> str:
    names = ", ".join(f"{type(metric).__name__}.{name}" for name in lost)
    own = f"cannot be taken over from the {ranks} process{'es' * (ranks != 1)} of the run before"
    return (
        f"{names} {'cannot be saved' if is_same_world else own}: in the epoch that was cut, the metric {metric.name} "
        "counts only the batches that follow. Keep numbers and tensors in it, and resume on as many processes; or "
        "build it by Torchbearer's decorators."
    )


def _log(columns: Sequence[Any]) -> BatchLog:
    return BatchLog(*map(list, columns))


def _surplus(added: Sequence[BatchLog]) -> dict[int, torch.Tensor]:
    """Return by how much the sum over the ranks exceeds the loss, by step: terms that all have alike count once.

    Args:
        added: For each rank, the loss of its part of each batch, and the terms in it that callbacks have added.
    """
    surplus = {}
    for step, parts in by_step(added).items():
        values = torch.stack([value for _, value in parts])
        rounding = 8 * torch.finfo(values.dtype).eps * values[:, 0].abs().max()
        is_common = values.amax(0) - values.amin(0) <= rounding
        is_common[0] = False  # the loss
        surplus[step] = values[1:, is_common].sum()
    return surplus


def _without(log: BatchLog, surplus: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    return [value - surplus.get(step, 0) for step, value in zip(log.steps, log.values, strict=True)]


def _load_merged(
    metrics: Sequence[tuple[Metric, Metric]], states: LocalStates, reduction: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """In the middle of a pass, give rank 0 the merged state of all ranks' metrics, and the others an empty one.

    Args:
        states: The decoded results of :meth:`ReduceMetrics.local_state` on each rank.

    Returns:
        The records for this rank's pass, see :meth:`MetricsPass.load_state_dict`; and the values of running means.
    """
    logs = [BatchLog().columns() for _ in range(len(metrics) + 1)]
    nothing = {"samples": 0, "step": -1, "windows": [{} for _ in metrics], "logs": logs}
    of_ranks = [{**(found["pass"] or nothing), "held": found["metrics"]} for found in states.of_ranks]
    running = _join(metrics, of_ranks, of_ranks[0]["windows"], reduction)
    samples = sum(found["samples"] for found in of_ranks)
    for place, (metric, _) in enumerate(metrics):
        if states.rank:
            _torchbearer.add_up(metric, [], [])
        elif isinstance(metric, EpochLambda):
            logs[place + 1] = [0], [float(samples)], torch.tensor([_torchbearer.rows_in(metric)])
    windows = [_torchbearer.window_of(metric) for metric, _ in metrics]  # over whole batches, on every rank
    return {"samples": samples / states.world_size, "step": 0, "windows": windows, "logs": logs}, running


def _may_differ(metric: Metric) -> bool:
    """Whether a metric's final value may differ between ranks after the merging: the user's own class computes it."""
    kind = type(metric)
    return kind.process_final is not Metric.process_final and not kind.__module__.startswith("torchbearer.")


def _settle(final: dict[str, Any], samples: float) -> dict[str, Any]:
    """Check that all ranks have the same metrics, and let them agree on values that differ. A collective."""
    mine = {key: _plain(value) for key, value in final.items()}
    numbers = {key: value for key, value in mine.items() if _is_numeric(value)}
    gathered = all_gather_object([sorted(mine), numbers, samples], "the final metrics")
    names, found, counts = zip(*gathered, strict=True)
    _require_same(names)
    for key in numbers:
        values = [others.get(key) for others in found]
        counts_parts = values == list(counts) and sum(counts) > counts[0]
        differ = any(repr(value) != repr(values[0]) for value in values) and sum(counts)
        if differ or counts_parts:
            warn(
                f"The metric {key} is not built from Torchbearer's decorators and "
                f"{'counts the samples of a process' if counts_parts else 'differs between processes'}; its "
                f"epoch value is the mean over the processes, weighted by samples. {REMEDY}"
            )
            counted = [torch.tensor(v, dtype=torch.float64) * n for v, n in zip(values, counts, strict=True) if n]
            final[key] = (torch.stack(counted).sum(0) / sum(counts)).tolist()
    return final


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _is_numeric(value: Any) -> bool:
    return all(map(_is_numeric, value)) if isinstance(value, list) else isinstance(value, int | float)


def _require_same(names: Sequence[list[str]]) -> None:
    if any(found != names[0] for found in names):
        lists = "\n".join(f"  rank {rank}: {', '.join(dict.fromkeys(found))}" for rank, found in enumerate(names))
        raise MismatchError(
            f"the ranks have different metrics:\n{lists}\nGive every process the same metrics=[...], in the same order."
        )
