"""This rank in the default group: the exchanges that it has entered and waits for, and the messages of other ranks.

An ordinary step sends no message. A rank that has waited for a second reports its place on the control channel. Its
thread (:mod:`.client`) hears of events on other ranks, also while the rank computes.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from ddp_callbacks._torch import (
    accelerators_of,
    known_groups,
    sequence_number,
    store_of,
    timeout_of,
)
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.process_group.client import Client, Gathering
from ddp_callbacks.process_group.control_channel import Message, limits
from ddp_callbacks.process_group.coordinator import FOREVER
from ddp_callbacks.process_group.places import DrawnBatches, Exchanges, Place, where
from ddp_callbacks.process_group.server import Server
from ddp_callbacks.process_group.torch_threads import await_threads, make_forks_wait

OWN_THREADS = "ddp_callbacks"
"""Prefix of the names of this library's threads. Their waits are not those of training, so they are not reported."""

_ADDRESS = "control"
_PATIENCE = 30.0  # seconds within which rank 0 must be reached
_NAMES = 2.0  # seconds to wait for the names of the ranks, for a message
_CLOSED = 16  # closed agreements, the latest, for which a rank still answers
_current: Presence | None = None  # the last presence of this process


class Presence:
    """This rank in the default group.

    Attributes:
        pid: The id of the process that joined; a forked child has another id.
        rank: The rank of this process in the default group.
        name: This rank, host and process id, for messages.
        run: The number of the run; equal on all ranks whenever they communicate.
        exchanges: Counts the exchanges that this rank has entered.
        drawn: The batches that this rank has drawn since its last backward.
        failed: Whether this run has failed here.
        aborted: Whether pending operations on accelerators were aborted, so that results may be meaningless.
        alone_in: The part of the program that this rank runs without the others; ``None`` outside of such parts.
        preemptions: The number of :class:`.preemption.Preemption` contexts that this rank has entered, by group.
        moves: Whether the rank is between two default groups: the next one that exists belongs to this presence.
        beginning: The gathering of all ranks' positions at the begin of the next run, once this rank is there.
        client, heard: This rank's end of the control channel, and the messages that it has heard there.
        responders: Functions by the name of a gathering; the thread calls one if this rank is asked for its value.
        closed: Such names and functions of agreements (:mod:`.moments`) that this rank has closed.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, part: str, patience: float) -> None:
        limits()  # raises here what is wrong, instead of in a thread
        self.pid, self.rank, self.run = os.getpid(), rank, 0
        self.exchanges, self.drawn = Exchanges(), DrawnBatches()
        self.failed = self.aborted = False
        self.alone_in: str | None = None
        self.preemptions = Counter[str]()
        self.beginning: Gathering | None = None
        self.responders: dict[str, Callable[[], None]] = {}
        self.closed: deque[tuple[str, Callable[[], None]]] = deque(maxlen=_CLOSED)
        self._seen = self._waits = 0
        self._is_over = self._has_left = False
        self.moves = True
        self._aborting = threading.RLock()
        self._world: Callable[[], dist.ProcessGroup | None] = lambda: None
        make_forks_wait()
        self._meeting, self._part = dist.PrefixStore("ddp_callbacks", store), part
        self._server = Server(size, store) if rank == 0 else None
        if self._server is not None:
            self._meeting.set(_ADDRESS, json.dumps(self._server.address | {"part": part}))
        self.name = _name_here(rank)
        self.client = Client(self, {"event": "join", "rank": rank, "name": self.name}, patience)
        self.heard = self.client.heard
        self.client.start()

    @property
    def store(self) -> dist.Store:
        """A part of the store that no earlier attempt has used. Known once all ranks have joined."""
        return dist.PrefixStore(self._part, self._meeting)

    def is_in(self, world: dist.ProcessGroup | None) -> bool:
        """Whether ``world`` is the group of this presence. If it ``moves``, it takes an existing ``world`` as such."""
        if self.moves and not self._has_left and world is not None and world is not self._world():
            self._world, self.moves = weakref.ref(world), False
        return world is not None and world is self._world()

    def describe(self, *ranks: int) -> str:
        """Return ``rank 1 (host node2, pid 4711), rank 2 (...)`` for global ranks; less if less is known.

        Blocks for two seconds per rank at most.
        """
        own = {self.rank: self.name}
        return ", ".join(own.get(rank) or self._name_of(rank) for rank in sorted(ranks))

    def _name_of(self, rank: int) -> str:
        heard = self.heard
        heard.wait_for(lambda: heard.get("names") or heard.get("closing") or self.end_of_run(), _NAMES)
        said = heard.get("names")
        return str(said["names"][rank]) if said else f"rank {rank}"

    # --- exchanges and runs -------------------------------------------------------------------------------------------

    def enter(self, purpose: str) -> None:
        """Note that this rank takes part in an exchange. Costs a microsecond; sends nothing.

        Raises:
            ConfigurationError: The other ranks do not take part, see :func:`alone_in`.
        """
        if self.alone_in is not None:
            raise ConfigurationError(
                f"{self.alone_in} runs on one process while the others wait for it, so it cannot take part in "
                f"{purpose}, for which all are needed. Do it in a hook that all processes call, such as setup."
            )
        self.exchanges.enter(purpose)

    def begin(self, run: int) -> None:
        """Begin a run: forget the previous one. Local."""
        with self._aborting:
            self.run, self.failed, self.aborted, self._is_over = run, False, False, False
        self.exchanges.forget()
        self.drawn.count = 0  # a rank that failed may have drawn alone
        self.beginning = None
        self.heard.forget_before(run)

    def place(self, purpose: str, group: dist.ProcessGroup | None, started: int = 0, **more: Any) -> Place:
        """Return the place of this rank in the exchange ``purpose``, for which it has ``started`` torch collectives."""
        members = None if group is dist.group.WORLD else dist.get_process_group_ranks(group)
        sequence = sequence_number(dist.group.WORLD) - started
        entered = self.exchanges
        return Place(self.run, purpose, entered.turn(purpose), entered.turns(), sequence, members, **more)

    @contextlib.contextmanager
    def waiting(self, place: Place, broke: bool = False) -> Iterator[None]:
        """Let rank 0 know that, inside, this rank waits at ``place``, or finds out why its wait there ``broke``."""
        self._waits += 1
        self.heard.pop("told", place.purpose, place.run)
        self.client.send({"event": "wait", "place": asdict(place) | {"line": where()[1]}, "broke": broke})
        try:
            yield
        finally:
            self._waits -= 1
            self.client.send({"event": "done", "about": place.purpose})

    def told(self, place: Place) -> Message | None:
        """Return rank 0's answer about the ranks that this one waits for at ``place``; ``None`` if there is none."""
        return self.heard.get("told", place.purpose, place.run)

    def gathering(self, name: str, run: int | None = FOREVER, members: list[int] | None = None) -> Gathering:
        """Return a gathering in the default group. Its name is equal on all ranks, and used once per run."""
        world = dist.group.WORLD
        assert world is not None
        return Gathering(self.client, name, run, members, timeout_of(world))

    # --- aborts -------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Abort pending operations on accelerators in all groups of this rank, unless they have been aborted.

        Blocks until they are aborted, also if another thread does it.
        """
        with self._aborting:
            if self.aborted:
                return
            self.failed = self.aborted = True  # before a blocked call returns
            for group in reversed(known_groups()):  # the latest first, as torch does
                with contextlib.suppress(RuntimeError):
                    for backend in accelerators_of(group):
                        backend.abort()

    def abort_failed_run(self) -> None:
        """Call :meth:`abort` if the run has failed before this rank has reached the end of the run."""
        with self._aborting:
            if (self.failed or self.end_of_run()) and not self._is_over:
                self.abort()

    def end_run(self) -> bool:
        """Stop :meth:`abort_failed_run` from aborting anything more in this run. Return whether it has aborted."""
        with self._aborting:
            self._is_over = True
            return self.aborted

    def end_of_run(self, begins: bool = False) -> Message | None:
        """Return the message that has ended this run; ``None`` if this rank has heard none.

        Args:
            begins: Whether this rank is at the start of the next run, and ignores a failure that ended the last one.
        """
        own = self.heard.get("end", run=self.run)
        if begins and own is not None and (self.failed or own["kind"] == "mismatch"):
            own = None
        return own or self.heard.get("end", run=FOREVER)

    # --- the end ------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Tell the others that this rank leaves, and end its threads. Blocks for five seconds at most."""
        if os.getpid() != self.pid:
            return  # a forked child
        if not self._has_left:
            self.end_run()
            self._say_farewell()
        self.close()

    def close(self) -> None:
        """End the threads. If this rank has not said that it leaves, the others take it for dead."""
        self._has_left = True
        self.client.close()
        if self._server is not None:
            self._server.close()
            self._server.join()
        vars(self).pop("_meeting", None)  # the last user of a file store removes the file

    def _say_farewell(self) -> None:
        self._has_left = True
        self.client.send({"event": "leave", "place": self._place(failed=self.failed)})
        if self._server is not None:
            self._server.close()

    # --- in the thread ------------------------------------------------------------------------------------------------

    def find_server(self) -> Message | None:
        """Return the address of rank 0, see :class:`.client.Owner`."""
        if not self._meeting.check([_ADDRESS]):
            return None
        address: Message = json.loads(self._meeting.get(_ADDRESS))
        self._part = address["part"]
        return address

    def hear(self, message: Message) -> None:
        """Answer a message, see :class:`.client.Owner`."""
        if message["event"] == "where":
            function, line = where()
            place = self._place(waits=bool(self._waits), torch=function, line=line)
            self.client.send({"event": "place", "place": place})
        elif message["event"] == "asked":
            respond = self.responders.get(message["about"]) or dict(self.closed).get(message["about"])
            if respond is not None:
                respond()

    def tick(self) -> bool:
        """Free this rank if it waits for its GPU in vain. Return whether its group is still the default group."""
        if not self.moves and not self._has_left and not self.is_in(dist.group.WORLD):
            self._say_farewell()
            del self._meeting
        is_quiet = self.exchanges.entered == self._seen and not self._waits
        self._seen = self.exchanges.entered
        if is_quiet and self.end_of_run() and any(map(accelerators_of, known_groups())):
            self.abort_failed_run()
        return not self._has_left

    def _place(self, **more: Any) -> Message:
        return asdict(self.place(self.exchanges.last, dist.group.WORLD, **more))


def presence() -> Presence:
    """Return the presence of this process in the default group, which must exist. Make it if needed."""
    here, world = found(), dist.group.WORLD
    if here is None:
        assert world is not None
        here = join(store_of(world), world.rank(), world.size())
        here.is_in(world)
    return here


def join(store: dist.Store, rank: int, size: int, part: str = "", patience: float = _PATIENCE) -> Presence:
    """Make a presence in the default group that is, or will be, formed in ``store``. Does not wait for other ranks.

    Args:
        store, rank, size: The group's store, the rank of this process, and the number of ranks.
        part: On rank 0, the name of a part of the store that no other attempt has used.
        patience: Seconds within which rank 0 must be reached once its address is in the store.
    """
    global _current
    if _current is not None:
        _current.leave()  # the old group is gone
    _current = Presence(store, rank, size, part, patience)
    return _current


def found() -> Presence | None:
    """Like :func:`presence`, but ``None`` if there is none yet."""
    return _current if _current is not None and _current.is_in(dist.group.WORLD) else None


def exchanges_by_now() -> tuple[int, int]:
    """Return how many exchanges this rank has begun: those of this library, and torch's in the default group."""
    return presence().exchanges.entered, sequence_number(dist.group.WORLD)


def has_joined() -> bool:
    """Whether this process has joined a process group by this library, at any time."""
    return _current is not None


def enter(purpose: str) -> None:
    """Note that this rank takes part in an exchange for ``purpose``. Sends nothing."""
    presence().enter(purpose)


@contextlib.contextmanager
def alone_in(name: str) -> Iterator[None]:
    """Mark that, inside, only this rank runs ``name`` and the others wait: exchanges raise instead of deadlocking."""
    here = presence()
    here.alone_in = name
    try:
        yield
    finally:
        here.alone_in = None


def is_aborted() -> bool:
    """Whether pending operations on accelerators were aborted in this run."""
    here = found()
    return here is not None and here.aborted


def describe(rank: int) -> str:
    """Return ``rank 1 (host node2, pid 4711)`` for a global rank; less if less is known. Works without a group."""
    return presence().describe(rank) if dist.is_initialized() else _name_here(rank)


def _name_here(rank: int) -> str:
    return f"rank {rank} (host {socket.gethostname()}, pid {os.getpid()})"


@atexit.register
def _end_threads() -> None:
    """End the threads: returning from C++ during interpreter shutdown would abort the process."""
    if _current is not None:
        _current.leave()
    await_threads()
