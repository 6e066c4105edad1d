"""What a rank sends of a step: a row of numbers between the CPUs, and beside it the values that are on its GPU.

The row has, in this order: a checksum of the keys of the logged numbers, how many these are, whether the step is
skipped, how many flags follow, how many of the numbers are on the GPU; the flags; weight, size and value of each
number; for each torchmetric a checksum of its key and its states. The numbers that are on the GPU are the last. Their
values are not in the row but in a vector, and the values of states on the GPU behind them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ddp_callbacks.lightning.history import Record, stack

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DTYPES = (*_FLOATS, torch.bool, torch.uint8, torch.int32, torch.int64)
_HEAD = 5
SKIPPED = 2  # the place of this flag in a row

Part = tuple[float, float, float]  # weight, size (0: a padding batch's) and value of what one rank has logged
IsOnDevice = Callable[[torch.Tensor], bool]


@dataclass
class State:
    """A state of a torchmetric that a rank has sent.

    Attributes:
        values: As float64; ``None`` if they are in the rank's vector.
        begin: Where they begin there, if so.
    """

    dtype: torch.dtype
    shape: torch.Size
    values: list[float] | None
    begin: int

    def tensor(self, rank: int, vectors: Callable[[torch.dtype], torch.Tensor]) -> torch.Tensor:
        """The state, on the device of the vectors if it is in one.

        Args:
            rank: Whose it is.
            vectors: Those of all ranks in a dtype, shape ``[ranks, length]``.
        """
        if self.values is not None:
            return torch.tensor(self.values, dtype=torch.float64).to(self.dtype).reshape(self.shape)
        return vectors(self.dtype)[rank, self.begin : self.begin + self.shape.numel()].view(self.shape)


class Row:
    """What a rank has sent of a step.

    Attributes:
        length: In numbers.
        content: A checksum of the keys of its numbers, and how many of these, the last, are on its GPU.
        flags: That it has raised.
        parts: Of its numbers. The values of those on its GPU are not in the row.
        states: Of its torchmetrics, by a checksum of the key.
        on_device: The length of its vector.
    """

    def __init__(self, row: list[float]) -> None:
        self.length = len(row)
        checksum, count, _, flags, on_device = row[:_HEAD]
        self.content = checksum, int(on_device)
        begin = _HEAD + int(flags)
        end = begin + 3 * int(count)
        self.flags = row[_HEAD:begin]
        self.parts: list[Part] = [(row[index], row[index + 1], row[index + 2]) for index in range(begin, end, 3)]
        self.on_device = int(on_device)
        self.states: dict[float, list[State]] = {}
        numbers = iter(row[end:])
        for code in numbers:
            self.states[code] = states = _decode_states(numbers, self.on_device)
            self.on_device += sum(state.shape.numel() for state in states if state.values is None)

    def all_parts(self, vector: list[float]) -> list[Part]:
        """Of its numbers, with the values of those on its GPU, too."""
        here = len(self.parts) - self.content[1]
        on_device = zip(self.parts[here:], vector, strict=False)
        return self.parts[:here] + [(weight, size, value) for (weight, size, _), value in on_device]


def checksum_of(key: str) -> float:
    """The number that stands for a key in a row."""
    return float(zlib.crc32(key.encode()))


def encode_row(
    numbers: Sequence[tuple[str, Record]],
    states: Sequence[tuple[str, list[torch.Tensor]]],
    flags: Sequence[bool],
    skipped: bool,
    is_on_device: IsOnDevice,
) -> tuple[list[float], list[torch.Tensor]]:
    """This rank's row, and what its vector consists of.

    Waits for a device that ``is_on_device`` does not know, once, however many numbers there are on it.

    Args:
        numbers: Those on the device are the last.
        states: Of torchmetrics. Those of a metric with a state that a row cannot hold are left out.
    """
    on_device = [record.value for _, record in numbers if is_on_device(record.value)]
    here = [record.value for _, record in numbers[: len(numbers) - len(on_device)]]
    values = (stack(here).tolist() if here else []) + [0.0] * len(on_device)
    keys = "\n".join(key for key, _ in numbers)
    row: list[float] = [checksum_of(keys), len(numbers), skipped, len(flags), len(on_device), *flags]
    for (_, record), value in zip(numbers, values, strict=True):
        row += [record.weight, 0.0 if record.is_padding else record.size, value]
    for key, own in states:
        sent = own if all(state.dtype in _DTYPES for state in own) else []
        row += [checksum_of(key), *_encode_states(sent, is_on_device)]
        on_device += filter(is_on_device, sent)
    return [*map(float, row)], on_device


def are_alike(rows: Sequence[Row]) -> bool:
    """Whether all ranks have logged the same numbers, and have the same of them on their GPUs."""
    return len({row.content for row in rows}) == 1


def lengths(rows: Sequence[Row]) -> list[int]:
    """The lengths of the ranks' vectors."""
    return [row.on_device for row in rows]


def _encode_states(states: list[torch.Tensor], is_on_device: IsOnDevice) -> list[float]:
    """Their count, and dtype, shape and values of each. The dtype is negative where the values are in the vector."""
    numbers: list[float] = [len(states)]
    for state in states:
        dtype, shape = 1 + _DTYPES.index(state.dtype), [state.dim(), *state.shape]
        if is_on_device(state):
            numbers += [-dtype, *shape]
        else:
            numbers += [dtype, *shape, *state.detach().reshape(-1).double().tolist()]
    return numbers


def _decode_states(numbers: Iterator[float], begin: int) -> list[State]:
    """The inverse; takes what it needs. ``begin`` is where the first ones begin in the vector."""
    states = []
    for _ in range(int(next(numbers))):
        dtype, dims = int(next(numbers)), int(next(numbers))
        shape = torch.Size(int(next(numbers)) for _ in range(dims))
        values = [next(numbers) for _ in range(shape.numel())] if dtype > 0 else None
        states.append(State(_DTYPES[abs(dtype) - 1], shape, values, begin))
        begin += 0 if values is not None else shape.numel()
    return states
