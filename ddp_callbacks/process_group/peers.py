"""What the ranks tell each other through the store: who has failed, left, died, or is at odds with the others.

A failure belongs to a run, and so does a mismatch; an exception that ends a process, and a death, are for good. The
keys are listed in :mod:`ddp_callbacks.process_group.presence`.
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
from ddp_callbacks.errors import MismatchError, PeerError
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

LINGER = 3.0  # seconds, more than two looks of who waits, for which the store outlives its host's part in the run
_SETTLED = 2.0  # seconds after which nothing of a rank that has left is still under way
_FOLLOWED = 5.0  # seconds after which a rank that left because of another would have been told of that one
_REMEDY = (
    "Every rank must make the same calls in the same order, also in hooks and callbacks, wherever the others must "
    "take part."
)


# --- failures ---------------------------------------------------------------------------------------------------------


def report_failure(exception: BaseException) -> None:
    """Publish ``exception``, which ends the run here, to the other ranks, unless one has failed before in this run.

    Never raises, never blocks for long.
    """
    here = presence()
    here.failed = True
    _report(f"{here.run}/failure", exception)


def report_end(exception: BaseException) -> None:
    """The same of an exception that ends the process: no later run forgets it."""
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
        pass  # the store has gone with the process that hosted it; the others see the broken connection


def check_peers(begins: bool = False) -> None:
    """Raise what another rank has reported.

    Args:
        begins: This rank has come to the next run. What has ended this one here, too, is forgotten when all have.

    Raises:
        PeerError: A rank has failed.
        MismatchError: Ranks are at odds.
    """
    run, root = presence().run, store()
    keys = ["failure"] if begins else [f"{run}/mismatch", "failure"]
    if not (begins and presence().failed):
        keys.insert(-1, f"{run}/failure")
    for key in keys:
        if root.check([key]):
            text = root.get(key).decode()
            raise MismatchError(text) if key.endswith("mismatch") else _peer_error(json.loads(text))


def heard(doing: str) -> PeerError | None:
    """What this rank has heard of before the store went, if anything."""
    for key, text in list(presence().heard.items()):
        return gone_error(text, doing) if key == "gone" else _peer_error(json.loads(text))
    return None


def _peer_error(report: dict[str, Any]) -> PeerError:
    return PeerError(
        f"{describe(report['rank'])} failed with {report['type']}: {report['message']}\n"
        f"This is {describe(dist.get_rank())}, which stops because the run cannot continue without it. "
        f"The other rank's traceback:\n{report['traceback']}"
    )


# --- deaths -----------------------------------------------------------------------------------------------------------


def check_gone(doing: str) -> None:
    """Raise :class:`PeerError` if a rank has found that others died: those that this one waits for may still live."""
    if store().check(["gone"]):
        raise gone_error(store().get("gone").decode(), doing)


def publish_gone(gone: str) -> str:
    """Those that have died, as the first that found out has them."""
    found = store().compare_set("gone", "", gone).decode()
    raise_alarm()
    return found


def gone_error(gone: str, doing: str, first_error: str = "") -> PeerError:
    """``gone`` are their names."""
    return PeerError(
        f"{gone} died or went silent while {describe(dist.get_rank())} was waiting for {doing}. Check the "
        f"output of that process and the kernel log of its host (out of memory, power, network).{first_error}"
    )


# --- who has left -----------------------------------------------------------------------------------------------------


def announce_leave() -> None:
    """Say that this rank takes part in no more collectives; whoever still waits for it raises."""
    here = presence()
    here.close()
    if here.is_closing:
        return
    leaver = {"rank": dist.get_rank(), "run": here.run, "follows": here.failed, "recent": here.recent()}
    store().set(f"left/{store().add('left', 1)}", json.dumps(leaver))
    if dist.get_rank() == 0:
        store().set("closing", "1")
    raise_alarm()


def linger(root: dist.Store, world_size: int) -> None:
    """For rank 0, with which the store goes: return once every other rank has left.

    Those that say nothing for :data:`LINGER` seconds are not waited for; whoever still waits for something looks up
    more often.
    """
    looks, end = -1, time.monotonic() + LINGER
    while root.add("left", 0) < world_size and time.monotonic() < end:
        before, looks = looks, root.add("looks", 0)
        if looks != before:
            end = time.monotonic() + LINGER
        time.sleep(0.05)


class Leavers:
    """The ranks of a group that left without having come to what this one waits for."""

    def __init__(self, doing: str, group: dist.ProcessGroup) -> None:
        self._doing = doing
        self._members = set(dist.get_process_group_ranks(group))
        self._known: list[tuple[float, dict[str, Any]]] = []

    def read(self) -> None:
        """Who has left since."""
        total = store().add("left", 0)
        keys = [f"left/{number}" for number in range(len(self._known) + 1, total + 1)]
        if keys and store().check(keys):  # else one is about to be written
            self._known += [(time.monotonic(), json.loads(text)) for text in store().multi_get(keys)]

    def include(self, rank: int) -> bool:
        """Whether this rank has left, as far as was read."""
        return any(leaver["rank"] == rank for _, leaver in self._known)

    def absent(self, at_once: bool = False) -> list[int]:
        """Those that will not come, by their numbers in the world.

        Args:
            at_once: What they have sent is known to be lost.
        """
        now = time.monotonic()
        return [
            leaver["rank"]
            for since, leaver in self._known
            if leaver["rank"] in self._members and now - since >= self._patience(leaver, at_once)
        ]

    def error(self, absent: list[int]) -> PeerError:
        """What to raise because of those."""
        return PeerError(
            f"{names(absent)} left the run while {describe(dist.get_rank())} still waits for {self._doing}. Every "
            "rank must make the same calls (run, evaluate and predict too) the same number of times."
        )

    def _patience(self, leaver: dict[str, Any], at_once: bool) -> float:
        """Seconds after which it is sure that it is this one that is missing."""
        here = presence()
        turn, same_run = here.turn(self._doing), leaver["run"] == here.run
        if same_run and turn and leaver["recent"].get(self._doing, 0) >= turn:
            return float("inf")  # it has done its part, and what it has sent is under way
        if leaver["follows"]:
            return _FOLLOWED
        return 0.0 if turn or at_once else _SETTLED


# --- whose process has ended ------------------------------------------------------------------------------------------


class Neighbors:
    """The ranks of a group on this host, whose processes the system knows: one that has ended will not come.

    gloo's ring tells a rank of a connection that broke only if it is one of its own.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._ranks = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
        self._started: dict[int, tuple[int, str]] | None = None

    def ended(self) -> list[int]:
        """Those whose process has ended, by their numbers in the world. Local, after the first time."""
        if self._started is None:
            self._started = self._read()
        return [rank for rank, (pid, start) in self._started.items() if start_of(pid) != start]

    def _read(self) -> dict[int, tuple[int, str]]:
        here, keys = environment.host_identity(), [f"host/{rank}" for rank in sorted(self._ranks)]
        if not here or not keys or not store().check(keys):
            return {}
        places = zip(sorted(self._ranks), map(json.loads, store().multi_get(keys)), strict=True)
        return {rank: (place["pid"], place["start"]) for rank, place in places if place["processes"] == here}


# --- ranks that are at odds -------------------------------------------------------------------------------------------


def tag_of(doing: str) -> int:
    """A number that travels with an exchange, for what it is for; a float64 holds it."""
    return zlib.crc32(doing.encode())


def require_tags(tags: Sequence[float], doing: str, group: dist.ProcessGroup, ranks: Sequence[int] = ()) -> None:
    """Raise :class:`MismatchError` unless all ranks exchange the same. Every rank that took part must call it.

    Args:
        tags: :func:`tag_of` what each of them exchanges.
        doing: What this rank exchanges.
        ranks: Those of ``tags``, by their numbers in ``group``; all if empty.
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
    """Raise :class:`MismatchError` unless what rank 0 of ``group`` has sent is for what this rank expects."""
    if sent != doing:
        root, here = describe(dist.get_global_rank(group, 0)), describe(dist.get_rank())
        raise publish_mismatch(f"{root} sends {sent}, while {here} expects {doing}. {_REMEDY}")


def _name_of(run: int, tag: int) -> str:
    """What a tag stands for; the rank that exchanges it is about to write it."""
    key = f"{run}/odds/{tag}"
    return store().get(key).decode() if await_key(key, LINGER) else "something else"


def at_odds(mine: Stand, other: Stand) -> MismatchError:
    """Two ranks wait for each other."""
    first, second = sorted([mine, other], key=lambda stand: stand.rank)
    return publish_mismatch(
        f"{first.name} waits for {first.doing}, while {second.name} waits for {second.doing}. {_REMEDY}"
    )


def elsewhere(mine: Stand, rank: int, place: dict[str, Any]) -> MismatchError:
    """A rank waits in a collective of torch's own."""
    return publish_mismatch(
        f"{mine.name} waits for {mine.doing}, while {describe(rank)} is not in any collective of ddp_callbacks: it "
        f"last was in {place['last']}, and waits in torch.distributed's {place['torch']} at {place['line']}. {_REMEDY}"
    )


def publish_mismatch(text: str) -> MismatchError:
    """The error that every rank raises, with the text of the first."""
    presence().failed = True
    found = store().compare_set(f"{presence().run}/mismatch", "", text).decode()
    raise_alarm()
    return MismatchError(found)
