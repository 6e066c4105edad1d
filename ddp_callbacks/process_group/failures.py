"""Waiting that ends: a failure on one rank reaches every other as an error that names it.

gloo cannot abort a collective that waits (https://github.com/pytorch/pytorch/issues/130345), so nobody here waits
without looking up: :func:`wait` waits in slices, and between two slices it looks into the store of the default group
(its keys are listed in :mod:`.presence`): what has failed, who has left, and whether another rank waits for this one
somewhere else.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from ddp_callbacks._torch import sequence_number
from ddp_callbacks.errors import MismatchError, PeerError
from ddp_callbacks.process_group.deadlocks import Comparison
from ddp_callbacks.process_group.diagnosis import ProcessEnded, answers, ask, diagnose
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
    announce_join,
    describe,
    enter,
    is_beside_training,
    names,
    presence,
    store,
)

__all__ = [
    "BEGIN",
    "LINGER",
    "SLICE",
    "Pending",
    "ProcessEnded",
    "Waitable",
    "announce_join",
    "announce_leave",
    "describe_rank",
    "diagnose",
    "enter",
    "linger",
    "of_device",
    "report_end",
    "report_failure",
    "require_sent",
    "require_tags",
    "tag_of",
    "wait",
]

SLICE = timedelta(seconds=1)  # how often a waiting rank looks up
BEGIN = "the begin of a run"
_ASK = 2.0  # seconds of waiting after which a rank asks where the others are


class Waitable(Protocol):
    """Something of our own to wait for."""

    def wait_slice(self, seconds: float) -> bool:
        """Whether it came within ``seconds``. Raises RuntimeError if it will not come."""


Pending: TypeAlias = "dist.Work | torch.futures.Future[torch.Tensor] | Waitable"


def describe_rank(group: dist.ProcessGroup, rank: int) -> str:
    """``rank 1 (host node2, pid 4711)`` for a rank of ``group``, by its number in the world; less if less is known.

    Reads the store for ranks other than this.
    """
    return describe(dist.get_global_rank(group, rank))


def wait(pending: Pending, doing: str, group: dist.ProcessGroup) -> None:
    """Block until ``pending`` is complete.

    Args:
        pending: What a collective returned; see :func:`of_device` for one on GPUs.
        doing: What the collective is for, for the message: "the gradients of bucket 3". Who has called
            :func:`ddp_callbacks.process_group.presence.enter` with it is told if another rank waits somewhere else.
        group: The group that communicates.

    Raises:
        PeerError: Another rank reported a failure, left, or its connection broke, or nothing came within the group's
            own timeout.
        MismatchError: Another rank waits for this one in another exchange.
    """
    try:
        if not _wait_slice(pending):
            _wait_long(pending, doing, group)
    except (PeerError, MismatchError):
        presence().failed = True
        raise
    except RuntimeError as error:
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
    """What one wait has heard of the others."""

    def __init__(self, doing: str, group: dist.ProcessGroup) -> None:
        self._doing = doing
        self._alarm = Alarm()
        self._leavers = Leavers(doing, group)
        self._neighbors = Neighbors(group)
        self._begins = doing == BEGIN

    def look(self) -> None:
        """Raise if what this rank waits for cannot come any more. One round trip to the store, unless there is news."""
        if self._alarm.rings():
            check_peers(self._begins)
            check_gone(self._doing)
            self._leavers.read()
        if absent := self._leavers.absent():
            raise self._leavers.error(absent)
        if ended := self._neighbors.ended():
            self._leavers.read()  # what they have said before they ended
            if gone := [rank for rank in ended if not self._leavers.include(rank)]:
                check_peers(self._begins)
                raise gone_error(publish_gone(names(gone)), self._doing)


class _Vigil:
    """A long wait of the thread that trains: it says where it is, and looks where the others are."""

    def __init__(self, pending: Pending, doing: str, group: dist.ProcessGroup) -> None:
        self._comparison = Comparison(doing, group)
        # Who has come to the next run waits there for the others to give this one up.
        self._begins = doing == BEGIN
        self._compares = not (self._begins and presence().failed)
        self._first: bool | None = None
        self._ask_at = time.monotonic() - SLICE.total_seconds() + _ASK
        self._asked: int | None = None
        # What this rank has started of torch's collectives before this wait.
        own = isinstance(pending, dist.Work) and group is dist.group.WORLD
        self._sequence = sequence_number(dist.group.WORLD) - own

    def look(self) -> None:
        """Raise :class:`MismatchError` if a rank waits for this one somewhere else."""
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
        """It is over."""
        try:
            self._comparison.withdraw()
        except RuntimeError:
            pass  # the store has gone

    def _look_for_torchs(self) -> None:
        """Where the others are: of those in a collective of torch's own nothing is known here."""
        if self._asked is None:
            self._asked, self._ask_at = ask(), time.monotonic() + 2 * SLICE.total_seconds()
            return
        for rank, place in answers(self._asked).items():
            if self._is_lost(rank, place):
                raise elsewhere(self._comparison.mine, rank, place)
        self._asked, self._ask_at = None, time.monotonic() + 10 * _ASK

    def _is_lost(self, rank: int, place: dict[str, Any]) -> bool:
        """Whether the rank is in a collective of torch that this one has not started, and has not come here."""
        mine = self._comparison.mine
        concerned = mine.turn and (mine.members is None or rank in mine.members)
        absent = not place["waits"] and place["recent"].get(mine.doing, 0) < mine.turn
        return bool(concerned and absent and place["torch"] and place["sequence"] > self._sequence >= 0)


# --- slices -----------------------------------------------------------------------------------------------------------


def of_device(pending: dist.Work | torch.futures.Future[torch.Tensor], device: torch.device) -> Pending:
    """What a collective on ``device`` returned, as :func:`wait` can wait for it.

    What runs on a GPU is done for the host as soon as it is in a stream; here it is done when the GPU has done it.
    """
    if device.type == "cpu" or hasattr(pending, "wait_slice"):
        return pending
    return _DeviceWork(pending) if isinstance(pending, dist.Work) else _DeviceFuture(pending)


class _DeviceWork:
    """A collective on GPUs: the host looks at it, and orders the current stream after it once it is done."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait_slice(self, seconds: float) -> bool:
        if not _poll(self._work.is_completed, seconds):
            return False
        self._work.wait()
        return True


class _DeviceFuture:
    """What a communication hook returned for a bucket on a GPU."""

    def __init__(self, future: torch.futures.Future[torch.Tensor]) -> None:
        self._future = future
        self._event: torch.cuda.Event | None = None

    def wait_slice(self, seconds: float) -> bool:
        if self._event is None:
            if not _wait_future(self._future):  # orders the current stream
                return False
            self._event = torch.cuda.Event()
            self._event.record()
        return _poll(self._event.query, seconds)


def _poll(is_done: Any, seconds: float) -> bool:
    end, pause = time.monotonic() + seconds, 1e-5
    while not is_done():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    return True


def _wait_slice(pending: Pending) -> bool:
    if hasattr(pending, "wait_slice"):
        return bool(pending.wait_slice(SLICE.total_seconds()))
    if not isinstance(pending, dist.Work):  # a future of a C++ collective is no torch.futures.Future
        return _wait_future(pending)
    try:
        pending.wait(SLICE)
    except RuntimeError:
        if not pending.is_completed():
            return False
        pending.wait()  # it has come to its end since the slice was over, or raises what has broken it
    return True


def _wait_future(future: torch.futures.Future[torch.Tensor]) -> bool:
    if not future.done():
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        if not done.wait(SLICE.total_seconds()):
            return False
    future.wait()
    return True
