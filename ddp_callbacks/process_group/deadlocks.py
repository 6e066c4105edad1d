"""Ranks that wait for each other, each in another exchange: found in a second or two, and told with both names.

A rank that has waited long says in the store of the default group what it waits for, and what it has entered lately.
Of many ranks that wait for the same only the first does, so the store is asked a few times by each, however many there
are. A rank that is ahead, or slow, is no mismatch: two ranks are at odds only if neither has entered what the other
waits for.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass

import torch.distributed as dist

from ddp_callbacks.process_group.presence import describe, presence, raise_alarm, store

_NEWEST = 8  # stands that a rank compares itself with at a time


@dataclass(frozen=True)
class Stand:
    """What a rank waits for.

    Attributes:
        rank, name: Its number in the world, and what messages call it.
        doing, turn: What the exchange is for, and that it is the turn-th of this kind that the rank has entered.
        members: The ranks that exchange; ``None`` is all.
        recent: How often the rank has entered what it has entered lately, by kind.
    """

    rank: int
    name: str
    doing: str
    turn: int
    members: list[int] | None
    recent: dict[str, int]

    def misses(self, other: Stand) -> bool:
        """Whether it waits for ``other``, which has not come there."""
        concerned = self.members is None or other.rank in self.members
        return concerned and other.recent.get(self.doing, 0) < self.turn

    def crosses(self, other: Stand) -> bool:
        """Whether the two wait for each other, each in another exchange: neither will ever go on."""
        return self.misses(other) and other.misses(self)

    @classmethod
    def here(cls, doing: str, group: dist.ProcessGroup) -> Stand:
        """Where this rank is while it waits for ``doing``."""
        here, rank = presence(), dist.get_rank()
        members = None if group is dist.group.WORLD else dist.get_process_group_ranks(group)
        return cls(rank, describe(rank), doing, here.turn(doing), members, here.recent())


class Comparison:
    """Compares where this rank stands with where others do, as long as one wait lasts."""

    def __init__(self, doing: str, group: dist.ProcessGroup) -> None:
        self.mine = Stand.here(doing, group)
        self._run = presence().run
        self._known = 0
        self._entry = ""

    def declare(self) -> bool:
        """Let the others know; whether this rank is the first of its kind."""
        mine = self.mine
        kind = zlib.crc32(f"{mine.members} {mine.doing}".encode())
        if not mine.turn or store().add(f"{self._run}/at/{kind}/{mine.turn}", 1) > 1:
            return False
        self._entry = f"{self._run}/stand/{store().add(f'{self._run}/stands', 1)}"
        store().set(self._entry, json.dumps(asdict(mine)))
        raise_alarm()
        return True

    def crossed(self) -> Stand | None:
        """A rank that waits for this one in another exchange, which this one will never enter."""
        if not self.mine.turn:
            return None
        total = store().add(f"{self._run}/stands", 0)
        for number in range(max(self._known, total - _NEWEST) + 1, total + 1):
            key = f"{self._run}/stand/{number}"
            if not store().check([key]):
                return None  # about to be written: the next look finds it
            self._known = number
            text = store().get(key)
            other = Stand(**json.loads(text)) if text else None
            if other is not None and self.mine.crosses(other):
                return other
        return None

    def withdraw(self) -> None:
        """The wait is over."""
        if self._entry:
            store().set(self._entry, "")
