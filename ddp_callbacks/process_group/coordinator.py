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
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

from ddp_callbacks.process_group.control_channel import Message
from ddp_callbacks.process_group.places import Place

FOREVER = None  # in place of a run: the end of a process
GRACE = 2.0  # seconds within which every rank that runs answers
LINGER = 3.0  # seconds that rank 0 waits at its end, so that the others can finish
_SELDOM = 20.0  # seconds between two questions to the other ranks where they are, while a rank waits
REMEDY = (
    "Every rank must make the same calls in the same order, also in hooks and callbacks, wherever the others must "
    "take part. A rank's own loss or data must not decide about them."
)
Sent: TypeAlias = list[tuple[int, Message]]


@dataclass
class _Wait:
    """A wait of a rank.

    Attributes:
        place: Where it waits.
        asked: When the others were asked where they are because it broke; ``None`` if it goes on.
        is_told: Whether the rank has got an answer.
    """

    place: Place
    asked: float | None
    is_told: bool = False


class _Exchange:
    """The waits in one exchange, by rank. What one of them waits for, all of them do.

    Attributes:
        place: That of the rank that has waited first.
        since: When it began to wait.
        asked: When the other ranks were last asked where they are, while the waits go on.
        unheard: The ranks that have not answered since they were asked because a wait broke, by the time of that.
    """

    def __init__(self, place: Place, since: float) -> None:
        self.place, self.since, self.asked = place, since, -math.inf
        self.waits: dict[int, _Wait] = {}
        self.unheard: dict[float, set[int]] = {}


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
        self._exchanges: dict[Any, _Exchange] = {}
        self._waits: dict[int, dict[str, _Exchange]] = {}  # by rank and purpose
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
        return self._take()

    def lose(self, rank: int, now: float, why: str = "") -> Sent:
        """Handle the end of a rank's connection; ``why`` is known unless the rank itself has ended it."""
        self._forget(rank)
        if rank not in self._left:
            self._bury([rank], why)
        self._hear_of(rank, now, math.inf)
        return self._take()

    def tick(self, now: float) -> Sent:
        """Handle the passing of time."""
        if self._counted < len(self._names) < len(self._ranks):
            self._counted = len(self._names)
            missing = [rank for rank in self._ranks if rank not in self._names]
            self._send(self._names, {"event": "missing", "ranks": missing})
        for exchange in list(self._exchanges.values()):
            for asked, unheard in exchange.unheard.items():
                self._ask_where([rank for rank in unheard if self._heard(rank) < asked], now)
            if not exchange.unheard and now - exchange.since >= GRACE and now - exchange.asked >= _SELDOM:
                exchange.asked = now
                self._ask_where([each for each in self._awaited(exchange) if each not in self._waits], now)
            self._settle(exchange, now)
        return self._take()

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
        self._forget(rank, mine.purpose)
        exchange = self._exchanges.setdefault(_key(mine), _Exchange(mine, now))
        exchange.waits[rank] = wait = _Wait(_shared(mine, exchange.place), now if message["broke"] else None)
        self._waits.setdefault(rank, {})[mine.purpose] = exchange
        for other in self._exchanges.values():
            if other is not exchange and other.place.is_comparable(mine) and other.place.misses(rank, mine):
                self._find_mismatch(rank, wait, other)
        if message["broke"]:
            wait.asked = self._ask_because_it_broke(exchange, rank, now)
        self._tell_absent(exchange.place, {rank: wait}, now)

    def _find_mismatch(self, rank: int, wait: _Wait, exchange: _Exchange) -> None:
        """End the run if ``rank`` waits for one that waits in ``exchange``, which lacks it."""
        for other, theirs in exchange.waits.items():
            if other != rank and wait.place.misses(other, theirs.place):
                both = sorted([(rank, wait.place), (other, theirs.place)], key=lambda each: each[0])
                text = ", while ".join(f"{self._name(each)} waits for {at.purpose} ({at.line})" for each, at in both)
                self._end(wait.place.run, {"kind": "mismatch", "text": f"{text}. {REMEDY}"})
                return

    def _ask_because_it_broke(self, exchange: _Exchange, rank: int, now: float) -> float:
        """Ask the others where they are, unless they were asked just now. Return when they were asked."""
        recent = [asked for asked in exchange.unheard if now - asked < GRACE]
        if recent:
            return recent[0]
        others = [each for each in self._awaited(exchange) if each != rank]
        exchange.unheard[now] = set(others)
        self._ask_where(others, now)
        return now

    def _on_done(self, rank: int, message: Message, _: float) -> None:
        self._forget(rank, message["about"])

    def _on_end(self, _: int, message: Message, __: float) -> None:
        self._end(message["run"], message["what"])

    def _on_leave(self, rank: int, message: Message, now: float) -> None:
        self._forget(rank)
        self._left[rank] = now, Place(**message["place"])
        for exchange in list(self._exchanges.values()):
            self._settle(exchange, now)
        for key in list(self._gatherings):
            self._complete(key)

    def _on_place(self, rank: int, message: Message, now: float) -> None:
        place, asked = Place(**message["place"]), self._asked.pop(rank, now)
        self._places[rank] = asked, place
        for exchange in self._exchanges.values():
            awaited = exchange.place
            is_missing = awaited.run == place.run and not place.waits and awaited.misses(rank, place)
            if is_missing and place.torch and place.sequence > awaited.sequence >= 0:
                waits = f"{self._name(next(iter(exchange.waits)))} waits for {awaited.purpose}"
                text = f"{waits}, while {self._elsewhere(rank)} {REMEDY}"
                self._end(awaited.run, {"kind": "mismatch", "text": text})
        self._hear_of(rank, now, asked)

    def _hear_of(self, rank: int, now: float, asked: float) -> None:
        """Note that a rank has answered what it was asked then."""
        for exchange in list(self._exchanges.values()):
            for since, unheard in list(exchange.unheard.items()):
                if since <= asked and rank in unheard:
                    unheard.discard(rank)
                    if not unheard:
                        self._settle_broken(exchange, since, now)

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
        if len(gathering.values) >= len(gathering.members) and gathering.values.keys() >= set(gathering.members):
            values = [gathering.values[rank] for rank in gathering.members]
            times = len(values) if all(value == values[0] for value in values) else 1  # usually they are equal
            values = values[: len(values) // times]
            gathered = {"event": "gathered", "about": about, "run": run, "values": values, "times": times}
            self._send(gathering.members, gathered)
            del self._gatherings[key]

    # --- answers ------------------------------------------------------------------------------------------------------

    def _settle(self, exchange: _Exchange, now: float) -> None:
        """Tell the ranks that wait in vain in an exchange."""
        self._tell_absent(exchange.place, exchange.waits, now)
        for asked in list(exchange.unheard):
            self._settle_broken(exchange, asked, now)

    def _tell_absent(self, awaited: Place, waits: dict[int, _Wait], now: float) -> None:
        if not self._left:
            return
        absent = {broke: self._absent(awaited, broke, now) for broke in (False, True)}
        for rank, wait in waits.items():
            if not wait.is_told and (found := absent[wait.asked is not None]):
                self._tell(rank, wait, absent=found)

    def _absent(self, awaited: Place, broke: bool, now: float) -> list[int]:
        """Return the ranks that have left before they have come to the place."""
        return [
            rank
            for rank, (since, leaver) in self._left.items()
            if awaited.concerns(rank) and now - since >= awaited.patience(leaver, broke)
        ]

    def _settle_broken(self, exchange: _Exchange, asked: float, now: float) -> None:
        """If the others have had the time to answer what they were asked then, tell those whose waits broke."""
        silent = sorted(exchange.unheard[asked] - self._gone - {*self._left})
        if any(now - max(asked, self._asked.get(each, now)) < GRACE for each in silent):
            return
        del exchange.unheard[asked]
        self._bury(silent)
        late = {rank: self._elsewhere(rank) for rank in self._awaited(exchange) if self._is_late(rank, exchange.place)}
        for rank, wait in exchange.waits.items():
            if wait.asked == asked and not wait.is_told:
                self._tell(rank, wait, late=[text for each, text in late.items() if each != rank])

    def _tell(self, rank: int, wait: _Wait, **what: Any) -> None:
        wait.is_told = True
        self._send([rank], {"event": "told", "about": wait.place.purpose, "run": wait.place.run, **what})

    def _heard(self, rank: int) -> float:
        """Return when the question was asked that a rank has answered last."""
        return self._places[rank][0] if rank in self._places else -math.inf

    def _is_late(self, rank: int, awaited: Place) -> bool:
        place = self._places[rank][1] if rank in self._places else awaited
        return not place.waits and (not awaited.turn or awaited.misses(rank, place))

    def _elsewhere(self, rank: int) -> str:
        """Say where a rank is that does not wait in an exchange of this library."""
        place = self._places[rank][1]
        at = f"waits in torch.distributed's {place.torch} at" if place.torch else "is at"
        return (
            f"{self._name(rank)} is not in any collective of ddp_callbacks: it last was in {place.purpose}, and {at} "
            f"{place.line}."
        )

    def _bury(self, ranks: list[int], why: str = "") -> None:
        """Tell all ranks that these have died."""
        self._gone.update(ranks)
        if ranks:
            self._end(FOREVER, {"kind": "gone", "ranks": sorted(ranks)} | ({"why": why} if why else {}))

    def _end(self, run: int | None, what: Message) -> None:
        if run not in self._ends:
            if run is not FOREVER:  # all ranks have come to it, or to the end of the one before
                self._ends = {other: end for other, end in self._ends.items() if other is FOREVER or other >= run - 1}
            self._ends[run] = {"event": "end", "run": run, **what}
            self._send(self._ranks, self._ends[run])

    def _ask_where(self, ranks: Iterable[int], now: float) -> None:
        due = [rank for rank in ranks if rank not in self._asked]
        self._asked.update(dict.fromkeys(due, now))
        self._send(due, {"event": "where"})

    def _awaited(self, exchange: _Exchange) -> list[int]:
        """Return the ranks that those in an exchange wait for, without ranks that have left or died.

        The threads of a rank may wait for different ranks. A sum between nodes can break though all its ranks live, if
        one of these waits for a dead rank of its own node. The main thread waits for the sum over all ranks, so that
        one counts, too.
        """
        places = {id(each): each.place for rank in exchange.waits for each in self._waits[rank].values()}.values()
        here = [each for each in self._ranks if each not in self._left and each not in self._gone]
        if any(place.members is None for place in places):
            return here
        awaited = set[int]().union(*(place.members or () for place in places))
        return [each for each in here if each in awaited]

    def _forget(self, rank: int, purpose: str | None = None) -> None:
        """Forget the wait of a rank for a purpose, or all its waits."""
        waits = self._waits.get(rank, {})
        for about in list(waits) if purpose is None else {purpose} & waits.keys():
            exchange = waits.pop(about)
            del exchange.waits[rank]
            if not exchange.waits:
                del self._exchanges[_key(exchange.place)]
        if not waits:
            self._waits.pop(rank, None)

    def _name(self, rank: int) -> str:
        return self._names.get(rank, f"rank {rank}")

    def _send(self, ranks: Iterable[int], message: Message) -> None:
        self._sent += [(rank, message) for rank in ranks]

    def _take(self) -> Sent:
        sent, self._sent = self._sent, []
        return sent


def _key(place: Place) -> Any:
    """Return what is equal for all ranks that wait in the same exchange."""
    return place.run, place.purpose, place.turn, place.failed, place.members and tuple(place.members)


def _shared(place: Place, other: Place) -> Place:
    """Return ``place`` with the counts of ``other`` if they are equal: thousands of ranks may wait at one place."""
    return replace(place, turns=other.turns) if place.turns == other.turns else place
