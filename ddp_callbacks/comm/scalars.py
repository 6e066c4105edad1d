"""All-gather of a few float64 per step: piggybacked on the gradients, or as a small message."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from ddp_callbacks._torch import outside_inference_mode
from ddp_callbacks.comm.collectives import all_gather_tensors
from ddp_callbacks.comm.protocol import Work
from ddp_callbacks.comm.topology import choose_all_reduce
from ddp_callbacks.process_group import resolve_group
from ddp_callbacks.process_group.failures import require_tags, tag_of

CPU = torch.device("cpu")
_CAPACITY = 96  # numbers in a row; grows with the longest row
_HEADER = 2  # numbers before the row: its length, and a checksum of its purpose


class Carrier(Protocol):
    """An object whose messages have room for a row, such as :class:`ddp_callbacks.GradientSynchronizer`."""

    room: int

    @property
    def rounds(self) -> int: ...

    @property
    def carried(self) -> torch.Tensor: ...

    def carry(self, numbers: torch.Tensor) -> None: ...


class ScalarExchange:
    """All-gathers a few numbers per rank, as one row for each.

    The constructor is a collective; it needs at least two ranks.
    The all-gather is implemented as an all-reduce, so that it can use shared memory: each rank writes its row and
    leaves the others zero. Numbers are sent as float64.

    Attributes:
        unattended: Whether launched rows arrive even if no other rank waits for them.
    """

    @outside_inference_mode
    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = resolve_group(group)
        self._all_reduce = choose_all_reduce(self._group, [CPU])
        self.unattended = self._all_reduce.unattended
        self._capacity = _CAPACITY
        self._spare: list[torch.Tensor] = []

    @outside_inference_mode
    def exchange(self, row: Sequence[float], doing: str) -> list[list[float]]:
        """Send this rank's row; return every rank's, by rank. Lengths may differ. Blocks until all have called it.

        Raises:
            MismatchError: Another rank exchanges something else.
            PeerError: Another rank failed, died or went silent.
        """
        return self.launch(row, doing).wait()

    @outside_inference_mode
    def launch(self, row: Sequence[float], doing: str) -> LaunchedScalars:
        """Send this rank's row without waiting. Every rank must launch the same exchanges in the same order."""
        memory = self._spare.pop() if self._spare else self._allocate()
        rows = memory.zero_().view(self._group.size(), _HEADER + self._capacity)
        sent = _with_header(row, doing, self._capacity)
        rows[self._group.rank(), : len(sent)] = torch.tensor(sent, dtype=torch.float64)
        return LaunchedScalars(self, row, doing, rows, self._all_reduce.launch(memory, doing))

    def send_with(self, carrier: Carrier, row: Sequence[float], doing: str) -> PiggybackedScalars:
        """Send this rank's row with the next gradients. Local; every rank must call it before the same backward."""
        return PiggybackedScalars(self, row, doing, carrier)

    @outside_inference_mode
    def reuse(self, rows: torch.Tensor) -> None:
        """Recycle the memory of a completed :meth:`launch`."""
        if rows.shape[1] == _HEADER + self._capacity:
            self._spare.append(rows.view(-1))

    def read(self, received: list[list[float]], doing: str) -> tuple[list[list[float]], bool]:
        """Every rank's received row, truncated if it was too long; and whether none was truncated. Local."""
        require_tags([own[1] for own in received], doing, self._group)
        capacity = len(received[0]) - _HEADER
        return [own[_HEADER : _HEADER + int(own[0])] for own in received], max(own[0] for own in received) <= capacity

    def send_whole(self, row: Sequence[float], doing: str) -> list[list[float]]:
        """Exchange rows of any length, and make room for them in later exchanges. A collective."""
        whole = torch.tensor(row, dtype=torch.float64)
        rows = [tensor.tolist() for _, (tensor,) in all_gather_tensors(None, [whole], doing, self._group)]
        self._capacity, self._spare = max(self._capacity, 2 * max(map(len, rows))), []
        return rows

    def _allocate(self) -> torch.Tensor:
        numel = self._group.size() * (_HEADER + self._capacity)
        return self._all_reduce.allocate(numel, torch.float64, CPU)


class ScalarWork(ABC):
    """The work handle of an exchange."""

    def __init__(self, exchange: ScalarExchange, row: Sequence[float], doing: str) -> None:
        self._exchange, self._row, self._doing = exchange, list(row), doing

    @abstractmethod
    def are_here(self) -> bool:
        """Whether :meth:`arrive` may be called now; by a single rank at any time if the exchange is unattended."""

    @abstractmethod
    def arrive(self) -> tuple[list[list[float]], bool]:
        """Every rank's row, truncated if it was too long; and whether none was truncated.

        Raises:
            MismatchError: Another rank exchanges something else.
            PeerError: Another rank failed, died or went silent.
        """

    def wait(self) -> list[list[float]]:
        """Every rank's row. A collective: if a row was truncated, which all ranks see, they send the rows again."""
        rows, are_whole = self.arrive()
        return rows if are_whole else self._exchange.send_whole(self._row, self._doing)


class LaunchedScalars(ScalarWork):
    """A handle with a separate message, from :meth:`ScalarExchange.launch`."""

    def __init__(
        self, exchange: ScalarExchange, row: Sequence[float], doing: str, rows: torch.Tensor, pending: Work
    ) -> None:
        super().__init__(exchange, row, doing)
        self._rows, self._pending = rows, pending
        self._received: tuple[list[list[float]], bool] | None = None

    def are_here(self) -> bool:
        """See :class:`ScalarWork`."""
        return True

    def arrive(self) -> tuple[list[list[float]], bool]:
        """See :class:`ScalarWork`. Blocks until every rank has launched its row."""
        if self._received is None:
            self._pending.wait(self._doing)
            received = self._rows.tolist()
            self._exchange.reuse(self._rows)
            self._received = self._exchange.read(received, self._doing)
        return self._received


class PiggybackedScalars(ScalarWork):
    """A handle of numbers that are sent with gradients, from :meth:`ScalarExchange.send_with`."""

    def __init__(self, exchange: ScalarExchange, row: Sequence[float], doing: str, carrier: Carrier) -> None:
        super().__init__(exchange, row, doing)
        self._carrier, self._rounds = carrier, carrier.rounds
        sent = _with_header(row, doing, room_of(carrier))
        carrier.carry(torch.tensor(sent + [0.0] * (carrier.room - len(sent)), dtype=torch.float64))

    def are_here(self) -> bool:
        """See :class:`ScalarWork`."""
        return self._carrier.rounds > self._rounds

    def arrive(self) -> tuple[list[list[float]], bool]:
        """See :class:`ScalarWork`. Does not block; the gradients must be synchronized."""
        return self._exchange.read(self._carrier.carried.tolist(), self._doing)


def room_of(carrier: Carrier) -> int:
    """The maximum length of a row sent with ``carrier``."""
    return carrier.room - _HEADER


def _with_header(row: Sequence[float], doing: str, capacity: int) -> list[float]:
    """The numbers to send for a row: its length, its tag, and as much of it as fits."""
    return [float(len(row)), float(tag_of(doing)), *row[:capacity]]
