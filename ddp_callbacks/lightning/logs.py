"""What ``self.log`` records becomes the value of the whole batch and of the whole epoch, on every rank.

Lightning keeps what each rank logs, or with ``sync_dist=True`` the mean over the ranks. Neither is what one process
logs where the ranks' parts differ in size. Here every value is recorded with the number of samples that it is the mean
of, and joined to the value of the whole batch before Lightning averages over batches, so ``sync_dist`` makes no
difference. When::

    end of training_step        the step values of all ranks are sent, and await the end of backward
    whoever reads them          waits for what was sent: local, so rank 0 alone may do it
    end of a training batch     the same for what later hooks have logged
    end of a pass               the epoch values, from the records of all batches
    end of the epoch's hooks    the same for what they have logged

These moments are the same on all ranks, whatever they log and read. ``reduce_fx`` says how parts combine: the mean is
weighted, a sum is the sum, a maximum the maximum.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddp_callbacks.collectives import all_gather_json, all_gather_tensors
from ddp_callbacks.lightning.batches import Batches
from ddp_callbacks.rows import PendingRows, RowExchange

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

    Attributes:
        late: Whether the values that later hooks log in a batch of an evaluation are exchanged.
    """

    def __init__(self, training: bool, batches: Batches, exchange: RowExchange) -> None:
        super().__init__(training)
        self._batches = batches
        self._exchange = exchange
        self._given = False
        self._step: list[tuple[str, Record]] = []  # logged in this step, and not yet sent
        self._sent: tuple[list[str], PendingRows] | None = None
        self._epoch: dict[str, History] = {}
        self._metrics_on_step: set[int] = set()  # ids of the torchmetrics whose value of each step is logged
        self.late = True
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
        if not metric.is_tensor and metric.meta.on_step:
            self._metrics_on_step.add(id(value))
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
            self._step.append((key, record))
        if metric.meta.on_epoch:
            self._epoch.setdefault(key, History()).add(record)

    def metrics(self, on_step: bool) -> Any:
        """Await what was sent, on this rank alone, then as Lightning's."""
        if on_step:
            self.await_step()
        return super().metrics(on_step)

    def reset(self, *args: Any, **kwargs: Any) -> None:
        """As Lightning's; what was recorded for what is reset is forgotten."""
        super().reset(*args, **kwargs)
        reset = {key for key, metric in self.items() if metric.has_reset}
        self._epoch = {key: history for key, history in self._epoch.items() if key not in reset}

    # --- the strategy's moments ---------------------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """A batch of which the share is known begins."""
        self._position += 1
        self._samples += self._batches.share.local
        self._in_batch = True

    def end_batch(self, flags: Sequence[bool] = ()) -> list[bool]:
        """All hooks of the batch have run; which of ``flags`` some rank has raised.

        A collective in training, where there are flags, and in an evaluation in which some rank logs the values of
        its first step.
        """
        self.await_step()
        raised: list[bool] = []
        if flags or self.late:
            self.send_step(flags)
            logged, raised = self.await_step()
            self.late = logged if self._position == 0 else self.late
        self._in_batch = False
        return raised

    def end_pass(self) -> None:
        """An epoch or an evaluation has ended, with all its hooks."""
        self.late = True
        self._in_batch, self._position, self._samples = False, -1, 0

    @property
    def is_in_batch(self) -> bool:
        """Whether a batch is being computed."""
        return self._in_batch

    def logs_each_step_of(self, metric: object) -> bool:
        """Whether the value that ``metric`` has in each step is logged, as far as is known: in the first step, yes."""
        return self._position <= 0 or id(metric) in self._metrics_on_step

    def send_step(self, flags: Sequence[bool] = ()) -> None:
        """Send what was logged in this step. Every rank calls it, with or without values; does not block."""
        self.await_step()
        keys = [key for key, _ in self._step]
        numbers = [number for _, record in self._step for number in record.part()]
        header = [zlib.crc32("\n".join(keys).encode()), len(flags), *flags]
        self._sent = keys, self._exchange.launch([*map(float, header), *numbers])

    def await_step(self) -> tuple[bool, list[bool]]:
        """Take the joined values of what was sent; whether any rank had some, and the flags that any has raised.

        Blocks until every rank has sent.
        """
        if self._sent is None:
            return False, []
        (keys, pending), self._sent = self._sent, None
        sent = [_unpack(row) for row in pending.wait("the logged values of a step")]
        checksums, flags, values = zip(*sent, strict=True)
        if len(set(checksums)) == 1:
            parts = [[own[index] for own in values] for index in range(len(keys))]
        else:
            parts = self._parts_by_name(keys, values)
        records, self._step = self._step[: len(keys)], self._step[len(keys) :]
        for (key, record), part in zip(records, parts, strict=True):
            self._take_step(key, record, part)
        return any(values), [any(flag) for flag in zip(*flags, strict=True)]

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


def _unpack(row: list[float]) -> tuple[float, list[float], list[Part]]:
    """The checksum of the keys, the flags and the parts of a row."""
    begin = 2 + int(row[1])
    parts = [(row[index], row[index + 1], row[index + 2]) for index in range(begin, len(row), 3)]
    return row[0], row[2:begin], parts


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
