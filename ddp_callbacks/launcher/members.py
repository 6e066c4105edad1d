"""The ranks that take part in a job: with ``--keep-going`` it continues without those that were lost.

A *successor* is a new process for a lost rank. It takes part once it is ready to join.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ddp_callbacks.launcher.connection import Connection
from ddp_callbacks.launcher.first_failure import End

_MOST = 3  # successors of a rank in succession that die soon
_SOON = 10.0  # seconds after they have joined


class Members:
    """The ranks that take part, those that were lost, and their successors.

    Args:
        nodes: The nodes on which the ranks start, in rank order.

    Attributes:
        ranks: The ranks that take part, also those that have exited with code 0.
        losses: What was lost and not replaced, in order: the end of a rank, or those of a node and of its ranks.
        successors: The successors that do not take part yet, by rank.
    """

    def __init__(self, nodes: Sequence[Connection]) -> None:
        names = [node.plan.name for node in nodes for _ in range(int(node.place["processes"]))]
        self._nodes = dict(enumerate(names))
        self.ranks = set(self._nodes)
        self.losses: list[list[End]] = []
        self.successors: dict[int, End] = {}
        self._generation = 0
        self._lost: set[int] = set()
        self._replaced = Counter[int]()  # how often a successor of each rank was started, and died soon
        self._joined_at: dict[int, float] = {}
        self._joined = Counter[int]()  # how often one has joined

    def summary(self) -> str:
        """Say how many of the ranks were lost, and how many of these take part again; empty if none was lost."""
        if not self._lost:
            return ""
        back = len(self._lost & self.ranks)
        again = f", {back} of them replaced" if back else ""
        return f"{len(self._lost)} of {len(self._nodes)} processes lost on the way{again}"

    @property
    def began_alone(self) -> bool:
        """Whether one process alone was started."""
        return len(self._nodes) == 1

    def has_none(self, name: str) -> bool:
        """Whether no rank takes part on a node, nor is to join there."""
        return not self.on(name) and all(end.node != name for end in self.successors.values())

    def forget_successors(self, name: str) -> None:
        """Note that no process of a node joins."""
        self.successors = {rank: end for rank, end in self.successors.items() if end.node != name}

    def on(self, name: str) -> list[int]:
        """Return the ranks that take part on a node."""
        return [rank for rank in self.ranks if self._nodes[rank] == name]

    def ends(self, started: Mapping[int, End]) -> list[End]:
        """Return what is known about the ranks that take part and have ``started``, in rank order."""
        return [end for rank, end in sorted(started.items()) if rank in self.ranks]

    def have_all_ended(self, started: Mapping[int, End]) -> bool:
        """Whether all ranks have ended; those of another node may not have started yet when the first ones end."""
        ends = self.ends(started)
        return len(ends) == len(self.ranks) and all(end.code is not None for end in ends)

    def nodes_without(self, ends: Sequence[End]) -> int:
        """Return the number of nodes that still have a rank once these ranks are lost."""
        return len({self._nodes[rank] for rank in self.ranks - _ranks(ends)})

    def lose(self, ends: list[End]) -> None:
        """Note the loss of these ranks, or of a node with these ranks."""
        self.losses.append(ends)
        gone = self.ranks & _ranks(ends)  # none if the ranks of a lost node had exited
        self.ranks -= gone
        self._lost |= gone
        self._generation += bool(gone)

    def replace(self, lost: End) -> bool:
        """Note that a successor of this rank is started; return whether it may."""
        assert lost.rank is not None
        if time.monotonic() - self._joined_at.get(lost.rank, math.inf) > _SOON:
            self._replaced[lost.rank] = 0
        self._replaced[lost.rank] += 1
        may = self._replaced[lost.rank] <= _MOST
        if may:
            self.successors[lost.rank] = End(lost.node, lost.rank)
        return may

    def add(self, name: str, count: int) -> None:
        """Note that this many new processes are started on a node that was added. They are successors of nobody."""
        for rank in range(len(self._nodes), len(self._nodes) + count):
            self._nodes[rank], self.successors[rank] = name, End(name, rank)

    def join(self, rank: int) -> End:
        """Note that the successor of this rank takes part; return what is known about it."""
        self.ranks.add(rank)
        self._joined[rank] += 1
        self._joined_at[rank] = time.monotonic()
        self.losses = [ends for ends in self.losses if rank not in _ranks(ends)]
        self._generation += 1
        return self.successors.pop(rank)

    def listed(self) -> dict[str, Any]:
        """Return the ``members`` of :data:`ddp_callbacks.cluster.environment.NEWS`."""
        replaced = {str(rank): count for rank, count in sorted(self._joined.items()) if rank in self.ranks}
        return {"generation": self._generation, "ranks": sorted(self.ranks), "replaced": replaced}


def _ranks(ends: Sequence[End]) -> set[int]:
    return {end.rank for end in ends if end.rank is not None}
