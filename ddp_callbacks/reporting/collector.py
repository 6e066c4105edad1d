"""Keep what the ranks of a job have sent about their time, and what has happened meanwhile."""

from __future__ import annotations

import bisect
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from ddp_callbacks.reporting.recorder import PARTS, WAITING
from ddp_callbacks.reporting.trace import Span, Traced

_SAMPLES = 400  # of a rank; once there are more, every second one is dropped
_EVENTS = 300
_STRETCHES, _STEPS = 32, 40  # of the time of a job, each with so many steps
_TAIL = 400  # bytes of a rank's output
_LATELY = 10.0  # seconds
_ADDED_UP = ("seconds", "steps", "held_out", "process")  # of a message; the rest is passed on as it was said last
_COMMANDS = re.compile(r"\x1b\[[\d;?]*[A-Za-z]|[^\S \r\n]|[\x00-\x09\x0e-\x1f]")  # to a terminal: colours, moves


@dataclass
class Rank:
    """What one rank has sent, whose process may have been replaced.

    Attributes:
        samples: Seconds since the job's start, steps, and by part: seconds, those of waits, and those of waits in any
            case. All are totals of all its processes.
        said: The last message.
        stepped: When its last step, or batch of a validation, was heard of; or its first message.
        is_lost: Whether the job continues without its process, until a new one sends something.
        spans: What it did in the steps that are traced.
    """

    node: str
    samples: list[tuple[float, int, list[float]]] = field(default_factory=list)
    said: dict[str, Any] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    before: tuple[int, list[float]] = (0, [0.0] * 3 * len(PARTS))  # steps and seconds of the processes before this one
    stepped: float = 0.0
    is_lost: bool = False
    line: bytes = b""
    unread: bytes = b""

    def take(self, said: dict[str, Any], now: float) -> None:
        """Take a message that came at ``now``."""
        if self.said and said["process"] != self.said["process"] and self.samples:
            self.before, self.is_lost = self.samples[-1][1:], False
        steps, seconds = self.before
        own = [mine + others for mine, others in zip(said["seconds"], seconds, strict=True)]
        if not self.said or any(said[kind] != self.said[kind] for kind in ("steps", "held_out", "process")):
            self.stepped = now
        self.said = said
        self.samples.append((now, steps + said["steps"], own))
        if len(self.samples) > _SAMPLES:
            self.samples = [*self.samples[:-1:2], self.samples[-1]]


class Collector:
    """What the ranks have sent. All its data is plain, for JSON.

    Args:
        command: The script and its arguments.
        is_sent: Whether ranks send anything; they do not with ``--no-report``.

    Attributes:
        warned: Called with node, rank and text of each warning of this library that a rank has printed.
    """

    def __init__(self, command: Sequence[str], is_sent: bool = True) -> None:
        self._is_sent = is_sent
        self.warned: Callable[[str, int, str], None] = lambda *_: None
        self._command, self._date, self._begin = list(command), time.strftime("%Y-%m-%d %H:%M"), time.monotonic()
        self._ranks: dict[int, Rank] = {}
        self._events: list[tuple[float, str, str]] = []
        self._told = {"epoch": 0, "validation": 0}  # the last of each that any rank has begun

    def hear(self, node: str, rank: int, stream: str, data: bytes) -> None:
        """Take what a rank has written to a stream: ``r`` has its messages, others are its output."""
        own = self._ranks.setdefault(rank, Rank(node))
        own.node = node
        if stream in "oe":
            own.line = (own.line + data)[-_TAIL:]
        elif stream == "r":
            *lines, own.unread = (own.unread + data).split(b"\n")
            for line in lines:
                with suppress(ValueError, KeyError):  # a process that was killed has written half of a line
                    self._take(rank, own, json.loads(line))

    def _take(self, rank: int, own: Rank, said: dict[str, Any]) -> None:
        if "warning" in said:
            self.warned(own.node, rank, said["warning"])
            return
        if "spans" in said:
            own.spans += [Span(said["step"], *span) for span in said["spans"]]
            return
        now = time.monotonic() - self._begin
        own.take(said, now)
        for kind in self._told:
            if said[kind] > self._told[kind]:
                self._told[kind] = said[kind]
                self._add(now, kind, f"{kind} {said[kind]}")

    def lose(self, rank: int) -> None:
        """Note that the job continues without this rank."""
        if rank in self._ranks:
            self._ranks[rank].is_lost = True

    def note(self, text: str) -> None:
        """Note that something has happened now, such as the loss of a rank."""
        self._add(time.monotonic() - self._begin, "note", text)

    def _add(self, when: float, kind: str, text: str) -> None:
        self._events = [*self._events, (round(when, 2), kind, text)][-_EVENTS:]

    def data(self) -> dict[str, Any]:
        """Return what is known by now."""
        now = time.monotonic() - self._begin
        ranks = {number: rank for number, rank in sorted(self._ranks.items()) if rank.said}
        least = in_any_case([rank.samples for rank in ranks.values()])
        return {
            "command": self._command,
            "date": self._date,
            "seconds": round(now, 2),
            "ranks": [
                _data(number, rank, now) | {"least": dict(zip(PARTS, own, strict=True))}
                for (number, rank), own in zip(ranks.items(), least, strict=True)
            ],
            "events": self._events,
            "is_sent": self._is_sent,
        }

    def traced(self) -> Traced:
        """Return what the ranks did in the steps that are traced."""
        return {number: (rank.node, rank.spans) for number, rank in sorted(self._ranks.items())}


def in_any_case(ranks: Sequence[Sequence[tuple[float, int, list[float]]]]) -> list[list[float]]:
    """Return the seconds that each rank has waited in any case, by part: as long as the one that has waited least.

    That may be another rank later. So it is found for each stretch of time, among the ranks that took steps in it.

    Args:
        ranks: The samples of each, see :class:`Rank`.
    """
    found = [[0.0] * len(PARTS) for _ in ranks]
    begin, end = (choose((own[place][0] for own in ranks), default=0.0) for choose, place in ((min, 0), (max, -1)))
    count = max(1, min(_STRETCHES, min((own[-1][1] for own in ranks), default=0) // _STEPS))
    before = [(0, [0.0] * len(PARTS)) for _ in ranks]
    for number in range(1, count + 1):
        when = begin + (end - begin) * number / count if number < count else math.inf
        now = [_until(own, when) for own in ranks]
        steps = [after - earlier for (after, _), (earlier, _) in zip(now, before, strict=True)]
        for part in range(len(PARTS)):
            waits = [after[part] - earlier[part] for (_, after), (_, earlier) in zip(now, before, strict=True)]
            least = min((each / taken for each, taken in zip(waits, steps, strict=True) if taken > 0), default=0.0)
            least = max(least, 0.0)  # at first, all waits were taken for such
            for own, taken in zip(found, steps, strict=True):
                own[part] += least * max(taken, 0)
        before = now
    return found


def _until(samples: Sequence[tuple[float, int, list[float]]], when: float) -> tuple[int, list[float]]:
    """Return the steps until then, and the seconds of waits in any case."""
    number = bisect.bisect_right(samples, when, key=itemgetter(0))
    _, steps, spent = samples[number - 1] if number else (0.0, 0, [0.0] * len(PARTS))
    return steps, spent[-len(PARTS) :]


def _data(number: int, rank: Rank, now: float) -> dict[str, Any]:
    first = next((sample for sample in rank.samples if sample[1]), rank.samples[-1])
    text = _COMMANDS.sub("", rank.line.decode(errors="replace")).rstrip()
    return {
        "rank": number,
        "node": rank.node,
        **_times(rank.samples[-1]),
        "first": _times(first),  # with a step
        "lately": _lately(rank.samples),
        "samples": [(round(when, 2), count) for when, count, _ in rank.samples],
        "stepped": round(now - rank.stepped, 2),
        "is_lost": rank.is_lost,
        "line": re.split(r"[\r\n]", text)[-1].strip(),
        **{name: value for name, value in rank.said.items() if name not in _ADDED_UP},
    }


def _lately(samples: Sequence[tuple[float, int, list[float]]]) -> dict[str, float]:
    """Return the steps per second of the last seconds, and the share of waiting in their time."""
    now, steps, spent = samples[-1]
    begins = (each for each in reversed(samples[:-1]) if now - each[0] >= _LATELY)
    when, before, earlier = next(begins, (samples[0][0], samples[0][1], [0.0] * len(spent)))
    parts = [own - other for own, other in zip(spent, earlier, strict=True)][: len(PARTS)]
    rate = (steps - before) / (now - when) if now > when else 0.0
    return {"rate": rate, "waiting": parts[PARTS.index(WAITING)] / (sum(parts) or 1.0)}


def _times(sample: tuple[float, int, list[float]]) -> dict[str, Any]:
    """Return steps, seconds by part, waits by part, and those in any case."""
    _, steps, spent = sample
    rest = iter([round(each, 4) for each in spent])
    return {"steps": steps} | {kind: dict(zip(PARTS, rest, strict=False)) for kind in ("seconds", "waits", "least")}
