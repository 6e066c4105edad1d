"""The thread beside each rank: it answers for a rank that computes, and frees it from a GPU that waits for a lost rank.

A rank that waits in an exchange looks at the store itself. One that computes doesn't, and one whose program waits for
its GPU, as in ``loss.item()``, may do so forever: a sum on GPUs doesn't end if another rank has failed or died. So the
thread looks for it, and then aborts what is pending on GPUs. The call returns with a meaningless result, but the
rank's next exchange raises :class:`PeerError` (:func:`.failures.wait`), and its next run gets a new process group.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import weakref

import torch.distributed as dist

from ddp_callbacks import environment
from ddp_callbacks._torch import accelerators_of, known_groups
from ddp_callbacks.process_group.peers import Leavers, Neighbors, publish_gone
from ddp_callbacks.process_group.presence import Alarm, Presence, names, presence, start_of, store

INTERVAL = 0.5  # seconds between two looks at the store


def announce_join() -> None:
    """Publish this rank's host name and process id for messages, and start the thread."""
    place = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "processes": environment.host_identity(),
        "start": start_of("self"),
    }
    store().set(f"host/{dist.get_rank()}", json.dumps(place))
    start_guard()


def start_guard() -> None:
    """Start the thread, unless it runs; it ends with the process group."""
    presence().start(_guard)


def _guard(reference: weakref.ref[Presence], stop: threading.Event) -> None:
    pid, entered, alarm, neighborhood = os.getpid(), -1, Alarm(), _Neighborhood()
    while not stop.wait(INTERVAL):
        here = reference()
        if here is None or not here.is_current() or os.getpid() != pid:
            return
        quiet, entered = here.is_quiet(entered)
        try:
            if quiet and alarm.rings():
                _read_news(here)
            if quiet and _uses_accelerators():
                neighborhood.look(here)
                here.abort_failed_run()
        except (RuntimeError, ValueError, LookupError):  # the store's host has died, or the group is gone
            if not stop.is_set() and here.is_current() and _uses_accelerators():
                here.abort_failed_run(lost=True)
            return
        if here.is_closing:
            return
        del here


def _read_news(here: Presence) -> None:
    """Note whether the run has ended, or the store is about to close; otherwise answer if another rank has asked."""
    here.listen_for_ends()
    here.is_closing = store().check(["closing"])
    if not here.is_closing:
        here.answer()


def _uses_accelerators() -> bool:
    return any(accelerators_of(group) for group in known_groups())


class _Neighborhood:
    """The other ranks on this host, of which no message comes once they are dead."""

    def __init__(self) -> None:
        self._ranks: tuple[Neighbors, Leavers] | None = None

    def look(self, here: Presence) -> None:
        """Publish those that have died, unless it is known what has ended the run."""
        world = dist.group.WORLD
        if self._ranks is None and world is not None:
            self._ranks = Neighbors(world), Leavers("", world)
        if self._ranks is None or here.ends() or here.is_closing:
            return
        neighbors, leavers = self._ranks
        if gone := neighbors.gone(leavers):
            here.listen_for_ends()  # what they said before they died
            if not here.ends():
                publish_gone(names(gone))
                here.listen_for_ends()
