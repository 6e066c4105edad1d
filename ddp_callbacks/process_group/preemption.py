"""Stop all ranks at the same moment once one of them is asked to: by a signal, a time limit or the program.

A scheduler's signal may reach one process or all, at any time. The ranks then agree (:mod:`.moments`); a step without a
request sends nothing.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch.distributed as dist

from ddp_callbacks.cluster.environment import NEWS
from ddp_callbacks.errors import ConfigurationError, Preempted, say
from ddp_callbacks.process_group.default_group import get_rank, get_world_size, resolve_group
from ddp_callbacks.process_group.members_file import tell_launcher
from ddp_callbacks.process_group.moments import Agreement
from ddp_callbacks.process_group.presence import describe, presence

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that Slurm, PBS and torchrun send before they end a job; SIGUSR1 is the usual choice for ``--signal``."""

SAME = 3.0
"""Seconds within which further signals mean the same request: a scheduler and a launcher may both send one."""


class Preemption:
    """Lets all ranks stop at the same moment once one of them has been asked to. A context manager.

    Inside, the signals only note a request, which :meth:`is_requested` reports on every rank at the same moment. A
    second signal, 3 seconds or more after the first, ends the process at once.

    Args:
        signals: The signals that ask to stop. They can only be handled if the main thread enters the context.
        time_limit: Time from entering the context after which to stop; ``None`` for no limit.
        process_group: The ranks' process group; ``None`` is the default group. A single process needs none.

    Raises:
        ConfigurationError: ``time_limit`` is not positive.

    Attributes:
        process_group: The ``process_group`` that was passed.
        reason: Who asked to stop, and how: ``"SIGTERM, first seen on rank 1 (host node2, pid 4711)"``. The same on
            every rank once :meth:`is_requested` has returned ``True``; empty before.
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals] = SIGNALS,
        time_limit: timedelta | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if time_limit is not None and not (isinstance(time_limit, timedelta) and time_limit > timedelta(0)):
            raise ConfigurationError(f"time_limit must be a timedelta longer than zero, or None, got {time_limit!r}.")
        self.reason = ""
        self._signals = tuple(signals)
        self._limit = time_limit
        self.process_group = process_group
        self._handlers: dict[signal.Signals, Any] = {}
        self._pid = os.getpid()
        self._own = ""  # why this rank was asked to stop
        self._signalled = 0.0  # when the first signal came
        self._deadline = float("inf")
        self._agreement: Agreement | None = None

    def __reduce__(self) -> Any:
        """A copy or pickle uses the default group, and knows of no request."""
        return type(self), (self._signals, self._limit)

    def __enter__(self) -> Preemption:
        self.reason = self._own = ""
        self._signalled = 0.0
        if self._limit is not None:
            self._deadline = time.monotonic() + self._limit.total_seconds()
        if get_world_size(self.process_group) > 1:
            group, numbers = resolve_group(self.process_group), presence().preemptions
            numbers[group.group_name] += 1
            self._agreement = Agreement(f"stop {numbers[group.group_name]} of group {group.group_name}", group)
        self._handle_signals()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
        agreement, self._agreement = self._agreement, None
        if agreement is not None:
            agreement.close()

    def request(self, reason: str) -> None:
        """Ask all ranks to stop, as a signal does. Local; hardly blocks.

        Args:
            reason: For messages: "the budget is spent".
        """
        if not self._own:
            self._own = f"{reason} on {describe(get_rank())}"
            if self._agreement is not None:
                self._agreement.ask(self._own)

    def is_requested(self) -> bool:
        """Whether to stop now. Every rank calls it at the same moments, such as after each batch.

        All ranks get the same answer. Without a request, it costs a microsecond and sends nothing. With one, it blocks
        until every rank has heard of it, some milliseconds. Once ``True``, it stays so.

        Raises:
            PeerError: Another rank failed, died or went silent.
        """
        if not self.reason and time.monotonic() >= self._deadline:
            self.request("the time limit")
        if not self.reason and self._agreement is not None:
            self.reason = self._agreement.pass_moment()
        elif not self.reason and self._own:
            self.reason = self._own
        return bool(self.reason)

    def exit(self, path: str) -> NoReturn:
        """End this run once the checkpoint is written. Every rank calls it; rank 0 prints who asked to stop.

        Args:
            path: The path of the checkpoint.

        Raises:
            Preempted: Always. Uncaught, it ends the process with :data:`ddp_callbacks.errors.EXIT_PREEMPTED`.
        """
        preempted = Preempted(self.reason, path)
        if get_rank(self.process_group) == 0:
            say(str(preempted))
        if NEWS in os.environ:
            tell_launcher({"preempted": True})
        raise preempted

    def _handle_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            say("signals cannot ask to stop here: only the main thread of a process can handle them")
            return
        for number in self._signals:
            if _has_other_handler(number):
                say(f"{signal.Signals(number).name} does not ask to stop: faulthandler, or other code in C, handles it")
            else:
                self._handlers[number] = signal.signal(number, self._note_signal)

    def _note_signal(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        is_second = bool(self._signalled) and now - self._signalled >= SAME
        if is_second or os.getpid() != self._pid:  # a forked child has inherited this handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._signalled = self._signalled or now
        self.request(f"{signal.Signals(number).name}, first seen")


def _has_other_handler(number: int) -> bool:
    """Whether the process catches a signal by a handler that Python doesn't know, and so could not put back."""
    if signal.getsignal(number) not in (signal.SIG_DFL, None):
        return False
    with suppress(OSError):  # without /proc
        caught = re.search(r"^SigCgt:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)
    return False
