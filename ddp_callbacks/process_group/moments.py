"""Let all ranks act at the same moment once one of them has asked to.

A rank may ask at any time, over the control channel; a moment without a request sends nothing. Each rank counts the
moments that it has passed, such as batches. A rank that hears of a request reports its count, and passes no further
moment until it knows all counts. The ranks act at the first moment that no rank has passed. A thread hears and answers,
so even a rank that waits inside a step takes part.
"""

from __future__ import annotations

import threading
from functools import partial

import torch.distributed as dist

from ddp_callbacks.process_group.failures import wait
from ddp_callbacks.process_group.presence import presence


class Agreement:
    """Finds one moment, at which all ranks act on the first request.

    If all ranks ask and hold at the same moment, they act at that one.

    Args:
        name: Equal on all ranks, and used once.
        group: The process group of the ranks.
    """

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self._here, self._group, self._name = presence(), group, name
        self._counts = self._here.gathering(name, members=dist.get_process_group_ranks(group))
        self._lock = threading.Lock()
        self._passed = 0  # the number of moments that this rank has passed
        self._holds = False  # whether to pass no further moment until the counts of all ranks are here
        self._has_asked = False
        self._here.responders[name] = self.hold
        if self._counts.asked():
            self.hold()

    def ask(self, note: str) -> None:
        """Ask all ranks to act; the first ``note`` counts. Local; a signal's handler may call it."""
        if not self._has_asked:
            self._has_asked = True
            self._counts.ask(note)

    def hold(self) -> None:
        """After a request, report how many moments this rank has passed, and pass no further one. Local."""
        with self._lock:
            if not self._holds:
                self._holds = True
                self._counts.put(self._passed)

    def pass_moment(self) -> str:
        """Pass a moment and return "", or return the note of the request to act on now, and close.

        Without a request, it costs a microsecond. With one, it blocks until every rank has heard of it.

        Raises:
            PeerError: Another rank failed, died or went silent.
        """
        with self._lock:
            if not self._holds:
                self._passed += 1
                return ""
        wait(self._counts, "the moment at which all ranks act", self._group)
        if self._passed < max(count for count in self._counts.values if count is not None):
            self._passed += 1
            return ""
        self.close()
        asked = self._counts.asked()
        return str(asked["note"]) if asked else ""

    def close(self) -> None:
        """Pass no further moment, and still report the count if asked. Keeps no reference to the group."""
        self._here.closed.append((self._name, partial(self._counts.put, self._passed)))
        self._here.responders.pop(self._name, None)
