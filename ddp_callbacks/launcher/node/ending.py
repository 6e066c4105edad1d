"""Ask the ranks on a node to stop, and end them and everything that they have started."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial

from ddp_callbacks.launcher.node.processes import descendants, handled_by

GRACE = 2.5  # seconds between SIGTERM and SIGKILL, unless the job says otherwise
STACKS = signal.SIGQUIT  # makes a rank write the stacks of its threads, as in a Java program
_WRITING = 0.2  # seconds to write them
# How to ask for what a signal asks: the first of these that the rank handles. Ctrl-C is KeyboardInterrupt in Python.
_WAYS = {
    signal.SIGTERM: (signal.SIGTERM,),
    signal.SIGUSR1: (signal.SIGUSR1, signal.SIGTERM),
    signal.SIGINT: (signal.SIGTERM, signal.SIGINT),
}


class Ending:
    """Asks the ranks to stop, and ends them.

    Before a rank gets a signal that may end it, it writes the stacks of its threads, which show where a hung job was.

    Args:
        ranks: A live view of the process ids of the running ranks; this object only reads it.

    Attributes:
        grace: Seconds from a request to stop to SIGKILL; ``None``: :data:`GRACE`.
        spared: Ids of processes that do not end with the ranks: of their store, and what ``--setup`` has left.
    """

    def __init__(self, ranks: Collection[int]) -> None:
        self.grace: float | None = None
        self._ranks = ranks
        self._foreign: set[int] = set()  # processes that the job runs as another user (sudo): we cannot end them
        self.spared: set[int] = set()
        self.reset()

    def reset(self) -> None:
        """Forget the ended ranks, so that others can be started."""
        self._kill_at = math.inf  # when to send SIGKILL; infinite until the ranks must end
        self._terminated = self._looked = False  # whether all got SIGTERM; whether stacks were written before SIGKILL
        self._steps: list[tuple[float, Callable[[], None]]] = []  # actions for when the stacks are written
        self._request = signal.SIGTERM  # the signal that asks a rank to stop
        self._is_patient = False  # whether to wait until a rank handles this signal
        self._to_ask: set[int] = set()
        self._asked: set[int] = set()

    @property
    def has_begun(self) -> bool:
        """Whether the ranks must end."""
        return self._kill_at < math.inf

    @property
    def is_busy(self) -> bool:
        """Whether :meth:`look` may soon have something to do."""
        return self.has_begun or bool(self._to_ask)

    def is_quiet(self) -> bool:
        """Whether no process of the job runs here that this one can end."""
        return not self._ranks and not descendants() - self._foreign - self.spared

    def ask(self, number: signal.Signals, patient: bool = True) -> None:
        """Ask the ranks to stop. If ``patient``, wait until a rank handles the signal, which would otherwise end it.

        A rank of Python's that handles nothing else gets Ctrl-C at once.
        """
        self._request, self._is_patient = number, patient
        self._to_ask |= set(self._ranks) - self._asked
        self._ask_ranks()

    def stop(self, number: signal.Signals) -> None:
        """Ask the ranks to stop, and kill every process of the job when their time is over."""
        if self.grace is None:
            self._kill_within(GRACE)
            self._after_stacks(partial(self.ask, number, self._is_patient))
        else:
            self._kill_within(self.grace)
            self.ask(number)

    def stop_again(self) -> None:
        """Repeat a request to stop that came before the ranks had started."""
        if self.has_begun:
            self.stop(self._request)

    def end(self, seconds: float) -> None:
        """Send SIGTERM to every process of the job, and ``seconds`` later SIGKILL."""
        self._kill_within(seconds)
        if not self._terminated and seconds:
            self._terminated = True
            self._after_stacks(partial(self._signal, signal.SIGTERM))

    def look(self) -> None:
        """Take all actions that are due, such as SIGKILL. Call it often while :attr:`is_busy`."""
        now = time.monotonic()
        due, self._steps = ([step for step in self._steps if (step[0] <= now) == is_due] for is_due in (True, False))
        for _, do in due:
            do()
        if now >= self._kill_at and not self._looked and self.write_stacks():
            self._looked, self._kill_at = True, now + _WRITING
        elif now >= self._kill_at:
            self._signal(signal.SIGKILL)
        if self._to_ask:
            self._ask_ranks()

    def write_stacks(self) -> bool:
        """Ask the ranks to write the stacks of their threads; return whether any rank can."""
        able = [pid for pid in self._ranks if STACKS in (handled_by(pid) or ())]
        for pid in able:
            with suppress(OSError):
                os.kill(pid, STACKS)
        return bool(able)

    def _after_stacks(self, do: Callable[[], None]) -> None:
        delay = _WRITING if self.write_stacks() else 0.0
        self._steps.append((time.monotonic() + delay, do))

    def _ask_ranks(self) -> None:
        """Signal the ranks; if patient, only those that handle it by now: it would end a program that is starting."""
        for pid in list(self._to_ask):
            handled = handled_by(pid)
            found = [number for number in _WAYS[self._request] if number in (handled or ())]
            is_starting = not found or (found[0] == signal.SIGINT and STACKS not in (handled or ()))
            if is_starting and self._is_patient and handled is not None:
                continue
            self._to_ask.discard(pid)
            self._asked.add(pid)
            with suppress(OSError):  # it has ended, or belongs to another user
                os.kill(pid, found[0] if found else signal.SIGTERM)

    def _kill_within(self, seconds: float) -> None:
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)

    def _signal(self, number: int) -> None:
        for pid in descendants() - self.spared:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass  # it has ended
            except PermissionError:
                self._foreign.add(pid)
