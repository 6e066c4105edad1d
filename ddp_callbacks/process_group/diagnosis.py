"""Find out why a wait broke: a rank has failed, left or died, or all are alive and one is late."""

from __future__ import annotations

import json
import time
from typing import Any

import torch.distributed as dist

from ddp_callbacks._torch import store_of
from ddp_callbacks.errors import MismatchError, PeerError
from ddp_callbacks.process_group.deadlocks import Comparison
from ddp_callbacks.process_group.peers import Leavers, at_odds, check_gone, check_peers, gone_error, heard, publish_gone
from ddp_callbacks.process_group.presence import (
    Alarm,
    await_key,
    describe,
    is_beside_training,
    names,
    presence,
    raise_alarm,
    store,
)

GRACE = 2.0  # seconds within which every live rank answers, even while computing


class ProcessEnded(RuntimeError):
    """The processes of these ranks have ended; this host knows for sure."""

    def __init__(self, ranks: set[int]) -> None:
        super().__init__("its process has ended")
        self.ranks = ranks


def diagnose(group: dist.ProcessGroup, doing: str, error: RuntimeError) -> PeerError | MismatchError:
    """Find out why a wait broke with ``error``: which ranks failed, left or died. Takes about :data:`GRACE`."""
    try:
        check_peers()
        check_gone(doing)
        leavers = Leavers(doing, group)
        leavers.read()
        if absent := leavers.absent(at_once=True):  # a rank announces that it leaves before it closes its connections
            return leavers.error(absent)
        if isinstance(error, ProcessEnded):
            return gone_error(publish_gone(names([dist.get_global_rank(group, rank) for rank in error.ranks])), doing)
        return _hold(doing, group, error)
    except (PeerError, MismatchError) as reported:
        return reported
    except RuntimeError:
        return heard(doing) or PeerError(
            f"the rendezvous store at {_store_address()} can no longer be reached, so the process that hosts it "
            f"has died or exited: rank 0, or torchrun's agent on rank 0's node. {describe(dist.get_rank())} was "
            f"waiting for {doing}. Check the output of that process and the kernel log of its host (out of memory, "
            f"power, network). First error: {error}"
        )


def _hold(doing: str, group: dist.ProcessGroup, error: RuntimeError) -> PeerError | MismatchError:
    """Ask every rank of the world to answer; ranks that don't answer in time are dead."""
    question, alarm, size, end = ask(), Alarm(), dist.get_world_size(), time.monotonic() + GRACE
    comparison = None if is_beside_training() else Comparison(doing, group)
    if comparison is not None:
        comparison.declare()
    while store().add(f"answers/{question}", 0) < size and time.monotonic() < end:
        if alarm.rings():
            check_peers()
            check_gone(doing)
            if comparison is not None and (other := comparison.crossed()):
                return at_odds(comparison.mine, other)
        time.sleep(0.1)
    found = _conclude(question)
    if found["gone"]:
        return gone_error(publish_gone(found["gone"]), doing, f" First error: {error}")
    return _late(doing, group, found["places"], error)


def ask() -> int:
    """Ask all ranks where they are; return the question's number. Waiting or computing ranks answer in about 1 s."""
    here = presence()
    question = store().add("question", 0)
    if question <= here.answered:  # otherwise another rank has just asked
        question = store().add("question", 1)
        raise_alarm()
    here.answer()
    return question


def answers(question: int) -> dict[int, dict[str, Any]]:
    """The places of the ranks that have answered this question or a later one."""
    keys = [f"answer/{rank}" for rank in range(dist.get_world_size())]
    if not store().check(keys):
        keys = [key for key in keys if store().check([key])]
    found = {int(key.split("/")[1]): json.loads(text) for key, text in zip(keys, store().multi_get(keys), strict=True)}
    return {rank: place for rank, place in found.items() if place["question"] >= question}


def _conclude(question: int) -> dict[str, Any]:
    """If many ranks ask, let a single one read all the answers."""
    key = f"verdict/{question}"
    if store().add(f"judges/{question}", 1) > 1 and await_key(key, GRACE):
        return dict(json.loads(store().get(key)))
    places = answers(question)
    silent = set(range(dist.get_world_size())) - set(places)
    found = {"gone": names(list(silent)) if silent else "", "places": list(places.items())}
    store().set(key, json.dumps(found))
    return found


def _late(
    doing: str, group: dist.ProcessGroup, places: list[tuple[int, dict[str, Any]]], error: RuntimeError
) -> PeerError:
    """The error if all ranks are alive: one is late, or a connection broke."""
    turn, others = presence().turn(doing), set(dist.get_process_group_ranks(group)) - {dist.get_rank()}

    def is_late(rank: int, place: dict[str, Any]) -> bool:
        has_come = turn and place["recent"].get(doing, 0) >= turn
        return rank in others and not place["waits"] and not has_come

    late = [
        f" {describe(rank)} is not in any collective of ddp_callbacks: it last was in {place['last']}, and is at "
        f"{place['line']}."
        for rank, place in places
        if is_late(rank, place)
    ]
    return PeerError(
        f"{describe(dist.get_rank())} waited for {doing} in vain, though every rank is alive: one did not come within "
        f"the timeout, or a connection broke.{''.join(late)} First error: {error}"
    )


def _store_address() -> str:
    world = dist.group.WORLD
    found = None if world is None else store_of(world)
    while isinstance(found, dist.PrefixStore):
        found = found.underlying_store
    return f"{found.host}:{found.port}" if isinstance(found, dist.TCPStore) else type(found).__name__
