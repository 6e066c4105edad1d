"""The ranks that take part in a job: with ``--keep-going`` it continues without those that were lost."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ddp_callbacks.launcher.connection import Connection
from ddp_callbacks.launcher.failures import End


class Members:
    """The ranks that take part, and those that were lost.

    Args:
        nodes: The nodes on which the ranks start, in rank order.

    Attributes:
        ranks: The ranks that take part, also those that have exited with code 0.
        losses: What was lost, in order: the end of a rank, or those of a node and of its ranks.
    """

    def __init__(self, nodes: Sequence[Connection]) -> None:
        names = [node.plan.name for node in nodes for _ in range(int(node.place["processes"]))]
        self._nodes = dict(enumerate(names))
        self.ranks = set(self._nodes)
        self.losses: list[list[End]] = []
        self._generation = 0

    @property
    def lost_ranks(self) -> int:
        """The number of ranks that were lost."""
        return len(self._nodes) - len(self.ranks)

    def on(self, name: str) -> list[int]:
        """Return the ranks that take part on a node."""
        return [rank for rank in self.ranks if self._nodes[rank] == name]

    def nodes_without(self, ends: Sequence[End]) -> int:
        """Return the number of nodes that still have a rank once these ranks are lost."""
        return len({self._nodes[rank] for rank in self.ranks - _ranks(ends)})

    def lose(self, ends: list[End]) -> bool:
        """Note the loss of these ranks, or of a node with these ranks; return whether others take part now."""
        self.losses.append(ends)
        gone = self.ranks & _ranks(ends)  # none if the ranks of a lost node had exited
        self.ranks -= gone
        self._generation += bool(gone)
        return bool(gone)

    def as_json(self) -> str:
        """Return the value of :data:`ddp_callbacks.environment.MEMBERS`."""
        return json.dumps({"generation": self._generation, "ranks": sorted(self.ranks)})


def _ranks(ends: Sequence[End]) -> set[int]:
    return {end.rank for end in ends if end.rank is not None}
