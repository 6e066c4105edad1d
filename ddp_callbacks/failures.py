"""Waiting that ends: a failure on one rank reaches every other as an error that names it.

gloo cannot abort a collective that waits (https://github.com/pytorch/pytorch/issues/130345), so nobody here waits
without looking up: :func:`wait` waits in slices, and between two slices it reads the store of the default group, where
:func:`report_failure` leaves the first failure and :func:`announce_leave` the ranks that have gone.

Keys in the store of the default group, all below ``ddp_callbacks/``; ranks are numbers in the world:

========================  ============================================================================
``host/{rank}``           JSON, the host name and process id of a rank, written when it joins
``failure``               JSON, the first failure: rank, exception type, message, traceback
``left/{rank}``           a rank that has left the run for good
``alive/{rank}``          a rank that saw a collective break or heard of it, so it is not the one that died
``gone``                  the names of the ranks that died, as the first that found out has them
========================  ============================================================================
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import traceback
from datetime import timedelta
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist

from ddp_callbacks.errors import PeerError

SLICE = timedelta(seconds=1)  # how often a waiting rank looks up
GRACE = 2.0  # seconds in which every surviving rank has noticed that a collective broke
LINGER = 3.0  # seconds, more than two slices, for which the store outlives its host's part in the run


class ProcessEnded(RuntimeError):
    """The processes of these ranks have ended, as this host knows for sure."""

    def __init__(self, ranks: set[int]) -> None:
        super().__init__("its process has ended")
        self.ranks = ranks


class Waitable(Protocol):
    """Something of our own to wait for."""

    def wait_slice(self, seconds: float) -> bool:
        """Whether it came within ``seconds``. Raises RuntimeError if it will not come."""


Pending: TypeAlias = "dist.Work | torch.futures.Future[torch.Tensor] | Waitable"


def announce_join() -> None:
    """Write this rank's host name and process id, so that messages can name it."""
    _set_json(f"host/{dist.get_rank()}", {"host": socket.gethostname(), "pid": os.getpid()})


def announce_leave() -> None:
    """Say that this rank takes part in no more collectives; whoever still waits for it raises."""
    _store().set(f"left/{dist.get_rank()}", "1")


def outlive_readers(store: dist.Store, world_size: int) -> None:
    """For rank 0, with which the store goes: return once every other rank has left, or after :data:`LINGER` seconds."""
    end = time.monotonic() + LINGER
    while not store.check([f"left/{rank}" for rank in range(1, world_size)]) and time.monotonic() < end:
        time.sleep(0.05)


def report_failure(exception: BaseException) -> None:
    """Publish ``exception`` to the other ranks, unless one has failed before. Never raises, never blocks for long."""
    if isinstance(exception, PeerError):
        return
    report = {
        "rank": dist.get_rank(),
        "type": type(exception).__name__,
        "message": str(exception),
        "traceback": "".join(traceback.format_exception(exception)),
    }
    try:
        _store().compare_set("failure", "", json.dumps(report))
    except RuntimeError:
        pass  # the store has gone with the process that hosted it; the others see the broken connection


def describe_rank(group: dist.ProcessGroup, rank: int) -> str:
    """``rank 1 (host node2, pid 4711)`` for a rank of ``group``, by its number in the world; less if less is known.

    Reads the store for ranks other than this.
    """
    return _describe(dist.get_global_rank(group, rank))


def check_peers() -> None:
    """Raise :class:`PeerError` if some rank has reported a failure. One round trip to the store."""
    store = _store()
    if not store.check(["failure"]):
        return
    report = json.loads(store.get("failure"))
    raise PeerError(
        f"{_describe(report['rank'])} failed with {report['type']}: {report['message']}\n"
        f"This is {_describe(dist.get_rank())}, which stops because the run cannot go on without it. "
        f"The other rank's traceback:\n{report['traceback']}"
    )


def wait(pending: Pending, doing: str, group: dist.ProcessGroup) -> None:
    """Block until ``pending`` is complete.

    Args:
        pending: What a collective returned; a CUDA collective makes the current stream wait, as ``Work.wait`` does.
        doing: What the collective is for, for the message: "the gradients of bucket 3".
        group: The group that communicates.

    Raises:
        PeerError: Another rank reported a failure, left, or its connection broke, or nothing came within the group's
            own timeout.
    """
    absent_before: set[int] = set()
    while True:
        try:
            if _wait_slice(pending):
                return
        except RuntimeError as error:
            raise diagnose(group, doing, error) from error
        try:
            check_peers()
            _check_gone(doing)
            absent = _left(group)
        except PeerError:
            raise
        except RuntimeError as error:  # the store died under us
            raise diagnose(group, doing, error) from error
        if absent & absent_before:  # gone for a whole slice, so nothing of theirs is still under way
            raise _left_error(doing, absent)
        absent_before = absent


def _wait_slice(pending: Pending) -> bool:
    if hasattr(pending, "wait_slice"):
        return pending.wait_slice(SLICE.total_seconds())
    if not isinstance(pending, dist.Work):  # a future of a C++ collective is no torch.futures.Future
        return _wait_future(pending)
    if torch.cuda.is_initialized():
        pending.wait()  # orders the stream; a timeout here would block the host instead
        return True
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


def diagnose(group: dist.ProcessGroup, doing: str, error: RuntimeError) -> PeerError:
    """Find out why a wait broke with ``error``: who failed, left or is gone. Takes :data:`GRACE` seconds at most."""
    try:
        check_peers()
        if absent := _left(group):  # a rank says so before it closes its connections
            return _left_error(doing, absent)
        _store().set(f"alive/{dist.get_rank()}", "1")
        if isinstance(error, ProcessEnded):
            silent = _not_alive({dist.get_global_rank(group, rank) for rank in error.ranks})
        else:
            silent = _silent(group)
        names = _names_of_gone(silent)
    except PeerError as reported:
        return reported
    except RuntimeError:
        return PeerError(
            f"the rendezvous store at {_store_address()} cannot be reached any more, so the process that hosts it "
            f"has died or ended: rank 0, or torchrun's agent on rank 0's node. {_describe(dist.get_rank())} was "
            f"waiting for {doing}. Look at that process's own output and at its host's kernel log (out of memory, "
            f"power, network). First error: {error}"
        )
    return _gone_error(names, doing, f" First error: {error}")


def _check_gone(doing: str) -> None:
    """Raise :class:`PeerError` if a rank has found that others died: those that this one waits for may still live."""
    store = _store()
    if store.check(["gone"]):
        store.set(f"alive/{dist.get_rank()}", "1")
        raise _gone_error(store.get("gone").decode(), doing)


def _gone_error(names: str, doing: str, first_error: str = "") -> PeerError:
    return PeerError(
        f"{names} died or went silent while {_describe(dist.get_rank())} was waiting for {doing}. Look at that "
        f"process's own output and at its host's kernel log (out of memory, power, network).{first_error}"
    )


def _silent(group: dist.ProcessGroup) -> set[int]:
    """Every rank that sees a collective break says that it lives; who says nothing in time is gone."""
    silent = set(dist.get_process_group_ranks(group))
    end = time.monotonic() + GRACE
    while silent and time.monotonic() < end:
        check_peers()
        silent = _not_alive(silent)
        time.sleep(0.05)
    return silent


def _not_alive(ranks: set[int]) -> set[int]:
    return {rank for rank in ranks if not _store().check([f"alive/{rank}"])}


def _names_of_gone(silent: set[int]) -> str:
    """The names of ``silent``. Where all of a group's ranks live, it broke because one had seen another group break."""
    store = _store()
    if silent:
        names = ", ".join(_describe(rank) for rank in sorted(silent))
        store.compare_set("gone", "", names)
        return names
    return store.get("gone").decode() if store.check(["gone"]) else "some rank"


def _left_error(doing: str, absent: set[int]) -> PeerError:
    _store().set(f"alive/{dist.get_rank()}", "1")
    names = ", ".join(_describe(rank) for rank in sorted(absent))
    return PeerError(
        f"{names} left the run while {_describe(dist.get_rank())} still waits for {doing}. Every rank "
        "must make the same calls (run, evaluate and predict too) the same number of times."
    )


def _left(group: dist.ProcessGroup) -> set[int]:
    """The ranks of the group that left by themselves, not because another one had gone before them."""
    store = _store()
    others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
    return {rank for rank in others if store.check([f"left/{rank}"]) and not store.check([f"alive/{rank}"])}


def _describe(rank: int) -> str:
    """The same for a rank of the world."""
    if rank == dist.get_rank():
        return f"rank {rank} (host {socket.gethostname()}, pid {os.getpid()})"
    try:
        if not _store().check([f"host/{rank}"]):
            return f"rank {rank}"
        known = json.loads(_store().get(f"host/{rank}"))
    except RuntimeError:
        return f"rank {rank}"
    return f"rank {rank} (host {known['host']}, pid {known['pid']})"


def _store_address() -> str:
    store = _world().get_group_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if isinstance(store, dist.TCPStore) else type(store).__name__


def _set_json(key: str, value: object) -> None:
    _store().set(key, json.dumps(value))


def _store() -> dist.Store:
    """The store of the world, which all ranks read, whatever group they wait in."""
    return dist.PrefixStore("ddp_callbacks", _world().get_group_store())


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD
