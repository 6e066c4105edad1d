"""What ``self.log`` records becomes the value of the whole batch and of the whole epoch, on every rank.

Lightning keeps what each rank logs, or with ``sync_dist=True`` the mean over the ranks. Neither is what one process
logs where the ranks' parts differ in size. Here every value is recorded with the number of samples that it is the mean
of, and joined to the value of the whole batch before Lightning averages over batches, so ``sync_dist`` makes no
difference. When::

    end of training_step        the values of the step
    end of a batch              the same for what later hooks have logged, and for the steps of evaluations
    end of a pass               the values of the epoch, from the records of all batches
    end of the epoch's hooks    the same for what they have logged

With local steps the values of a step are joined only where a window closes; in the other steps they are the rank's own.

These moments are the same on all ranks, whatever they log. Between them nothing is communicated: rank 0 alone may log,
or read what was logged. ``reduce_fx`` says how parts combine: the mean is weighted, a sum is the sum, a maximum the
maximum.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchmetrics import Metric

from ddp_callbacks.collectives import all_gather_json, all_gather_tensors
from ddp_callbacks.lightning.batches import Batches
from ddp_callbacks.lightning.metrics import SyncedMetrics, can_encode, decode_states, encode_states
from ddp_callbacks.rows import RowExchange

Part = tuple[float, float, float]  # weight, size and value of what one rank has logged

_FOLDED = 256  # records that are kept one by one, before they become a table


@dataclass
class Record:
    """One call of ``self.log`` with a number.

    Attributes:
        position: Of the batch in its pass; -1 outside of a batch.
        weight: What the value is the mean over; 0 if it is that of a stand-in.
        size: Lightning's batch size: what the value counts among batches.
        given: Whether the user has said that size.
        value: What was logged.
    """

    position: int
    weight: float
    size: float
    given: bool
    value: torch.Tensor

    def part(self) -> Part:
        """What the other ranks need for the value of the step."""
        return self.weight, self.size, float(self.value)


class History:
    """The records of one key in a pass, in little memory: an epoch may have a million batches.

    Attributes:
        dtype: Of the values.
    """

    def __init__(self) -> None:
        self.dtype = torch.get_default_dtype()
        self._records: list[Record] = []
        self._rows: list[list[float]] = []
        self._tables: list[torch.Tensor] = []
        self._last = (-2, 0)  # position, and how often the key was logged there before

    def add(self, record: Record) -> None:
        self.dtype = record.value.dtype
        position, count = self._last
        self._last = record.position, count + 1 if record.position == position else 0
        self._records.append(record)
        self._rows.append([*map(float, self._last), record.weight, record.size, float(record.given)])
        if len(self._records) == _FOLDED:
            self._fold()

    def table(self) -> torch.Tensor:
        """One row for each record: position, occurrence, weight, size, given, value. Shape ``[records, 6]``."""
        self._fold()
        return torch.cat(self._tables)

    def _fold(self) -> None:
        if self._records:
            values = torch.stack([record.value.double() for record in self._records]).cpu()
            self._tables.append(torch.cat([torch.tensor(self._rows, dtype=torch.float64), values[:, None]], dim=1))
            self._records, self._rows = [], []


_Lightnings: Any = object  # of either package: the class comes after this one


class JointResults(_Lightnings):  # type: ignore[misc]
    """Mixed into Lightning's ``_ResultCollection``, which the loops of a Trainer own.

    Every method but those of Lightning's side is called by the strategy at its fixed moments.
    """

    def __init__(self, training: bool, batches: Batches, metrics: SyncedMetrics, exchange: RowExchange) -> None:
        super().__init__(training)
        self._batches = batches
        self._metrics = metrics
        self._exchange = exchange
        self._given = False
        self._step: list[tuple[str, Record]] = []  # logged in this step, and not yet joined
        self._step_metrics: list[tuple[str, Metric]] = []  # the same for torchmetrics
        self._epoch: dict[str, History] = {}
        self._on_step: set[int] = set()  # ids of the torchmetrics whose value of each step is logged
        self._joins_steps = True
        self._in_batch, self._position, self._samples = False, -1, 0

    # --- Lightning's side ---------------------------------------------------------------------------------------------

    def log(self, fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """As Lightning's; a value that is only for some ranks (``sync_dist_group``, ``rank_zero_only``) stays so."""
        if kwargs.get("sync_dist_group") is None:
            kwargs["sync_dist"] = False
        self._given = kwargs.get("batch_size") is not None
        super().log(fx, name, value, *args, **kwargs)

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Record a number; Lightning's own accumulation gets it when it has been joined."""
        metric = self[key]
        if not metric.is_tensor and metric.meta.on_step and self._joins_steps:
            self._on_step.add(id(value))
            self._step_metrics.append((key, value))
        if not metric.is_tensor or metric.meta.sync.should or metric.meta.sync.rank_zero_only:
            super().update_metrics(key, value, batch_size)
            return
        metric.has_reset = False
        value = value.detach().clone()
        value = value if value.dtype in (torch.float32, torch.float64) else value.to(metric.value.dtype)
        self._batches.settle()
        position, weight = (self._position, self._batches.weight) if self._in_batch else (-1, float(self._samples))
        record = Record(position, weight, float(batch_size), self._given, value)
        if metric.meta.on_step:
            metric._forward_cache = value
            if self._joins_steps:
                self._step.append((key, record))
        if metric.meta.on_epoch:
            self._epoch.setdefault(key, History()).add(record)

    def reset(self, *args: Any, **kwargs: Any) -> None:
        """As Lightning's; what was recorded for what is reset is forgotten."""
        super().reset(*args, **kwargs)
        reset = {key for key, metric in self.items() if metric.has_reset}
        self._epoch = {key: history for key, history in self._epoch.items() if key not in reset}

    # --- the strategy's moments ---------------------------------------------------------------------------------------

    def begin_batch(self, joins_steps: bool) -> None:
        """A batch of which the share is known begins.

        Args:
            joins_steps: Whether all ranks have as many batches, so that they can meet in each.
        """
        self._position += 1
        self._samples += self._batches.share.local
        self._in_batch, self._joins_steps = True, joins_steps
        # In the first batch nobody knows yet what will be logged.
        self._metrics.watch_steps(lambda metric: joins_steps and (self._position == 0 or id(metric) in self._on_step))

    def end_batch(self, flags: Sequence[bool] = ()) -> list[bool]:
        """All hooks of the batch have run; which of ``flags`` any rank has raised. A collective if steps join."""
        raised = self.join_step(flags) if self._joins_steps else list(flags)
        self._in_batch = False
        return raised

    def end_pass(self) -> None:
        """An epoch or an evaluation has ended, with all its hooks."""
        self._in_batch, self._position, self._samples = False, -1, 0
        self._step, self._step_metrics = [], []

    @property
    def is_in_batch(self) -> bool:
        """Whether a batch is being computed."""
        return self._in_batch

    @property
    def joins_steps(self) -> bool:
        """Whether the ranks meet in this batch."""
        return self._joins_steps

    def join_step(self, flags: Sequence[bool] = ()) -> list[bool]:
        """Join what was logged in this step; the flags that any rank has raised. A collective."""
        (numbers, self._step), (metrics, self._step_metrics) = (self._step, []), (self._step_metrics, [])
        keys = [key for key, _ in (*numbers, *metrics)]
        header = [zlib.crc32("\n".join(keys).encode()), len(metrics), len(flags), *flags]
        parts = [number for _, record in numbers for number in record.part()]
        rows = self._exchange.exchange([*map(float, header), *parts], "the logged values of a step")
        checksums, counts, raised, values = zip(*map(_unpack, rows), strict=True)
        if len(set(checksums)) == 1:
            found = [[own[index] for own in values] for index in range(len(numbers))]
        else:
            found = self._parts_by_name([key for key, _ in numbers], values)
        for (key, record), joined in zip(numbers, found, strict=True):
            self._take_step(key, record, joined)
        if any(counts):
            self._join_metrics(dict(metrics))
        return [any(flag) for flag in zip(*raised, strict=True)]

    def join_epoch(self) -> None:
        """Give Lightning the joined records. A collective."""
        recorded, self._epoch = self._epoch, {}
        own = [history.table() for history in recorded.values()]
        gathered = all_gather_tensors(list(recorded), own, "the logged values of the epoch")
        by_rank = [dict(zip(keys, tables, strict=True)) for keys, tables in gathered]
        for key, history in recorded.items():
            rows = torch.cat([tables[key] for tables in by_rank if key in tables])
            value, size = _join_epoch(rows, self._operation(key))
            self._accumulate(key, torch.tensor(value, dtype=history.dtype), size)

    def _parts_by_name(self, keys: list[str], values: Sequence[list[Part]]) -> list[list[Part]]:
        """Where the ranks have logged different keys: the parts that each of this rank's keys has."""
        named = all_gather_json(keys, "the names of the logged values")
        found: dict[tuple[str, int], list[Part]] = {}
        for names, own in zip(named, values, strict=True):
            for index, (name, part) in enumerate(zip(names, own, strict=True)):
                found.setdefault((name, names[:index].count(name)), []).append(part)
        return [found[key, keys[:index].count(key)] for index, key in enumerate(keys)]

    def _join_metrics(self, metrics: dict[str, Metric]) -> None:
        """The values that torchmetrics have of this batch. Every rank calls it if any has logged one."""
        mine: list[float] = []
        for key, metric in metrics.items():
            states = [] if self._batches.is_stand_in else self._metrics.batch_states(metric)
            mine += [float(zlib.crc32(key.encode())), *encode_states(states if can_encode(states) else [])]
        states_by_rank = [_states_by_key(row) for row in self._exchange.exchange(mine, "the metrics of a step")]
        for key, metric in metrics.items():
            code = float(zlib.crc32(key.encode()))
            found = [states[code] for states in states_by_rank if states.get(code)]
            if found and len({len(states) for states in found}) == 1:
                self[key]._forward_cache = self._metrics.value_of(metric, found)

    def _take_step(self, key: str, record: Record, parts: list[Part]) -> None:
        metric = self[key]
        varying = record.given and len({size for _, size, _ in parts}) > 1
        weighted = [(size if varying and weight else weight, value) for weight, size, value in parts]
        joined = _combine(weighted, self._operation(key))
        metric._forward_cache = torch.tensor(joined, dtype=record.value.dtype, device=record.value.device)
        if not metric.meta.on_epoch:
            metric.value = metric._forward_cache

    def _accumulate(self, key: str, value: torch.Tensor, size: float) -> None:
        metric = self[key]
        step_value = metric._forward_cache
        super().update_metrics(key, value.to(metric.value.device), int(size) if size.is_integer() else size)
        metric._forward_cache = step_value

    def _operation(self, key: str) -> str:
        meta = self[key].meta
        return "mean" if meta.is_mean_reduction else str(meta.reduce_fx.__name__)


def _unpack(row: list[float]) -> tuple[float, float, list[float], list[Part]]:
    """The checksum of the keys, the number of metrics, the flags and the parts of a row."""
    begin = 3 + int(row[2])
    parts = [(row[index], row[index + 1], row[index + 2]) for index in range(begin, len(row), 3)]
    return row[0], row[1], row[3:begin], parts


def _states_by_key(row: list[float]) -> dict[float, list[torch.Tensor]]:
    numbers = iter(row)
    return {code: decode_states(numbers) for code in numbers}


def _join_epoch(rows: torch.Tensor, operation: str) -> tuple[float, float]:
    """The value of an epoch from every rank's records of one key (see :meth:`History.table`), and what it counts."""
    position, _, weight, size, given, value = rows.unbind(1)
    _, batch = torch.unique(rows[:, :2], dim=0, return_inverse=True)

    def by_batch(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.new_zeros(int(batch.max()) + 1).index_add_(0, batch, numbers)

    is_given = bool(given.any())
    constant = is_given and bool((size == size[0]).all())  # a size that is the same for every part is the batch's
    if is_given and not constant:
        weight = torch.where(weight > 0, size, weight)
    weight = torch.where(by_batch(weight)[batch] == 0, 1.0, weight)  # no rank counts: logged before the first batch
    counted = weight > 0
    if operation != "mean":
        return float(getattr(value[counted], operation)()), 1.0
    joined = by_batch(torch.where(counted, weight * value, 0.0)) / by_batch(weight)
    one = constant | (position < 0)  # of a hook at the end of the epoch, where the value is one for all
    sizes = by_batch(torch.where(one, size / by_batch(torch.ones_like(size))[batch], torch.where(counted, size, 0.0)))
    total = float(sizes.sum())
    return (float((joined * sizes).sum()) / total if total else float(joined[0])), total


def _combine(parts: list[tuple[float, float]], operation: str) -> float:
    """One value from (weight, value) of each rank. A rank whose weight is 0 holds a stand-in, which counts nowhere."""
    counted = [(weight, value) for weight, value in parts if weight] or [(1.0, parts[0][1])]
    if operation == "mean":
        total = sum(weight for weight, _ in counted)
        return sum(value * (weight / total) for weight, value in counted)
    values = torch.tensor([value for _, value in counted], dtype=torch.float64)
    return float(getattr(values, operation)())
