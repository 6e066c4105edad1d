"""Describe where a rank is in its run, so that rank 0 can tell which ranks are behind, and which are elsewhere."""

from __future__ import annotations

import json
import math
import os
import sys
import sysconfig
import threading
import zlib
from dataclasses import dataclass

_SETTLED = 2.0  # seconds after which all messages from a rank that has left have arrived
_FOLLOWED = 5.0  # seconds after which this rank would have heard of another failure that made a rank leave
_LIBRARIES = (
    "<",
    os.path.dirname(os.path.dirname(__file__)),
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("platstdlib"),
)


@dataclass(frozen=True)
class Place:
    """Where a rank is: the exchange that it waits for, or that it has entered last.

    Attributes:
        run: The number of the rank's run.
        purpose: What the exchange is for.
        turn: How often the rank has entered this kind of exchange in this run; 0 if it is not counted.
        turns: The same for each kind that it has entered: what is not in there, it has never entered.
        sequence: The number of torch's collectives that the rank has started before; -1 if unknown.
        members: The global ranks that take part in the exchange; ``None`` is all.
        failed: Whether the rank is there because of a failure of which the others may not have heard.
        waits: Whether the rank waits for this exchange.
        torch: The function of torch.distributed that its main thread is in; empty if none, or unknown.
        line: The line of the program that its main thread is at; empty if unknown.
    """

    run: int
    purpose: str
    turn: int
    turns: dict[str, int]
    sequence: int = -1
    members: list[int] | None = None
    failed: bool = False
    waits: bool = True
    torch: str = ""
    line: str = ""

    def concerns(self, rank: int) -> bool:
        """Whether ``rank`` takes part in the exchange."""
        return self.members is None or rank in self.members

    def misses(self, rank: int, other: Place) -> bool:
        """Whether this exchange still lacks ``rank``, which is at ``other``."""
        return self.concerns(rank) and other.turns.get(self.purpose, 0) < self.turn

    def is_comparable(self, other: Place) -> bool:
        """Whether both are in the same run, and not there because of a failure."""
        return self.run == other.run and not self.failed and not other.failed

    def patience(self, leaver: Place, at_once: bool = False) -> float:
        """Return the seconds after which a member that has left is surely the missing one.

        Args:
            leaver: The place of that rank when it left.
            at_once: Whether its messages on the way are known to be lost, so that waiting for them is useless.
        """
        if leaver.run == self.run and self.turn and leaver.turns.get(self.purpose, 0) >= self.turn:
            return math.inf  # it has entered the exchange, and its messages are on the way
        if leaver.failed:
            return _FOLLOWED
        return 0.0 if self.turn or at_once else _SETTLED


class DrawnBatches:
    """The batches that this rank has drawn since its last backward, of one pass over a loader.

    Attributes:
        count: Their number.
        last: The number of the last one in its pass, from 1.
        checksum: Of the content of the whole batches of the pass, up to the last one; 0 if ranks cannot differ in it.
        samples: How many this rank, and all ranks, have of the last one; ``None``: unknown here.
        noted: The number of all batches that were noted.
    """

    count = last = checksum = noted = 0
    samples: tuple[int, int | None] = (0, None)

    def note(self, number: int, checksum: int, samples: tuple[int, int | None]) -> None:
        """Note the batch with this number. What other threads draw is left out: they may be ahead by any number."""
        if threading.current_thread() is threading.main_thread():
            self.count, self.last = 1 if number == 1 else self.count + 1, number
            self.checksum, self.samples, self.noted = checksum, samples, self.noted + 1

    def __str__(self) -> str:
        first = self.last - self.count + 1
        return f"batches {first} to {self.last}" if self.count > 1 else f"batch {self.last}" if self.count else "none"


class Exchanges:
    """Counts exchanges by their purpose. Costs a microsecond per exchange; sends nothing.

    Attributes:
        last: The purpose of the latest exchange.
        entered: The number of exchanges, in all runs.
    """

    def __init__(self) -> None:
        self.last, self.entered = "nothing yet", 0
        self._turns: dict[str, int] = {}

    def enter(self, purpose: str) -> None:
        """Count an exchange for ``purpose``."""
        self._turns[purpose] = self._turns.get(purpose, 0) + 1
        self.last = purpose
        self.entered += 1

    def turn(self, purpose: str) -> int:
        """Return how often this rank has entered ``purpose`` in this run: for gradients, the number of the step."""
        return self._turns.get(purpose, 0)

    def turns(self) -> dict[str, int]:
        """Return the counts of all kinds of exchanges."""
        return dict(self._turns)

    def checksum(self) -> int:
        """Return a number that is equal on all ranks if they have entered the same exchanges equally often."""
        return zlib.crc32(json.dumps(sorted(self._turns.items())).encode())

    def forget(self) -> None:
        """Forget all counts, at the begin of a run."""
        self._turns.clear()


def where() -> tuple[str, str]:
    """Return the torch.distributed function that the main thread is in (or ""), and the program's current line."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    function = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.endswith("distributed_c10d.py"):
            function = frame.f_code.co_name
        if not path.startswith(_LIBRARIES) and "site-packages" not in path:
            return function, f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return function, "an unknown line"
