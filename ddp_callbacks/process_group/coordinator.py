"""Rank 0 decides from the ranks' messages which ranks have failed, died or left, and which wait in vain.

A state machine in rank 0 without threads, sockets or a clock: each event is a call with the time, and returns the
messages to send. The messages of a rank (``event``), and the answers of rank 0:

==============  ===================================================================================================
``join``        The rank's name and host. Joined ranks hear which ones are ``missing``; when the last has joined, all
                hear the ``names``.
``wait``        The rank has waited long at a :class:`.places.Place`, or its wait broke. It may be ``told`` which
                ranks are absent because they have left; or, if the wait broke and all ranks live, which are late.
``done``        This wait has ended.
``end``         The rank failed in a run, or for good, or knows of a mismatch. All hear the first ``end`` of each run.
``put``         The rank's value for a gathering. All hear the ``gathered`` values when the last rank has put.
``ask``         The rank asks for a gathering. All are ``asked`` for their values.
``place``       Where the rank is, after it was asked ``where``.
``leave``       The rank leaves. If a connection ends without this, the rank has died: an ``end`` for good. When rank
                0 leaves, all hear ``closing``.
==============  ===================================================================================================

Many messages are ``about`` something: the purpose of a wait, or the name of a gathering.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from ddp_callbacks.process_group.connection import Message
from ddp_callbacks.process_group.places import Place

FOREVER = None  # in place of a run: the end of a process
GRACE = 2.0  # seconds within which every rank that runs answers
LINGER = 3.0  # seconds that rank 0 waits at its end, so that the others can finish
_SELDOM = 20.0  # seconds between two questions to the other ranks where they are, while a rank waits
REMEDY = (
    "Every rank must make the same calls in the same order, also in hooks and callbacks, wherever the others must "
    "take part."
)
Sent: TypeAlias = list[tuple[int, Message]]


@dataclass
class _Wait:
    """A wait of a rank."""

    place: Place
    broke: bool
    since: float
    asked: float = -math.inf  # when the other ranks were last asked where they are
    is_told: bool = False  # whether the rank has got an answer


@dataclass
class _Gathering:
    """A gathering: the values so far, and the message that asked for them, if any."""

    members: list[int]
    values: dict[int, Any] = field(default_factory=dict)  # by rank
    asked: Message | None = None


class Coordinator:
    """The state machine. Times are seconds of any clock. Each public method returns the messages to send.

    Args:
        size: The number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._ranks = list(range(size))
        self._names: dict[int, str] = {}
        self._counted = 0  # the number of joined ranks when they last heard which are missing
        self._waits: dict[tuple[int, str], _Wait] = {}
        self._places: dict[int, tuple[float, Place]] = {}
        self._asked: dict[int, float] = {}  # when each rank was asked where it is, until it answers
        self._left: dict[int, tuple[float, Place]] = {}
        self._gone: set[int] = set()
        self._ends: dict[int | None, Message] = {}
        self._gatherings: dict[tuple[str, int | None], _Gathering] = {}
        self._sent: Sent = []

    def receive(self, rank: int, message: Message, now: float) -> Sent:
        """Handle a message of a rank."""
        handle = getattr(self, f"_on_{message.get('event')}", None)
        if handle is not None:
            handle(rank, message, now)
        return self._settle(now)

    def lose(self, rank: int, now: float, why: str = "") -> Sent:
        """Handle the end of a rank's connection; ``why`` is known unless the rank itself has ended it."""
        self._forget(rank)
        if rank not in self._left and rank not in self._gone:
            self._bury([rank], why)
        return self._settle(now)

    def tick(self, now: float) -> Sent:
        """Handle the passing of time."""
        if self._counted < len(self._names) < len(self._ranks):
            self._counted = len(self._names)
            missing = [rank for rank in self._ranks if rank not in self._names]
            self._send(self._names, {"event": "missing", "ranks": missing})
        waiting = {rank for rank, _ in self._waits}
        for (rank, _), wait in self._waits.items():
            if wait.broke:
                self._ask_where([other for other in self._others(rank) if not self._is_heard(other, wait)], now)
            elif now - wait.since >= GRACE and now - wait.asked >= _SELDOM:
                wait.asked = now
                self._ask_where([other for other in self._others(rank) if other not in waiting], now)
        return self._settle(now)

    def close(self) -> Sent:
        """End the control channel: if rank 0 has left, all ranks hear ``closing``."""
        if 0 in self._left:
            self._send(self._ranks, {"event": "closing", "place": asdict(self._left[0][1])})
        return self._take()

    # --- messages of the ranks ----------------------------------------------------------------------------------------

    def _on_join(self, rank: int, message: Message, now: float) -> None:
        self._names[rank] = message["name"]
        if self._asked.pop(rank, None) is not None:  # it was asked before it could hear
            self._ask_where([rank], now)
        asked = [each.asked for each in self._gatherings.values() if each.asked and rank in each.members]
        for said in [*self._ends.values(), *asked]:
            self._send([rank], said)
        if len(self._names) == len(self._ranks):
            self._send(self._ranks, {"event": "names", "names": [self._names[each] for each in self._ranks]})

    def _on_wait(self, rank: int, message: Message, now: float) -> None:
        mine = Place(**message["place"])
        self._waits[rank, mine.doing] = _Wait(mine, message["broke"], now)
        if message["broke"]:
            self._ask_where(self._others(rank), now)
        for (other, _), wait in self._waits.items():
            place = wait.place
            is_comparable = other != rank and place.run == mine.run and not place.failed and not mine.failed
            if is_comparable and place.misses(rank, mine) and mine.misses(other, place):
                both = sorted([(rank, mine), (other, place)], key=lambda each: each[0])
                text = ", while ".join(f"{self._name(each)} waits for {at.doing} ({at.line})" for each, at in both)
                self._end(mine.run, {"kind": "mismatch", "text": f"{text}. {REMEDY}"})

    def _on_done(self, rank: int, message: Message, _: float) -> None:
        self._forget(rank, message["about"])

    def _on_end(self, _: int, message: Message, __: float) -> None:
        self._end(message["run"], message["what"])

    def _on_leave(self, rank: int, message: Message, now: float) -> None:
        self._forget(rank)
        self._left[rank] = now, Place(**message["place"])
        for key in list(self._gatherings):
            self._complete(key)

    def _on_place(self, rank: int, message: Message, now: float) -> None:
        place = Place(**message["place"])
        self._places[rank] = self._asked.pop(rank, now), place
        for (waiting, _), wait in self._waits.items():
            awaited = wait.place
            is_missing = awaited.run == place.run and not place.waits and awaited.misses(rank, place)
            if is_missing and place.torch and place.sequence > awaited.sequence >= 0:
                text = f"{self._name(waiting)} waits for {awaited.doing}, while {self._elsewhere(rank)} {REMEDY}"
                self._end(awaited.run, {"kind": "mismatch", "text": text})

    # --- gatherings ---------------------------------------------------------------------------------------------------

    def _on_put(self, rank: int, message: Message, _: float) -> None:
        self._gathering(message).values.setdefault(rank, message["value"])
        self._complete((message["about"], message["run"]))

    def _on_ask(self, _: int, message: Message, __: float) -> None:
        """Ask all members for their values. The first note counts."""
        gathering, about, run = self._gathering(message), message["about"], message["run"]
        if gathering.asked is None:
            gathering.asked = {"event": "asked", "about": about, "run": run, "note": message["note"]}
            self._send(gathering.members, gathering.asked)
            self._complete((about, run))

    def _gathering(self, message: Message) -> _Gathering:
        key = message["about"], message["run"]
        return self._gatherings.setdefault(key, _Gathering(message["members"] or self._ranks))

    def _complete(self, key: tuple[str, int | None]) -> None:
        """Once all members have put, tell all. If they were asked, the value of a rank that has left is ``None``."""
        gathering, (about, run) = self._gatherings[key], key
        if gathering.asked is not None:
            gathering.values = dict.fromkeys(self._left) | gathering.values
        if all(rank in gathering.values for rank in gathering.members):
            values = [gathering.values[rank] for rank in gathering.members]
            self._send(gathering.members, {"event": "gathered", "about": about, "run": run, "values": values})
            del self._gatherings[key]

    # --- answers ------------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> Sent:
        """Tell the ranks that wait in vain, and return all messages to send."""
        for (rank, about), wait in self._waits.items():
            answer = None if wait.is_told else self._answer(rank, wait, now)
            if answer is not None:
                wait.is_told = True
                self._send([rank], {"event": "told", "about": about, "run": wait.place.run, **answer})
        return self._take()

    def _answer(self, rank: int, wait: _Wait, now: float) -> Message | None:
        """Return which awaited ranks have left, or, if the wait broke, which are late; ``None`` if unknown."""
        absent = [
            other
            for other, (since, leaver) in self._left.items()
            if wait.place.concerns(other) and now - since >= wait.place.patience(leaver, wait.broke)
        ]
        if absent or not wait.broke:
            return {"absent": absent} if absent else None
        others = self._others(rank)
        silent = [each for each in others if not self._is_heard(each, wait)]
        if any(now - max(wait.since, self._asked.get(each, now)) < GRACE for each in silent):
            return None
        self._bury(silent)
        return {"late": [self._elsewhere(each) for each in others if each not in silent and self._is_late(each, wait)]}

    def _is_heard(self, rank: int, wait: _Wait) -> bool:
        """Whether the rank has answered a question asked after this wait broke, and so was alive then."""
        return rank in self._places and self._places[rank][0] >= wait.since

    def _is_late(self, rank: int, wait: _Wait) -> bool:
        place = self._places[rank][1]
        return not place.waits and (not wait.place.turn or wait.place.misses(rank, place))

    def _elsewhere(self, rank: int) -> str:
        """Say where a rank is that does not wait in an exchange of this library."""
        place = self._places[rank][1]
        at = f"waits in torch.distributed's {place.torch} at" if place.torch else "is at"
        return (
            f"{self._name(rank)} is not in any collective of ddp_callbacks: it last was in {place.doing}, and {at} "
            f"{place.line}."
        )

    def _bury(self, ranks: list[int], why: str = "") -> None:
        """Tell all ranks that these have died."""
        self._gone.update(ranks)
        if ranks:
            self._end(FOREVER, {"kind": "gone", "ranks": sorted(ranks)} | ({"why": why} if why else {}))

    def _end(self, run: int | None, what: Message) -> None:
        if run not in self._ends:
            self._ends[run] = {"event": "end", "run": run, **what}
            self._send(self._ranks, self._ends[run])

    def _ask_where(self, ranks: Iterable[int], now: float) -> None:
        due = [rank for rank in ranks if rank not in self._asked]
        self._asked.update(dict.fromkeys(due, now))
        self._send(due, {"event": "where"})

    def _others(self, rank: int) -> list[int]:
        """Return the ranks that this one waits for, without ranks that have left or died.

        The threads of a rank may wait for different ranks. A sum between nodes can break though all its ranks live, if
        one of these waits for a dead rank of its own node. The main thread waits for the sum over all ranks, so that
        one counts, too.
        """
        places = [wait.place for (waiting, _), wait in self._waits.items() if waiting == rank]
        here = [each for each in self._ranks if each != rank and each not in self._left and each not in self._gone]
        return [each for each in here if any(place.concerns(each) for place in places)]

    def _forget(self, rank: int, doing: str | None = None) -> None:
        for key in [key for key in self._waits if key[0] == rank and doing in (None, key[1])]:
            del self._waits[key]

    def _name(self, rank: int) -> str:
        return self._names.get(rank, f"rank {rank}")

    def _send(self, ranks: Iterable[int], message: Message) -> None:
        self._sent += [(rank, message) for rank in ranks]

    def _take(self) -> Sent:
        sent, self._sent = self._sent, []
        return sent
