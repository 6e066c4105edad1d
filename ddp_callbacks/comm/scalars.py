"""All-gather of a few float64 per step: as a small message, or piggybacked on the gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from ddp_callbacks.comm.messages import all_gather_bytes
from ddp_callbacks.process_group import resolve_group
from ddp_callbacks.process_group.failures import require_tags, tag_of

_HEADER = 2  # numbers before a piggybacked row: its length, and a checksum of its purpose


class Carrier(Protocol):
    """An object whose messages have room for a row, such as :class:`ddp_callbacks.GradientSynchronizer`."""

    room: int

    @property
    def rounds(self) -> int: ...

    @property
    def carried(self) -> torch.Tensor: ...

    def carry(self, numbers: torch.Tensor) -> None: ...


class ScalarExchange:
    """All-gathers a few numbers per rank, as one row for each. It needs at least two ranks."""

    unattended = True  # launched rows arrive even if no other rank waits for them

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = resolve_group(group)

    def exchange(self, row: Sequence[float], doing: str) -> list[list[float]]:
        """Send this rank's row; return every rank's, by rank. Lengths may differ. Blocks until all have called it.

        Raises:
            MismatchError: Another rank exchanges something else.
            PeerError: Another rank failed, died or went silent.
        """
        message = array("d", row).tobytes()
        return [array("d", found).tolist() for found in all_gather_bytes(message, doing, self.group)]

    def launch(self, row: Sequence[float], doing: str) -> ScalarWork:
        """As :meth:`exchange`, with a handle of the rows."""
        return _Exchanged(self.exchange(row, doing))

    def send_with(self, carrier: Carrier, row: Sequence[float], doing: str) -> PiggybackedScalars:
        """Send this rank's row with the next gradients. Local; every rank must call it before the same backward."""
        return PiggybackedScalars(self, row, doing, carrier)


class ScalarWork(ABC):
    """The work handle of an exchange."""

    @abstractmethod
    def are_here(self) -> bool:
        """Whether :meth:`arrive` may be called now, by a single rank."""

    @abstractmethod
    def arrive(self) -> tuple[list[list[float]], bool]:
        """Every rank's row, truncated if it was too long; and whether none was truncated.

        Raises:
            MismatchError: Another rank exchanges something else.
        """

    @abstractmethod
    def wait(self) -> list[list[float]]:
        """Every rank's row. A collective: if a row was truncated, which all ranks see, they send the rows again."""


class _Exchanged(ScalarWork):
    """Rows that are there; see :class:`ScalarWork`."""

    def __init__(self, rows: list[list[float]]) -> None:
        self._rows = rows

    def are_here(self) -> bool:
        return True

    def arrive(self) -> tuple[list[list[float]], bool]:
        return self._rows, True

    def wait(self) -> list[list[float]]:
        return self._rows


class PiggybackedScalars(ScalarWork):
    """A handle of numbers that are sent with gradients, from :meth:`ScalarExchange.send_with`."""

    def __init__(self, exchange: ScalarExchange, row: Sequence[float], doing: str, carrier: Carrier) -> None:
        self._exchange, self._row, self._doing = exchange, list(row), doing
        self._carrier, self._rounds = carrier, carrier.rounds
        sent = [float(len(row)), float(tag_of(doing)), *row[: room_of(carrier)]]
        carrier.carry(torch.tensor(sent + [0.0] * (carrier.room - len(sent)), dtype=torch.float64))

    def are_here(self) -> bool:
        """See :class:`ScalarWork`."""
        return self._carrier.rounds > self._rounds

    def arrive(self) -> tuple[list[list[float]], bool]:
        """See :class:`ScalarWork`. Does not block; the gradients must be synchronized."""
        received = self._carrier.carried.tolist()
        require_tags([tag for _, tag, *_ in received], self._doing, self._exchange.group)
        rows = [row[: int(length)] for length, _, *row in received]
        return rows, max(length for length, *_ in received) <= room_of(self._carrier)

    def wait(self) -> list[list[float]]:
        """See :class:`ScalarWork`."""
        rows, are_whole = self.arrive()
        return rows if are_whole else self._exchange.exchange(self._row, self._doing)


def room_of(carrier: Carrier) -> int:
    """The maximum length of a row sent with ``carrier``."""
    return carrier.room - _HEADER
