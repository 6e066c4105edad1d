"""All-gather a few float64 numbers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch.distributed as dist

from ddp_callbacks.comm.hosts import all_gather_bytes
from ddp_callbacks.process_group import resolve_group


class ScalarExchange:
    """All-gathers one row of a few numbers per rank. It needs at least two ranks."""

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
