"""What follows from what the ranks say: who has failed, died or left, who waits in vain, what all have agreed upon.

A state machine in rank 0 without threads, sockets or a clock: each event is a call with the time, and returns the
messages that follow. What a rank says (``event``), and what it hears:

==============  ===================================================================================================
``join``        its name and host; those who have joined hear which are ``missing``, and all hear the ``names`` when the
                last has joined
``wait``        it has waited long, and where (:class:`Stand`), or this broke. It may hear that ranks are ``absent``, as
                they have left; or, where it broke, ``because`` where the others are
``done``        this wait has ended
``end``         it failed in a run, or for good, or knows of a mismatch: all hear the first ``end`` of each run
``put``         its part of a gathering; all hear what was ``gathered`` when the last has put
``ask``         it asks for a gathering: all are ``asked`` for their parts
``place``       where it is, if it was asked ``where``
``leave``       it leaves; one whose connection ends without this has died, an ``end`` for good. Rank 0 says ``closing``
==============  ===================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ddp_callbacks.process_group.connection import Message

FOREVER = -1  # in place of a run: the end of a process
GRACE = 2.0  # seconds within which every rank that runs answers
LINGER = 3.0  # seconds that rank 0 waits at its end for what the others have to do or say first
_SETTLED = 2.0  # seconds after which all messages from a rank that has left have arrived
_FOLLOWED = 5.0  # seconds after which we would know of another failure that made a rank leave
_OFTEN = 1.0  # seconds between two questions to a rank where it is
_SELDOM = 20.0  # seconds between those for a rank that waits
REMEDY = (
    "Every rank must make the same calls in the same order, also in hooks and callbacks, wherever the others must "
    "take part."
)
Sent: TypeAlias = list[tuple[int, Message]]


@dataclass(frozen=True)
class Stand:
    """The exchange that a rank waits for.

    Attributes:
        run: The number of its run.
        doing, turn: The purpose of the exchange, and the rank's count of this kind of exchange; 0 if it is not counted.
        members: The global ranks that take part; ``None`` is all.
        recent: The rank's counts of recently entered exchanges, by kind.
        sequence: The number of torch's collectives that it has started before; -1 if unknown.
        compares: Whether it cannot be where it is because it has heard of a failure before the others.
    """

    run: int
    doing: str
    turn: int
    members: list[int] | None
    recent: dict[str, int]
    sequence: int = -1
    compares: bool = True

    def concerns(self, rank: int) -> bool:
        """Whether ``rank`` takes part."""
        return self.members is None or rank in self.members

    def misses(self, rank: int, recent: dict[str, int]) -> bool:
        """Whether it waits for ``rank``, which has entered only what is ``recent``."""
        return self.concerns(rank) and recent.get(self.doing, 0) < self.turn

    def patience(self, leaver: Message, at_once: bool = False) -> float:
        """Seconds after which this leaver is surely the missing rank.

        Args:
            leaver: What it said when it left.
            at_once: Messages still under way are known to be lost.
        """
        if leaver["run"] == self.run and self.turn and leaver["recent"].get(self.doing, 0) >= self.turn:
            return math.inf  # it has entered the exchange, and its messages are under way
        if leaver["failed"]:
            return _FOLLOWED
        return 0.0 if self.turn or at_once else _SETTLED


@dataclass
class _Wait:
    """A wait of a rank: where, whether it broke, since when, when others were asked, whether the rank has an answer."""

    stand: Stand
    broke: bool
    since: float
    asked: float = -math.inf
    is_told: bool = False


@dataclass
class _Gathering:
    """What these ranks have put; and how they were asked for it, if they were."""

    members: list[int]
    values: dict[int, Any] = field(default_factory=dict)
    asked: Message | None = None


class Coordinator:
    """The state. Times are seconds of any clock.

    Args:
        size: The number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._ranks = list(range(size))
        self._names: dict[int, str] = {}
        self._counted = 0  # ranks that had joined when those heard which are missing
        self._waits: dict[tuple[int, str], _Wait] = {}
        self._places: dict[int, tuple[float, Message]] = {}
        self._asked: dict[int, float] = {}
        self._left: dict[int, tuple[float, Message]] = {}
        self._gone: set[int] = set()
        self._ends: dict[int, Message] = {}
        self._gatherings: dict[str, _Gathering] = {}
        self._sent: Sent = []
        self._events: dict[str, Callable[[int, Message, float], None]] = {
            "join": self._join,
            "wait": self._wait,
            "done": lambda rank, message, _: self._forget(rank, message["doing"]),
            "end": lambda _, message, __: self._end(message["run"], message["what"]),
            "put": self._put,
            "ask": self._ask_for,
            "place": self._place,
            "leave": self._leave,
        }

    def receive(self, rank: int, message: Message, now: float) -> Sent:
        """What follows from a message of a rank."""
        handle = self._events.get(message.get("event", ""))
        if handle is not None:
            handle(rank, message, now)
        return self._settle(now)

    def lose(self, rank: int, now: float) -> Sent:
        """What follows from the end of this rank's connection."""
        self._forget(rank)
        if rank not in self._left and rank not in self._gone:
            self._bury([rank])
        return self._settle(now)

    def tick(self, now: float) -> Sent:
        """What follows from the time."""
        if self._counted < len(self._names) < len(self._ranks):
            self._counted = len(self._names)
            missing = [rank for rank in self._ranks if rank not in self._names]
            self._send(list(self._names), {"event": "missing", "ranks": missing})
        waiting = {rank for rank, _ in self._waits}
        for (rank, _), wait in self._waits.items():
            if not wait.broke and now - wait.since >= GRACE and now - wait.asked >= _SELDOM:
                wait.asked = now
                self._ask_where([each for each in self._others(rank, wait.stand) if each not in waiting], now)
        return self._settle(now)

    def close(self) -> Sent:
        """Rank 0 has left, and says nothing more."""
        if 0 in self._left:
            self._send(self._ranks, {"event": "closing", "leaver": self._left[0][1]})
        return self._take()

    # --- what ranks say -----------------------------------------------------------------------------------------------

    def _join(self, rank: int, message: Message, now: float) -> None:
        self._names[rank] = message["name"]
        if self._asked.pop(rank, None):  # before it could hear
            self._ask_where([rank], now)
        for end in self._ends.values():
            self._send([rank], end)
        for gathering in self._gatherings.values():
            if gathering.asked is not None and rank in gathering.members:
                self._send([rank], gathering.asked)
        if len(self._names) == len(self._ranks):
            self._send(self._ranks, {"event": "names", "names": [self._names[each] for each in self._ranks]})

    def _wait(self, rank: int, message: Message, now: float) -> None:
        mine = Stand(**message["stand"])
        self._waits[rank, mine.doing] = _Wait(mine, message["broke"], now)
        if message["broke"]:
            self._ask_where(self._others(rank, mine), now)
        for (other, _), wait in self._waits.items():
            stand = wait.stand
            is_comparable = stand.run == mine.run and stand.compares and mine.compares
            if is_comparable and stand.misses(rank, mine.recent) and mine.misses(other, stand.recent):
                both = sorted([(rank, mine), (other, stand)], key=lambda pair: pair[0])
                text = ", while ".join(f"{self._name(each)} waits for {at.doing}" for each, at in both)
                self._end(mine.run, {"kind": "mismatch", "text": f"{text}. {REMEDY}"})

    def _leave(self, rank: int, message: Message, now: float) -> None:
        self._forget(rank)
        self._left[rank] = now, message
        for name in list(self._gatherings):
            self._complete(name)

    def _place(self, rank: int, message: Message, now: float) -> None:
        self._places[rank] = now, message["place"]
        place = message["place"]
        for (waiting, _), wait in self._waits.items():
            stand = wait.stand
            is_missing = stand.run == place["run"] and not place["waits"] and stand.misses(rank, place["recent"])
            if is_missing and place["torch"] and place["sequence"] > stand.sequence >= 0:
                text = (
                    f"{self._name(waiting)} waits for {stand.doing}, while {self._name(rank)} is not in any collective "
                    f"of ddp_callbacks: it last was in {place['last']}, and waits in torch.distributed's "
                    f"{place['torch']} at {place['line']}. {REMEDY}"
                )
                self._end(stand.run, {"kind": "mismatch", "text": text})

    # --- gatherings ---------------------------------------------------------------------------------------------------

    def _put(self, rank: int, message: Message, _: float) -> None:
        self._gathering(message).values.setdefault(rank, message["value"])
        self._complete(message["name"])

    def _ask_for(self, _: int, message: Message, __: float) -> None:
        """The first note counts."""
        gathering, name = self._gathering(message), message["name"]
        if gathering.asked is None:
            gathering.asked = {"event": "asked", "name": name, "note": message["note"]}
            self._send(gathering.members, gathering.asked)
            self._complete(name)

    def _gathering(self, message: Message) -> _Gathering:
        return self._gatherings.setdefault(message["name"], _Gathering(message["members"] or self._ranks))

    def _complete(self, name: str) -> None:
        """Tell all once the last has put. Of what all were asked for, ranks that have left put nothing: ``None``."""
        gathering = self._gatherings[name]
        if gathering.asked is not None:
            gathering.values = dict.fromkeys(self._left) | gathering.values
        if all(rank in gathering.values for rank in gathering.members):
            values = [gathering.values[rank] for rank in gathering.members]
            self._send(gathering.members, {"event": "gathered", "name": name, "values": values})
            del self._gatherings[name]

    # --- what follows -------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> Sent:
        """Tell the ranks that wait in vain, and take all messages."""
        for (rank, _), wait in self._waits.items():
            if not wait.is_told:
                wait.is_told = self._tell_absent(rank, wait, now) or (wait.broke and self._tell_why(rank, wait, now))
        return self._take()

    def _tell_absent(self, rank: int, wait: _Wait, now: float) -> bool:
        """Tell a rank if some of those that it waits for have left, and will never come."""
        stand = wait.stand
        absent = [
            other
            for other, (since, leaver) in self._left.items()
            if stand.concerns(other) and now - since >= stand.patience(leaver, wait.broke)
        ]
        if absent:
            self._send([rank], {"event": "absent", "doing": stand.doing, "ranks": absent})
        return bool(absent)

    def _tell_why(self, rank: int, wait: _Wait, now: float) -> bool:
        """Tell why a wait broke, if it is known now."""
        others = self._others(rank, wait.stand)
        silent = [each for each in others if self._places.get(each, (-math.inf,))[0] < wait.since - _OFTEN]
        if silent and now - wait.since < GRACE:
            return False
        self._bury(silent)
        places = [(each, self._places[each][1]) for each in others if each not in silent]
        self._send([rank], {"event": "because", "doing": wait.stand.doing, "places": places})
        return True

    def _bury(self, ranks: list[int]) -> None:
        """All hear that these ranks have died."""
        self._gone.update(ranks)
        if ranks:
            self._end(FOREVER, {"kind": "gone", "ranks": sorted(ranks)})

    def _end(self, run: int, what: Message) -> None:
        if run not in self._ends:
            self._ends[run] = {"event": "end", "run": run, **what}
            self._send(self._ranks, self._ends[run])

    def _ask_where(self, ranks: Iterable[int], now: float) -> None:
        due = [rank for rank in ranks if now - self._asked.get(rank, -math.inf) >= _OFTEN]
        self._asked.update(dict.fromkeys(due, now))
        self._send(due, {"event": "where"})

    def _others(self, rank: int, stand: Stand) -> list[int]:
        """The ranks that this one waits for, as far as they are here."""
        others = [each for each in self._ranks if each != rank and stand.concerns(each)]
        return [each for each in others if each not in self._left and each not in self._gone]

    def _forget(self, rank: int, doing: str | None = None) -> None:
        for key in [key for key in self._waits if key[0] == rank and doing in (None, key[1])]:
            del self._waits[key]

    def _name(self, rank: int) -> str:
        return self._names.get(rank, f"rank {rank}")

    def _send(self, ranks: Sequence[int], message: Message) -> None:
        self._sent += [(rank, message) for rank in ranks]

    def _take(self) -> Sent:
        sent, self._sent = self._sent, []
        return sent
