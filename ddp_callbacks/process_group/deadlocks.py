"""Detect ranks that wait for each other in different exchanges. It takes a second or two; the error names both.

A rank that has waited long publishes in the default group's store what it waits for and what it has entered recently.
If many ranks wait for the same, only the first one does, so each rank makes only a few requests, whatever the world
size. A rank that is ahead, or slow, is no mismatch: two ranks are deadlocked only if neither has entered what the other
waits for.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass

import torch.distributed as dist

from ddp_callbacks.process_group.presence import describe, presence, raise_alarm, store

_NEWEST = 8  # stands that a rank reads at a time


@dataclass(frozen=True)
class Stand:
    """The exchange that a rank waits for.

    Attributes:
        rank, name: Its global rank, and its name in messages.
        doing, turn: The purpose of the exchange, and the rank's count of this kind of exchange.
        members: The global ranks that take part; ``None`` is all.
        recent: The rank's counts of recently entered exchanges, by kind.
    """

    rank: int
    name: str
    doing: str
    turn: int
    members: list[int] | None
    recent: dict[str, int]

    def misses(self, other: Stand) -> bool:
        """Whether it waits for ``other``, which has not entered the exchange."""
        concerned = self.members is None or other.rank in self.members
        return concerned and other.recent.get(self.doing, 0) < self.turn

    def crosses(self, other: Stand) -> bool:
        """Whether the two wait for each other in different exchanges, a deadlock."""
        return self.misses(other) and other.misses(self)

    @classmethod
    def here(cls, doing: str, group: dist.ProcessGroup) -> Stand:
        """This rank's stand while it waits for ``doing``."""
        here, rank = presence(), dist.get_rank()
        members = None if group is dist.group.WORLD else dist.get_process_group_ranks(group)
        return cls(rank, describe(rank), doing, here.turn(doing), members, here.recent())


class Comparison:
    """Compares this rank's stand with those of others during one wait."""

    def __init__(self, doing: str, group: dist.ProcessGroup) -> None:
        self.mine = Stand.here(doing, group)
        self._run = presence().run
        self._known = 0
        self._entry = ""

    def declare(self) -> bool:
        """Publish this rank's stand; return whether it is the first of its kind."""
        mine = self.mine
        kind = zlib.crc32(f"{mine.members} {mine.doing}".encode())
        if not mine.turn or store().add(f"{self._run}/at/{kind}/{mine.turn}", 1) > 1:
            return False
        self._entry = f"{self._run}/stand/{store().add(f'{self._run}/stands', 1)}"
        store().set(self._entry, json.dumps(asdict(mine)))
        raise_alarm()
        return True

    def crossed(self) -> Stand | None:
        """Find a rank that waits for this one in an exchange that this one will never enter."""
        if not self.mine.turn:
            return None
        total = store().add(f"{self._run}/stands", 0)
        for number in range(max(self._known, total - _NEWEST) + 1, total + 1):
            key = f"{self._run}/stand/{number}"
            if not store().check([key]):
                return None  # another rank is writing it: read it next time
            self._known = number
            text = store().get(key)
            other = Stand(**json.loads(text)) if text else None
            if other is not None and self.mine.crosses(other):
                return other
        return None

    def withdraw(self) -> None:
        """End the wait."""
        if self._entry:
            store().set(self._entry, "")
