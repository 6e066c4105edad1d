"""Waits that end: a failure on one rank raises an error on every other rank that names it.

gloo cannot abort a pending collective (https://github.com/pytorch/pytorch/issues/130345), so :func:`wait` waits in
slices. Between two slices it checks the store of the default group (:mod:`.presence` lists the keys): which ranks have
failed or left, and whether another rank waits for this one in a different exchange.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from ddp_callbacks._torch import is_ordered_by_stream, sequence_number
from ddp_callbacks.errors import MismatchError, PeerError
from ddp_callbacks.process_group.deadlocks import Comparison
from ddp_callbacks.process_group.diagnosis import ProcessEnded, answers, ask, diagnose
from ddp_callbacks.process_group.guard import announce_join
from ddp_callbacks.process_group.peers import (
    LINGER,
    Leavers,
    Neighbors,
    announce_leave,
    at_odds,
    check_gone,
    check_peers,
    elsewhere,
    gone_error,
    linger,
    publish_gone,
    report_end,
    report_failure,
    require_sent,
    require_tags,
    tag_of,
)
from ddp_callbacks.process_group.presence import (
    Alarm,
    describe,
    enter,
    is_aborted,
    is_beside_training,
    names,
    presence,
    store,
)

__all__ = [
    "BEGIN",
    "LINGER",
    "SLICE",
    "Launched",
    "Pending",
    "ProcessEnded",
    "Waitable",
    "announce_join",
    "announce_leave",
    "describe_rank",
    "diagnose",
    "enter",
    "launching",
    "linger",
    "of_device",
    "report_end",
    "report_failure",
    "require_sent",
    "require_tags",
    "tag_of",
    "wait",
]

SLICE = timedelta(seconds=1)  # how often a waiting rank checks the store
BEGIN = "the begin of a run"
_ASK = 2.0  # seconds of waiting before a rank asks where the others are
_ABORTED = "operations on GPUs were aborted, because the run has failed"


class Waitable(Protocol):
    """Something other than torch's objects to wait for."""

    def wait_slice(self, seconds: float) -> bool:
        """Wait up to ``seconds``; return whether it is complete. Raises RuntimeError if it never will be."""


Pending: TypeAlias = "dist.Work | torch.futures.Future[torch.Tensor] | Waitable"


def describe_rank(group: dist.ProcessGroup, rank: int) -> str:
    """``rank 1 (host node2, pid 4711)`` for a rank of ``group``, with its global rank; shorter if less is known.

    Reads the store for ranks other than this one.
    """
    return describe(dist.get_global_rank(group, rank))


def wait(pending: Pending, doing: str, group: dist.ProcessGroup) -> None:
    """Block until ``pending`` is complete.

    Args:
        pending: The result of a collective; see :func:`of_device` for the work of GPUs.
        doing: The purpose of the collective, for messages: "the gradients of bucket 3". If the caller has passed it to
            :func:`ddp_callbacks.process_group.presence.enter`, deadlocks are detected too.
        group: The group that communicates.

    Raises:
        PeerError: Another rank reported a failure, left, or its connection broke, or nothing came within the group's
            timeout.
        MismatchError: Another rank waits for this one in another exchange.
    """
    try:
        if not _wait_slice(pending):
            _wait_long(pending, doing, group)
        if is_aborted() and doing != BEGIN:
            raise RuntimeError(_ABORTED)  # so what has come may be meaningless
    except (PeerError, MismatchError):
        presence().failed = True
        raise
    except RuntimeError as error:
        presence().failed = True
        raise diagnose(group, doing, error) from error


@contextmanager
def launching(doing: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Launch collectives in this context: if the connections of this rank are lost, it raises what :func:`wait` raises.

    Other exceptions, as for a tensor of the wrong kind, pass through.

    Args:
        doing, group: As for :func:`wait`.

    Raises:
        PeerError: Another rank failed or died, so that this rank's operations on GPUs were aborted, or the backend
            cannot reach it.
        MismatchError: Another rank waits for this one in another exchange.
    """
    try:
        if is_aborted():
            raise dist.DistError(_ABORTED)
        yield
    except (PeerError, MismatchError):
        raise
    except RuntimeError as error:
        if not is_aborted() and not isinstance(error, dist.DistError):
            raise
        presence().failed = True
        raise diagnose(group, doing, error) from error


def _wait_long(pending: Pending, doing: str, group: dist.ProcessGroup) -> None:
    lookout = _Lookout(doing, group)
    if is_beside_training():
        lookout.look()
        while not _wait_slice(pending):
            lookout.look()
        return
    here, vigil = presence(), _Vigil(pending, doing, group)
    here.waits = True
    try:
        lookout.look()
        vigil.look()
        while not _wait_slice(pending):
            lookout.look()
            vigil.look()
    finally:
        here.waits = False
        vigil.end()


class _Lookout:
    """What this rank has heard of the others during one wait."""

    def __init__(self, doing: str, group: dist.ProcessGroup) -> None:
        self._doing = doing
        self._alarm = Alarm()
        self._leavers = Leavers(doing, group)
        self._neighbors = Neighbors(group)
        self._begins = doing == BEGIN

    def look(self) -> None:
        """Raise if the wait cannot succeed any more. One round trip to the store, unless there is news."""
        if self._alarm.rings():
            check_peers(self._begins)
            check_gone(self._doing)
            self._leavers.read()
        if absent := self._leavers.absent():
            raise self._leavers.error(absent)
        if gone := self._neighbors.gone(self._leavers):
            check_peers(self._begins)
            raise gone_error(publish_gone(names(gone)), self._doing)


class _Vigil:
    """A long wait of the training thread: it publishes where it is, and checks where the others are."""

    def __init__(self, pending: Pending, doing: str, group: dist.ProcessGroup) -> None:
        self._comparison = Comparison(doing, group)
        # At the next run, a rank waits for the others to give up the failed one.
        self._begins = doing == BEGIN
        self._compares = not (self._begins and presence().failed)
        self._first: bool | None = None
        self._ask_at = time.monotonic() - SLICE.total_seconds() + _ASK
        self._asked: int | None = None
        # The collectives of torch that this rank has started before this wait.
        own = isinstance(pending, dist.Work) and group is dist.group.WORLD
        self._sequence = sequence_number(dist.group.WORLD) - own

    def look(self) -> None:
        """Raise :class:`MismatchError` if a rank waits for this one in another exchange."""
        store().add("looks", 1)
        presence().answer()
        if not self._compares:
            return
        if self._first is None:
            self._first = self._comparison.declare()
        if other := self._comparison.crossed():
            error = at_odds(self._comparison.mine, other)
            if not self._begins:
                raise error
            self._compares = False
        elif self._first and time.monotonic() >= self._ask_at:
            self._look_for_torchs()

    def end(self) -> None:
        """End the wait."""
        try:
            self._comparison.withdraw()
        except RuntimeError:
            pass  # the store is gone

    def _look_for_torchs(self) -> None:
        """Ask where the others are: the store doesn't show which ranks are in torch's collectives."""
        if self._asked is None:
            self._asked, self._ask_at = ask(), time.monotonic() + 2 * SLICE.total_seconds()
            return
        for rank, place in answers(self._asked).items():
            if self._is_lost(rank, place):
                raise elsewhere(self._comparison.mine, rank, place)
        self._asked, self._ask_at = None, time.monotonic() + 10 * _ASK

    def _is_lost(self, rank: int, place: dict[str, Any]) -> bool:
        """Whether the rank is in a collective of torch that this one has not started, instead of in this exchange."""
        mine = self._comparison.mine
        concerned = mine.turn and (mine.members is None or rank in mine.members)
        absent = not place["waits"] and place["recent"].get(mine.doing, 0) < mine.turn
        return bool(concerned and absent and place["torch"] and place["sequence"] > self._sequence >= 0)


# --- slices -----------------------------------------------------------------------------------------------------------


def of_device(work: dist.Work, device: torch.device, group: dist.ProcessGroup) -> Pending:
    """Make the work of a collective on ``device`` suitable for :func:`wait`.

    NCCL's work is complete for the host once it is in a stream: then only the current stream waits for the sum, not the
    host. No failure of a rank can be noticed there, so ranks also meet on the CPU in each step.
    """
    return _StreamWork(work) if is_ordered_by_stream(group, device) else work


class _StreamWork:
    """A collective in a GPU's stream; the current stream waits for it. (With a timeout, NCCL would block the host.)"""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait_slice(self, seconds: float) -> bool:
        self._work.wait()
        return True


class Launched:
    """A future, as something to wait for until the host has nothing more to do for it.

    On a GPU, that is when its collectives are in a stream; :func:`wait` for the future itself lets the current stream
    wait for them, too.
    """

    def __init__(self, future: torch.futures.Future[torch.Tensor]) -> None:
        self._future = future

    def wait_slice(self, seconds: float) -> bool:
        return _is_done(self._future, seconds)


def _wait_slice(pending: Pending) -> bool:
    if hasattr(pending, "wait_slice"):
        return bool(pending.wait_slice(SLICE.total_seconds()))
    if not isinstance(pending, dist.Work):  # a C++ collective's future is not a torch.futures.Future
        return _wait_future(pending)
    try:
        pending.wait(SLICE)
    except RuntimeError:
        if not pending.is_completed():
            return False
        pending.wait()  # it has completed since the slice ended; raises if it failed
    return True


def _wait_future(future: torch.futures.Future[torch.Tensor]) -> bool:
    if not _is_done(future, SLICE.total_seconds()):
        return False
    future.wait()  # the current stream waits, if it is on a GPU
    return True


def _is_done(future: torch.futures.Future[torch.Tensor], seconds: float) -> bool:
    if future.done():
        return True
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    return done.wait(seconds)
