"""What was logged under one key in a pass, in little memory, until the ranks join it: pure arithmetic.

A rank that knows what its records weigh among those of the others keeps their weighted sums, whose size does not grow
with the number of batches. Others keep a row for each record, by batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddp_callbacks.comm.device_scalars import to_device

_FOLDED = 256  # records that are kept one by one, before they are summed up on their device
SUMS = 6  # numbers that a rank sends for a key, beside its rows
NO_ROWS = torch.zeros(0, 7, dtype=torch.float64)

Parts = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Record:
    """One call of ``self.log`` with a number.

    Attributes:
        position: Of the batch in its pass; -1 outside of a batch.
        weight: What the value is the mean over; 0 if it is that of a padding batch, or a mean over nothing.
        total: The sum of the weights over the ranks, ``None`` where it is not known here.
        size: Lightning's batch size: what the value counts among batches.
        counts: This rank's part of what the value of the whole batch counts; ``None`` where it is not known here.
        given: Whether the user has said that size.
        is_padding: Whether this rank has no sample of the batch.
        value: What was logged.
    """

    position: int
    weight: float
    total: float | None
    size: float
    counts: float | None
    given: bool
    is_padding: bool
    value: torch.Tensor

    @property
    def is_counted(self) -> bool:
        """Whether it is more than a padding batch or nothing, or, where no rank counts, as good as the others'."""
        return bool(self.weight) or self.total == 0


class History:
    """The records of one key in a pass.

    Args:
        operation: How they become the value of the epoch: ``"mean"``, ``"sum"``, ``"max"``, ``"min"``.

    Attributes:
        operation: The same.
        dtype: Of the values.
    """

    def __init__(self, operation: str) -> None:
        self.dtype = torch.get_default_dtype()
        self.operation = operation
        self._records: list[Record] = []
        self._sums: list[torch.Tensor] = []
        self._rows: list[list[float]] = []
        self._row_values: list[torch.Tensor] = []
        self._keeps_rows: bool | None = None  # decided by the first record of a batch
        self._last = (-2, 0)  # position, and how often the key was logged there before

    def add(self, record: Record) -> None:
        """Does not wait for the device of the value."""
        self.dtype = record.value.dtype
        position, count = self._last
        self._last = record.position, count + 1 if record.position == position else 0
        is_mean = self.operation == "mean"
        if record.is_padding and not (record.given and is_mean) and not (is_mean and record.is_counted):
            return
        if self._keeps_row(record):
            numbers = (*self._last, record.weight, record.size, record.given, record.is_padding)
            self._rows.append([*map(float, numbers)])
            self._row_values.append(record.value)
            return
        self._records.append(record)
        if len(self._records) == _FOLDED:
            self._fold()

    def parts(self) -> Parts:
        """What the other ranks need: sums, shape ``[SUMS]``, and rows, shape ``[records, 7]``; see :func:`join`."""
        self._fold()
        sums = self._sums[0].cpu() if self._sums else torch.zeros(SUMS, dtype=torch.float64)
        rows = NO_ROWS
        if self._rows:
            values = stack(self._row_values).cpu()
            rows = torch.cat([torch.tensor(self._rows, dtype=torch.float64), values[:, None]], dim=1)
        return sums, rows

    def remember(self) -> Callable[[], None]:
        """What makes it forget the records that are added from now on."""
        state = {"dtype": self.dtype, "_keeps_rows": self._keeps_rows, "_last": self._last}
        records, sums, count = [*self._records], self._sums, len(self._rows)

        def forget() -> None:
            vars(self).update(state)
            self._records, self._sums = records, sums
            del self._rows[count:], self._row_values[count:]

        return forget

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain data; nothing is summed up that was not before, so that later sums have the same bits."""
        return {
            "dtype": self.dtype,
            "operation": self.operation,
            "records": [dict(vars(record)) for record in self._records],
            "sums": [*self._sums],
            "rows": [[*row] for row in self._rows],
            "row_values": [*self._row_values],
            "keeps_rows": self._keeps_rows,
            "last": self._last,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`."""
        self.operation, self.dtype = state["operation"], state["dtype"]
        self._keeps_rows, self._last = state["keeps_rows"], tuple(state["last"])
        self._records = [Record(**record) for record in state["records"]]
        self._sums, self._rows = [*state["sums"]], [[*row] for row in state["rows"]]
        self._row_values = [*state["row_values"]]

    def _keeps_row(self, record: Record) -> bool:
        if record.position < 0:
            return True
        if self._keeps_rows is None:
            unknown = record.total if record.given else record.counts
            self._keeps_rows = self.operation == "mean" and unknown is None
        return self._keeps_rows

    def _fold(self) -> None:
        if not self._records:
            return
        values = stack([record.value for record in self._records])
        fold = _fold_mean if self.operation == "mean" else _fold_others
        folded = fold(self._records, values, self.operation)
        self._sums = [_add(to_device(self._sums[0], folded.device), folded, self.operation) if self._sums else folded]
        self._records = []


def stack(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Numbers as one float64 tensor, on their device if one of them is not on the CPU. Does not wait for it."""
    home = next((value.device for value in values if value.device.type != "cpu"), torch.device("cpu"))
    return torch.stack([to_device(value, home).to(torch.float64) for value in values])


def join(parts: Sequence[Parts], operation: str) -> tuple[float, float]:
    """The value of an epoch, and what it counts, from every rank's :meth:`History.parts` of one key."""
    sums, rows = [own for own, _ in parts if own[-1]], torch.cat([own for _, own in parts])
    if operation != "mean":
        values = torch.cat([torch.tensor([float(own[0]) for own in sums], dtype=torch.float64), _counted(rows)])
        return float(getattr(values, operation)()) if len(values) else 0.0, 1.0
    joined = ([_join_rows(rows)] if len(rows) else []) + ([_join_sums(torch.stack(sums))] if sums else [])
    if len(joined) < 2:
        return joined[0] if joined else (0.0, 0.0)
    size = sum(counted for _, counted in joined) or 1.0
    return sum(value * counted for value, counted in joined) / size, size


def _fold_mean(records: list[Record], values: torch.Tensor, _: str) -> torch.Tensor:
    """By samples: sum of values, of sizes; by batches: of values, of shares of a batch; a size; how many."""
    sizes = [record.size if record.given or record.counts is None else record.counts for record in records]
    sizes = [size if record.is_counted else 0.0 for size, record in zip(sizes, records, strict=True)]
    shares = [record.weight / record.total if record.total else 1.0 for record in records]
    first = records[0].size
    size = first if all(record.given and record.size == first for record in records) else 0.0
    rest = [sum(sizes), sum(shares), size, len(records)]
    numbers = to_device(torch.tensor([*sizes, *shares, *rest], dtype=torch.float64), values.device)
    by = numbers[: -len(rest)].view(2, -1)
    # A mean over nothing may be NaN, and counts nothing.
    weighted = torch.where(by > 0, by * values, 0.0).sum(1)
    return torch.stack([weighted[0], numbers[-4], weighted[1], *numbers[-3:].unbind()])


def _fold_others(records: list[Record], values: torch.Tensor, operation: str) -> torch.Tensor:
    joined = getattr(values, operation)()
    return torch.cat([joined[None], values.new_zeros(SUMS - 2), values.new_full((1,), len(records))])


def _add(first: torch.Tensor, second: torch.Tensor, operation: str) -> torch.Tensor:
    if operation == "mean":
        total = first + second
        total[4] = torch.where(first[4] == second[4], first[4], 0.0)
        return total
    total = first + second
    if operation != "sum":
        total[0] = getattr(torch.stack([first[0], second[0]]), operation)()
    return total


def _join_sums(sums: torch.Tensor) -> tuple[float, float]:
    value, size, by_batch, batches, constant, _ = sums.sum(0).tolist()
    common = constant / len(sums)
    # A size that is the same for every part is the batch's.
    if common and bool((sums[:, 4] == common).all()):
        return by_batch / batches, common * batches
    return (value / size if size else by_batch / batches), size


def _weights(rows: torch.Tensor) -> torch.Tensor:
    """Of every rank's rows; where no rank counts, all do: they were logged before the first batch, say."""
    batch = _batches(rows)
    weight = rows[:, 2]
    for instead in (1 - rows[:, 5], torch.ones_like(weight)):  # better none that are padding batches
        weight = torch.where(_by_batch(weight, batch)[batch] == 0, instead, weight)
    return weight


def _counted(rows: torch.Tensor) -> torch.Tensor:
    """The values of every rank's rows that count."""
    return rows[:, 6][_weights(rows) > 0] if len(rows) else rows[:, 6]


def _join_rows(rows: torch.Tensor) -> tuple[float, float]:
    """From every rank's rows: position, occurrence, weight, size, given, is_padding, value."""
    position, _, weight, size, given, is_padding, value = rows.unbind(1)
    batch = _batches(rows)
    is_given = bool(given.any())
    constant = is_given and bool((size == size[0]).all())  # a size that is the same for every part is the batch's
    if is_given and not constant:
        rows = rows.clone()
        rows[:, 2] = torch.where(weight > 0, size, weight)
    weight = _weights(rows)
    counted = weight > 0
    joined = _by_batch(torch.where(counted, weight * value, 0.0), batch) / _by_batch(weight, batch)
    one = constant | (position < 0)  # of a hook at the end of the epoch, where the value is one for all
    parts = _by_batch(torch.ones_like(size), batch)[batch]
    sizes = _by_batch(torch.where(one, size / parts, torch.where(is_padding > 0, 0.0, size)), batch)
    total = float(sizes.sum())
    return (float((joined * sizes).sum()) / total if total else float(joined[0])), total


def _batches(rows: torch.Tensor) -> Any:
    """The number of each row's batch, or of its call outside of one."""
    _, batch = torch.unique(rows[:, :2], dim=0, return_inverse=True)
    return batch


def _by_batch(numbers: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return numbers.new_zeros(int(batch.max()) + 1).index_add_(0, batch, numbers)
