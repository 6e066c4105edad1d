"""All-gather of a few float64 per step: as a small message, or piggybacked on the gradients."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from ddp_callbacks.comm.hosts import all_gather_bytes
from ddp_callbacks.process_group import resolve_group
from ddp_callbacks.process_group.failures import require_tags, tag_of

HEADER = 2  # numbers before a piggybacked row: its length, and a checksum of its purpose


class Carrier(Protocol):
    """An object whose messages have room for a row, such as :class:`ddp_callbacks.GradientSynchronizer`."""

    room: int

    @property
    def carried(self) -> torch.Tensor: ...

    def carry(self, numbers: torch.Tensor) -> None: ...


class ScalarExchange:
    """All-gathers a few numbers per rank, as one row for each. It needs at least two ranks."""

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

    def send_with(self, carrier: Carrier, row: Sequence[float], doing: str) -> PiggybackedScalars:
        """Send this rank's row with the next gradients. Local; every rank must call it before the same backward.

        Args:
            carrier: Has room for the row, see :data:`HEADER`.
        """
        return PiggybackedScalars(self.group, row, doing, carrier)


class PiggybackedScalars:
    """A handle of numbers that are sent with gradients, from :meth:`ScalarExchange.send_with`."""

    def __init__(self, group: dist.ProcessGroup, row: Sequence[float], doing: str, carrier: Carrier) -> None:
        self._group, self._doing, self._carrier = group, doing, carrier
        sent = [float(len(row)), float(tag_of(doing)), *row]
        carrier.carry(torch.tensor(sent + [0.0] * (carrier.room - len(sent)), dtype=torch.float64))

    def arrive(self) -> list[list[float]]:
        """Every rank's row, by rank. Does not block; the gradients must be synchronized.

        Raises:
            MismatchError: Another rank has sent something else.
        """
        received = self._carrier.carried.tolist()
        require_tags([tag for _, tag, *_ in received], self._doing, self._group)
        return [row[: int(length)] for length, _, *row in received]
