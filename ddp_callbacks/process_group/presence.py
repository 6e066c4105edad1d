"""Where each rank is: what it has entered and what it waits for.

An ordinary step sends no message. A rank that has waited for a second checks the store of the default group about once
a second. It reads one counter, the alarm, and only if that has changed, more keys. While a rank computes, its thread
(:mod:`.guard`) answers, so that it is not mistaken for dead.

Keys in that store, below ``ddp_callbacks/``; ``{run}`` is the number of the run:

============================  ========================================================================================
``host/{rank}``               JSON, host name and process of a rank, written when it joins
``alarm``                     counts news that others should read
``failure``                   JSON, an exception that ends the process of a rank: rank, type, message, traceback
``{run}/failure``             the same for one that ends a run: the process may continue
``{run}/mismatch``            the text for ranks that wait for different exchanges
``{run}/stand/{n}``           JSON, what a rank waits for: the first that has waited long for it
``{run}/at/{kind}/{turn}``    counts the ranks that have waited long for this
``{run}/odds/{tag}``          the purpose of an exchange, by the tag in its message
``{run}/position/{rank}``     JSON, the position of a rank when it came to the next run
``{run}/begin``               counts the ranks that have come to the next run
``{run}/begin/complete``      JSON, whether they need a new group; written by the last one that came
``connected``                 counts the ranks that have their connections
``connected/complete``        the last one has them
``left``, ``left/{n}``        how many ranks have left for good; JSON, the n-th of them, and what it had entered
``away``                      counts the ranks that have left and write nothing more
``closing``                   rank 0, whose process may host the store, has left
``looks``                     counts the checks of ranks that have waited long
``question``                  counts the questions "where are you?"
``answer/{rank}``             JSON, the last question that this rank has answered, and where it is
``answers/{question}``        counts the answers
``verdict/{question}``        the conclusion of the first rank that has waited for the answers
``gone``                      the names of the ranks that died, from the first rank that found out
``{run}/votes/{moment}``      counts the ranks that want something at this moment (:mod:`.votes`)
``{run}/votes/{moment}/...``  ``result``: JSON, whether all do
``preemption/{n}/requested``  who was first asked to stop, and how (:mod:`.preemption`)
``preemption/{n}/passed/...`` ``{rank}``: how many moments it has let pass before it heard of that
============================  ========================================================================================
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import sys
import sysconfig
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ddp_callbacks._torch import abort_accelerators, known_groups, sequence_number, store_of
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.process_group.torch_threads import await_threads, make_forks_wait

OWN_THREADS = "ddp_callbacks"
"""Prefix of the names of this library's threads. Training does not wait for what they wait for."""

_THREAD = f"{OWN_THREADS} guard"
_LEAVES = 2.0  # seconds that we wait for a thread to end
_RECENT = 32  # recent kinds of exchanges that a rank publishes
_KINDS = 1024  # kinds of exchanges that a rank counts
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_LIBRARIES = (
    "<",
    _PACKAGE,
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("platstdlib"),
)

_presences: weakref.WeakKeyDictionary[dist.ProcessGroup, Presence] = weakref.WeakKeyDictionary()


class Presence:
    """This rank in the default group.

    Attributes:
        pid: The process that joined; a forked child has another id.
        run: The number of the run; the same on all ranks whenever they communicate.
        last: The last exchange that this rank entered.
        failed: Whether this run has failed here.
        aborted: Whether what was pending on accelerators was aborted, so that results may be meaningless.
        waits: Whether the training thread waits, and checks the store itself.
        alone_in: The part of the program that this rank runs without the others; ``None`` in all others.
        is_closing: Whether the store is about to close: torch prints a warning if one reads a closed store.
        answered: The last question answered here.
        moments: How many moments of :mod:`.votes` this rank has behind it in this run.
        preemptions: How many :class:`.preemption.Preemption` contexts this rank has entered.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.pid = os.getpid()
        self.run = 0
        self.last = "nothing yet"
        self.failed = False
        self.aborted = False
        self.waits = False
        self.alone_in: str | None = None
        self._counts: dict[str, int] = {}
        self._entered = 0
        self.is_closing = False
        self.answered = 0
        self.moments = 0
        self.preemptions = 0
        self._heard: dict[str, str] = {}
        self._lock = threading.Lock()
        self._aborting = threading.Lock()
        self._is_over = False  # the run, for this rank
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        make_forks_wait()
        weakref.finalize(self, self._stop.set)

    def enter(self, doing: str) -> None:
        """Note that this rank takes part in an exchange. Costs a microsecond; sends nothing.

        Raises:
            ConfigurationError: The others do not take part.
        """
        if self.alone_in is not None:
            raise ConfigurationError(
                f"{self.alone_in} runs on one process while the others wait for it, so it cannot take part in "
                f"{doing}, for which all are needed. Do it in a hook that all processes call, such as setup."
            )
        counts = self._counts
        counts[doing] = counts.pop(doing, 0) + 1  # the latest is the last
        if len(counts) > _KINDS:
            del counts[next(iter(counts))]
        self.last = doing
        self._entered += 1

    def turn(self, doing: str) -> int:
        """How often this rank has entered this exchange in this run."""
        return self._counts.get(doing, 0)

    def recent(self) -> dict[str, int]:
        """The counts of recently entered exchanges."""
        return dict(list(self._counts.items())[-_RECENT:])

    def position(self) -> list[int]:
        """Numbers that are equal on all ranks if they are in step."""
        counts = json.dumps(sorted(self._counts.items()))
        return [zlib.crc32(counts.encode()), sequence_number(dist.group.WORLD)]

    def begin(self, run: int) -> None:
        """Reset the counts for a run with this number."""
        with self._aborting:
            self.run, self.failed, self._is_over = run, False, False
        self._counts.clear()
        self.moments = 0

    # --- the thread -------------------------------------------------------------------------------------------------

    def start(self, serve: Callable[[weakref.ref[Presence], threading.Event], None]) -> None:
        """Start the thread that serves this rank, unless it runs; it ends with the process group."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=serve, args=(weakref.ref(self), self._stop), name=_THREAD, daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """End the thread. Blocks while it aborts, and for two seconds at most while it uses the store."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread() and os.getpid() == self.pid:
            self.end_run()
            thread.join(_LEAVES)

    def is_current(self) -> bool:
        """Whether its process group is still the default group."""
        world = dist.group.WORLD
        return world is not None and _presences.get(world) is self

    # --- aborts -----------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Abort what is pending on accelerators in all groups of this rank, unless that has been done.

        Blocks until it is aborted, also if another thread does it.
        """
        with self._aborting:
            self._abort()

    def abort_failed_run(self, lost: bool = False) -> None:
        """As :meth:`abort`, if the run has failed (or the store is ``lost``) before this rank has come to its end."""
        with self._aborting:
            if (lost or self.failed or self.ends()) and not self._is_over:
                self._abort()

    def end_run(self) -> bool:
        """From now on, :meth:`abort_failed_run` aborts nothing in this run. Return whether something was aborted."""
        with self._aborting:
            self._is_over = True
            return self.aborted

    def _abort(self) -> None:
        if not self.aborted:
            self.failed = self.aborted = True  # before a blocked call returns
            for group in reversed(known_groups()):  # in torch's order
                with contextlib.suppress(RuntimeError):
                    abort_accelerators(group)

    # --- answers ----------------------------------------------------------------------------------------------------

    def answer(self) -> None:
        """Publish that this rank is alive, and where, if another rank has asked since the last answer."""
        with self._lock:
            question = store().add("question", 0)
            if question > self.answered:
                self.answered = question
                store().set(f"answer/{dist.get_rank()}", json.dumps({"question": question, **self._place()}))
                store().add(f"answers/{question}", 1)

    def listen_for_ends(self) -> None:
        """Remember what has ended the run, while the store is still readable."""
        for key in self._keys_of_ends():
            if key not in self._heard and store().check([key]):
                self._heard[key] = store().get(key).decode()

    def ends(self) -> dict[str, str]:
        """What has ended the run, on any rank, as far as this one has listened; by its key in the store."""
        return {key: self._heard[key] for key in self._keys_of_ends() if key in self._heard}

    def _keys_of_ends(self) -> tuple[str, ...]:
        return (f"{self.run}/mismatch", f"{self.run}/failure", "failure", "gone")

    def _place(self) -> dict[str, Any]:
        sequence, (function, line) = sequence_number(dist.group.WORLD), _of_torch()
        return {
            "waits": self.waits,
            "last": self.last,
            "recent": self.recent(),
            "torch": function,
            "line": line,
            "sequence": sequence,
            "moments": self.moments,
        }

    def is_quiet(self, entered: int) -> tuple[bool, int]:
        """Whether the count of entered exchanges is still ``entered`` and nothing waits; and the current count."""
        return self._entered == entered and not self.waits, self._entered


def presence() -> Presence:
    """The presence of this process in the default group, which must exist."""
    world = dist.group.WORLD
    assert world is not None
    found = _presences.get(world)
    if found is None:
        found = _presences[world] = Presence(world)
    return found


def enter(doing: str) -> None:
    """Note that this rank takes part in an exchange for ``doing``. Sends nothing."""
    presence().enter(doing)


@contextlib.contextmanager
def alone_in(name: str) -> Iterator[None]:
    """Inside, this rank runs what the others wait for: an exchange raises instead of waiting for them."""
    here = presence()
    here.alone_in = name
    try:
        yield
    finally:
        here.alone_in = None


def is_aborted() -> bool:
    """Whether what was pending on accelerators was aborted in this run."""
    world = dist.group.WORLD
    found = None if world is None else _presences.get(world)
    return found is not None and found.aborted


def is_beside_training() -> bool:
    """Whether this is one of the library's own threads."""
    return threading.current_thread().name.startswith(OWN_THREADS)


def store() -> dist.Store:
    """The default group's store, which all ranks read, whatever group they wait in."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("the process group has been left")
    return dist.PrefixStore("ddp_callbacks", store_of(world))


def raise_alarm() -> None:
    """Tell all waiting ranks to read the news."""
    store().add("alarm", 1)


def await_key(key: str, seconds: float) -> bool:
    """Wait up to ``seconds`` for a key; return whether it exists. Unlike ``Store.wait``, it prints no warning."""
    end, pause = time.monotonic() + seconds, 1e-3
    while not store().check([key]):
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return True


class Alarm:
    """The state of the alarm during one wait."""

    def __init__(self) -> None:
        self._heard = -1

    def rings(self) -> bool:
        """Whether it was raised since the last call; true for the first call. One round trip to the store."""
        before, self._heard = self._heard, store().add("alarm", 0)
        return before != self._heard


def describe(rank: int) -> str:
    """``rank 1 (host node2, pid 4711)`` for a global rank; shorter if less is known."""
    if rank == dist.get_rank():
        return f"rank {rank} (host {socket.gethostname()}, pid {os.getpid()})"
    try:
        if not store().check([f"host/{rank}"]):
            return f"rank {rank}"
        known = json.loads(store().get(f"host/{rank}"))
    except RuntimeError:
        return f"rank {rank}"
    return f"rank {rank} (host {known['host']}, pid {known['pid']})"


def start_of(pid: int | str) -> str:
    """The start time of a process, in the kernel's ticks; empty if it has ended or it is unknown."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]


# --- the thread ---------------------------------------------------------------------------------------------------


@atexit.register
def _end_threads() -> None:
    """End the threads: returning from C++ during interpreter shutdown would abort the process."""
    for found in list(_presences.values()):
        found.close()
    for thread in threading.enumerate():
        if thread.name == _THREAD:  # of a group that is gone: it has been told to end
            thread.join(_LEAVES)
    await_threads()


def _of_torch() -> tuple[str, str]:
    """The torch.distributed function that the main thread is in, and the current line of the program."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    function = ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith("distributed_c10d.py"):
            function = code.co_name
        if not _is_library(code.co_filename):
            return function, f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return function, "an unknown line"


def _is_library(path: str) -> bool:
    return path.startswith(_LIBRARIES) or "site-packages" in path


def names(ranks: Sequence[int]) -> str:
    """Describe several ranks."""
    return ", ".join(describe(rank) for rank in sorted(ranks))
