"""Let all ranks act at the same moment once one of them has asked to.

A rank may ask at any time, over the control channel; a moment without a request sends nothing. Each rank counts the
moments that it has passed, such as batches. A rank that hears of a request reports its count, and passes no further
moment until it knows all counts. The ranks act at the first moment that no rank has passed. A thread hears and answers,
so even a rank that waits inside a step takes part.

What a program decides at a moment must not depend on how fast a message is: a rank that hears of such a request passes
that moment, unless it asks there, too. So the ranks act there if all have asked, and else at the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from ddp_callbacks.errors import say
from ddp_callbacks.process_group.failures import wait
from ddp_callbacks.process_group.presence import describe, presence


class Agreement:
    """Finds one moment, at which all ranks act on the first request.

    Args:
        name: Equal on all ranks, and used once.
        group: The process group of the ranks.

    Attributes:
        asked: Once it is found: whether each rank has asked.
    """

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self._here, self._group, self._name = presence(), group, name
        self._counts = self._here.gathering(name, members=dist.get_process_group_ranks(group))
        self._lock = threading.RLock()
        self._passed = 0  # the number of moments that this rank has passed
        self._holds = False  # whether to pass no further moment until the counts of all ranks are here
        self._has_asked = False
        self.asked: list[bool] = []
        self._here.responders[name] = self._respond
        self._respond()

    def ask(self, note: str, moment: int | None = None) -> None:
        """Ask all ranks to act; the first ``note`` counts. Local; a signal's handler may call it."""
        if not self._has_asked:
            self._has_asked = True
            self._counts.ask([note, moment])

    def ask_now(self, note: str) -> None:
        """Ask at this moment, and hold. Local."""
        self.ask(note, self._passed)
        self.hold()

    def hold(self) -> None:
        """After a request, report how many moments this rank has passed, and pass no further one. Local."""
        with self._lock:
            if not self._holds:
                self._holds = True
                self._counts.put([self._passed, self._has_asked])

    def _respond(self) -> None:
        """Hold, if there is a request, and this rank has passed the moment of it."""
        with self._lock:
            _, moment = self._request or ("", self._passed)
            if moment is None or self._passed > moment:
                self.hold()

    @property
    def _request(self) -> list[Any] | None:
        """The first request: its note, and its moment, if it belongs to one."""
        asked = self._counts.asked()
        return asked["note"] if asked else None

    def pass_moment(self) -> str:
        """Pass a moment and return "", or return the note of the request to act on now, and close.

        Without a request, it costs a microsecond. With one, it blocks until every rank has heard of it.

        Raises:
            PeerError: Another rank failed, died or went silent.
        """
        with self._lock:
            if not self._holds:
                self._passed += 1
                self._respond()
                return ""
        wait(self._counts, "the moment at which all ranks act", self._group)
        if self._passed < max(value[0] for value in self._counts.values if value is not None):
            self._passed += 1
            return ""
        self.asked = [value is not None and value[1] for value in self._counts.values]
        self.close()
        return str(self._request[0]) if self._request else ""

    def close(self) -> None:
        """Pass no further moment, and still report the count if asked. Keeps no reference to the group."""
        with self._lock:
            if self._request:
                self.hold()
            self._here.closed.append((self._name, partial(self._counts.put, [self._passed, self._has_asked])))
            self._here.responders.pop(self._name, None)


def tell_lone_decision(asked: Sequence[bool], decided: str) -> None:
    """Let rank 0 say which ranks have decided alone what all do now, if some have and others have not. Local.

    Args:
        asked: Whether each rank has decided it.
        decided: What, and how all could decide alike: "set x, and the others did not: ...".
    """
    alone = [rank for rank, has_asked in enumerate(asked) if has_asked]
    if alone and len(alone) < len(asked) and presence().rank == 0:
        more = f" and {len(alone) - 1} more" if alone[1:] else ""
        say(f"{describe(alone[0])}{more} {decided}")
