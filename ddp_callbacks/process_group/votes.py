"""Something that every rank may want at the same moment, found out without a message where nobody wants it.

Ranks that run the same program mostly want the same at the same moment. So a rank that wants nothing lets the moment
pass and tells nobody. A rank that wants something counts itself in the store and waits until all have done so, or until
one that has let the moment pass says so: its thread or its next wait answers (:mod:`.presence`).
"""

from __future__ import annotations

import json
import time

import torch.distributed as dist

from ddp_callbacks._torch import timeout_of
from ddp_callbacks.process_group.diagnosis import answers, ask
from ddp_callbacks.process_group.failures import wait
from ddp_callbacks.process_group.presence import await_key, presence, store


def abstain() -> None:
    """Let a moment pass. Local; every rank must call this or :func:`is_unanimous` at the same moments."""
    presence().moments += 1


def is_unanimous(doing: str) -> bool:
    """Whether all ranks of the default group call this at this moment.

    Takes a few milliseconds if they do, and a second or two if one does not. Blocks until the last rank has come there.

    Raises:
        PeerError: Another rank failed, died or went silent.
    """
    world = dist.group.WORLD
    assert world is not None
    vote = _Vote(world)
    vote.cast()
    wait(vote, doing, world)
    presence().moments += 1
    return vote.result()


class _Vote:
    """One moment's vote, as something to wait for."""

    def __init__(self, world: dist.ProcessGroup) -> None:
        self._moment = presence().moments + 1
        self._count = f"{presence().run}/votes/{self._moment}"
        self._result = f"{self._count}/result"
        self._size, self._timeout = world.size(), timeout_of(world)
        self._since = time.monotonic()
        self._question: int | None = None

    def cast(self) -> None:
        """Count this rank."""
        if store().add(self._count, 1) == self._size:
            store().set(self._result, json.dumps(True))

    def result(self) -> bool:
        """Once the wait is over."""
        return bool(json.loads(store().get(self._result)))

    def wait_slice(self, seconds: float) -> bool:
        """See :class:`.failures.Waitable`."""
        if await_key(self._result, seconds) or self._has_abstention():
            return True
        if time.monotonic() - self._since > self._timeout.total_seconds():
            raise RuntimeError(f"not every rank came within {self._timeout}")
        return False

    def _has_abstention(self) -> bool:
        """Whether a rank has gone on without a vote, as the answers to the last question say."""
        asked, self._question = self._question, ask()
        if asked is None or not any(place["moments"] >= self._moment for place in answers(asked).values()):
            return False
        if not store().check([self._result]):  # a rank that has voted goes on when the result is there
            store().set(self._result, json.dumps(False))
        return True
