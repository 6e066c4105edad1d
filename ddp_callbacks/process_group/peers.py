"""What the ranks tell each other through the store: which have failed, left or died, and which are in a deadlock.

A failure or a mismatch belongs to one run. An exception that ends a process, and a death, are permanent.
:mod:`ddp_callbacks.process_group.presence` lists the keys.
"""

from __future__ import annotations

import json
import time
import traceback
import zlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ddp_callbacks import environment
from ddp_callbacks.errors import MismatchError, PeerError, Preempted
from ddp_callbacks.process_group.deadlocks import Stand
from ddp_callbacks.process_group.presence import (
    await_key,
    describe,
    names,
    presence,
    raise_alarm,
    start_of,
    store,
)

LINGER = 3.0  # seconds, more than two slices of a wait, that the store outlives its host's part in the run
_SETTLED = 2.0  # seconds after which all messages from a rank that has left have arrived
_FOLLOWED = 5.0  # seconds after which we would know of another failure that made a rank leave
_REMEDY = (
    "Every rank must make the same calls in the same order, also in hooks and callbacks, wherever the others must "
    "take part."
)


# --- failures ---------------------------------------------------------------------------------------------------------


def report_failure(exception: BaseException) -> None:
    """Publish ``exception``, which ends the run here, unless a rank has already failed in this run.

    Never raises, never blocks for long.
    """
    if isinstance(exception, Preempted):
        return  # every rank raises it
    here = presence()
    here.failed = True
    _report(f"{here.run}/failure", exception)


def report_end(exception: BaseException) -> None:
    """Publish an exception that ends the process: later runs see it too."""
    presence().failed = True
    _report("failure", exception)


def _report(key: str, exception: BaseException) -> None:
    if isinstance(exception, PeerError):
        return
    report = {
        "rank": dist.get_rank(),
        "type": type(exception).__name__,
        "message": str(exception),
        "traceback": "".join(traceback.format_exception(exception)),
    }
    try:
        store().compare_set(key, "", json.dumps(report))
        raise_alarm()
    except RuntimeError:
        pass  # the store's host process is gone; the others see the broken connection


def check_peers(begins: bool = False) -> None:
    """Raise the failure that another rank has reported.

    Args:
        begins: This rank is at the start of the next run, and ignores a failure that has ended its last run.

    Raises:
        PeerError: A rank has failed.
        MismatchError: Ranks are in different exchanges.
    """
    run, root = presence().run, store()
    keys = ["failure"] if begins else [f"{run}/mismatch", "failure"]
    if not (begins and presence().failed):
        keys.insert(-1, f"{run}/failure")
    for key in keys:
        if root.check([key]):
            raise _error_of(key, root.get(key).decode())


def heard(doing: str) -> PeerError | MismatchError | None:
    """What has ended the run, if this rank has heard of it before the store was gone."""
    for key, text in presence().ends().items():
        return gone_error(text, doing) if key == "gone" else _error_of(key, text)
    return None


def _error_of(key: str, text: str) -> PeerError | MismatchError:
    return MismatchError(text) if key.endswith("mismatch") else _peer_error(json.loads(text))


def _peer_error(report: dict[str, Any]) -> PeerError:
    return PeerError(
        f"{describe(report['rank'])} failed with {report['type']}: {report['message']}\n"
        f"This is {describe(dist.get_rank())}, which stops because the run cannot continue without it. "
        f"The other rank's traceback:\n{report['traceback']}"
    )


# --- deaths -----------------------------------------------------------------------------------------------------------


def check_gone(doing: str) -> None:
    """Raise :class:`PeerError` if a rank has found dead ranks; those that this one waits for may be alive."""
    if store().check(["gone"]):
        raise gone_error(store().get("gone").decode(), doing)


def publish_gone(gone: str) -> str:
    """Publish the names of dead ranks; return those published first."""
    found = store().compare_set("gone", "", gone).decode()
    raise_alarm()
    return found


def gone_error(gone: str, doing: str, first_error: str = "") -> PeerError:
    """The error for dead ranks; ``gone`` is their names."""
    return PeerError(
        f"{gone} died or went silent while {describe(dist.get_rank())} was waiting for {doing}. Check the "
        f"output of that process and the kernel log of its host (out of memory, power, network).{first_error}"
    )


# --- ranks that have left ---------------------------------------------------------------------------------------------


def announce_leave() -> None:
    """Announce that this rank leaves; ranks that still wait for it raise."""
    here = presence()
    here.close()
    if here.is_closing:
        return
    leaver = {"rank": dist.get_rank(), "run": here.run, "follows": here.failed, "recent": here.recent()}
    store().set(f"left/{store().add('left', 1)}", json.dumps(leaver))
    if dist.get_rank() == 0:
        store().set("closing", "1")
    raise_alarm()
    store().add("away", 1)  # the last of all: now rank 0 may close the store


def linger(root: dist.Store, world_size: int) -> None:
    """On rank 0, which hosts the store: return once every other rank has left.

    It doesn't wait for ranks that are silent for :data:`LINGER` seconds; waiting ranks check the store more often.
    """
    looks, end = -1, time.monotonic() + LINGER
    while root.add("away", 0) < world_size and time.monotonic() < end:
        before, looks = looks, root.add("looks", 0)
        if looks != before:
            end = time.monotonic() + LINGER
        time.sleep(0.05)


class Leavers:
    """The ranks of a group that have left without entering the exchange that this rank waits for."""

    def __init__(self, doing: str, group: dist.ProcessGroup) -> None:
        self._doing = doing
        self._members = set(dist.get_process_group_ranks(group))
        self._known: list[tuple[float, dict[str, Any]]] = []

    def read(self) -> None:
        """Read which ranks have left since the last call."""
        total = store().add("left", 0)
        keys = [f"left/{number}" for number in range(len(self._known) + 1, total + 1)]
        if keys and store().check(keys):  # otherwise another rank is writing one
            self._known += [(time.monotonic(), json.loads(text)) for text in store().multi_get(keys)]

    def include(self, rank: int) -> bool:
        """Whether this rank has left, as far as we have read."""
        return any(leaver["rank"] == rank for _, leaver in self._known)

    def absent(self, at_once: bool = False) -> list[int]:
        """The global ranks that will never enter the exchange.

        Args:
            at_once: Messages still under way are known to be lost.
        """
        now = time.monotonic()
        return [
            leaver["rank"]
            for since, leaver in self._known
            if leaver["rank"] in self._members and now - since >= self._patience(leaver, at_once)
        ]

    def error(self, absent: list[int]) -> PeerError:
        """The error for these ranks."""
        return PeerError(
            f"{names(absent)} left the run while {describe(dist.get_rank())} still waits for {self._doing}. Every "
            "rank must make the same calls (run, evaluate and predict too) the same number of times."
        )

    def _patience(self, leaver: dict[str, Any], at_once: bool) -> float:
        """Seconds after which this leaver is surely the missing rank."""
        here = presence()
        turn, same_run = here.turn(self._doing), leaver["run"] == here.run
        if same_run and turn and leaver["recent"].get(self._doing, 0) >= turn:
            return float("inf")  # it has entered the exchange, and its messages are under way
        if leaver["follows"]:
            return _FOLLOWED
        return 0.0 if turn or at_once else _SETTLED


# --- ended processes --------------------------------------------------------------------------------------------------


class Neighbors:
    """The ranks of a group on this host, whose processes we can check: if one has ended, it will never answer.

    gloo's ring reports a broken connection only to the ranks at its two ends.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ranks = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
        self._started: dict[int, tuple[int, str]] | None = None

    def gone(self, leavers: Leavers) -> list[int]:
        """The global ranks whose process has ended without leaving. Local, once all ranks have joined."""
        ended = self.ended()
        if ended:
            leavers.read()  # what they said before they ended
        return [rank for rank in ended if not leavers.include(rank)]

    def ended(self) -> list[int]:
        """The global ranks whose process has ended."""
        if self._started is None:
            self._started = self._read()
        return [rank for rank, (pid, start) in (self._started or {}).items() if start_of(pid) != start]

    def _read(self) -> dict[int, tuple[int, str]] | None:
        """The processes on this host; ``None`` as long as a rank has not joined."""
        here, keys = environment.host_identity(), [f"host/{rank}" for rank in sorted(self._ranks)]
        if not here or not keys:
            return {}
        if not store().check(keys):
            return None
        places = zip(sorted(self._ranks), map(json.loads, store().multi_get(keys)), strict=True)
        return {rank: (place["pid"], place["start"]) for rank, place in places if place["processes"] == here}


# --- mismatches -------------------------------------------------------------------------------------------------------


def tag_of(doing: str) -> int:
    """A number that identifies the purpose of an exchange in its message; a float64 holds it exactly."""
    return zlib.crc32(doing.encode())


def require_tags(tags: Sequence[float], doing: str, group: dist.ProcessGroup, ranks: Sequence[int] = ()) -> None:
    """Raise :class:`MismatchError` unless all tags are equal. Every rank that took part must call it.

    Args:
        tags: :func:`tag_of` of each rank's exchange.
        doing: The purpose of this rank's exchange.
        ranks: The ranks in ``group`` of these tags; all if empty.
    """
    if all(tag == tags[0] for tag in tags):
        return
    by_tag: dict[int, list[int]] = {}
    for rank, tag in zip(ranks or range(group.size()), tags, strict=True):
        by_tag.setdefault(int(tag), []).append(dist.get_global_rank(group, rank))
    run = presence().run
    store().set(f"{run}/odds/{tag_of(doing)}", doing)
    texts = [f"{names(some)} exchange{'s' * (len(some) == 1)} {_name_of(run, tag)}" for tag, some in by_tag.items()]
    raise publish_mismatch(f"{', while '.join(texts)}. {_REMEDY}")


def require_sent(sent: str, doing: str, group: dist.ProcessGroup) -> None:
    """Raise :class:`MismatchError` unless rank 0 of ``group`` has sent what this rank expects."""
    if sent != doing:
        root, here = describe(dist.get_global_rank(group, 0)), describe(dist.get_rank())
        raise publish_mismatch(f"{root} sends {sent}, while {here} expects {doing}. {_REMEDY}")


def _name_of(run: int, tag: int) -> str:
    """The purpose behind a tag; the rank in that exchange is about to write it."""
    key = f"{run}/odds/{tag}"
    return store().get(key).decode() if await_key(key, LINGER) else "something else"


def at_odds(mine: Stand, other: Stand) -> MismatchError:
    """The error for two ranks that wait for each other."""
    first, second = sorted([mine, other], key=lambda stand: stand.rank)
    return publish_mismatch(
        f"{first.name} waits for {first.doing}, while {second.name} waits for {second.doing}. {_REMEDY}"
    )


def elsewhere(mine: Stand, rank: int, place: dict[str, Any]) -> MismatchError:
    """The error for a rank that waits in one of torch's collectives."""
    return publish_mismatch(
        f"{mine.name} waits for {mine.doing}, while {describe(rank)} is not in any collective of ddp_callbacks: it "
        f"last was in {place['last']}, and waits in torch.distributed's {place['torch']} at {place['line']}. {_REMEDY}"
    )


def publish_mismatch(text: str) -> MismatchError:
    """Publish ``text``; return the error with the text published first, which every rank raises."""
    presence().failed = True
    found = store().compare_set(f"{presence().run}/mismatch", "", text).decode()
    raise_alarm()
    return MismatchError(found)
