"""A few numbers from every rank, in every step: one small sum, through the memory of the host where that can be."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddp_callbacks.all_reduce import choose_all_reduce
from ddp_callbacks.collectives import all_gather_tensors, message_device
from ddp_callbacks.errors import MismatchError
from ddp_callbacks.failures import describe_rank
from ddp_callbacks.process_group import resolve_group

_CAPACITY = 96  # numbers in a row, until a longer one was sent
_HEADER = 2  # numbers before the row: its length, and a checksum of what it is for


class RowExchange:
    """Gives every rank the row of every other; in a world of more than one. Making it is a collective.

    The rows are gathered as a sum, in which each rank writes its own row and leaves the others zero: a sum is what
    goes through shared memory. Numbers travel as float64.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = resolve_group(group)
        self._device = message_device(group)
        self._all_reduce = choose_all_reduce(self._group, [self._device])
        self._allocate(_CAPACITY)

    def exchange(self, row: Sequence[float], doing: str) -> list[list[float]]:
        """Send this rank's row; every rank's, by rank. Lengths may differ. Blocks until all have called it.

        Raises:
            MismatchError: Some rank exchanges something else.
            PeerError: As :func:`ddp_callbacks.failures.wait` does.
        """
        tag = float(zlib.crc32(doing.encode()))
        rows = self._memory.zero_().view(self._group.size(), _HEADER + self._capacity)
        fits = row if len(row) <= self._capacity else ()
        rows[self._group.rank(), : _HEADER + len(fits)] = torch.tensor([len(row), tag, *fits], dtype=torch.float64)
        self._all_reduce.launch(self._memory).wait(doing)
        received = rows.tolist()
        self._require_tag(tag, [own[1] for own in received], doing)
        longest = int(max(own[0] for own in received))
        if longest <= self._capacity:
            return [own[_HEADER : _HEADER + int(own[0])] for own in received]
        # Too long for the others to have left room: all have seen that, and send again.
        self._allocate(2 * longest)
        whole = torch.tensor(row, dtype=torch.float64)
        return [tensor.tolist() for _, (tensor,) in all_gather_tensors(None, [whole], doing, self._group)]

    def _allocate(self, capacity: int) -> None:
        self._capacity = capacity
        numel = self._group.size() * (_HEADER + capacity)
        self._memory = self._all_reduce.allocate(numel, torch.float64, self._device)

    def _require_tag(self, tag: float, tags: list[float], doing: str) -> None:
        others = [rank for rank, found in enumerate(tags) if found != tag]
        if others:
            names = ", ".join(describe_rank(self._group, rank) for rank in others)
            me = describe_rank(self._group, self._group.rank())
            raise MismatchError(
                f"{me} exchanges {doing}, while {names} exchanges something else. Every rank must make the same calls "
                "in the same order, also in hooks, wherever the others have to take part."
            )
