"""Where each rank is: what it has entered, what it waits for, and a thread that answers for it while it computes.

Nothing here sends a message in an ordinary step. A rank that has waited for a second looks into the store of the
default group, about once a second, at one counter, the alarm; only when that has moved it reads more. A rank that
computes for long is asked in its thread, so that it is not taken for dead.

Keys in that store, below ``ddp_callbacks/``; ``{run}`` is the number of the run:

============================  ========================================================================================
``host/{rank}``               JSON, host name and process of a rank, written when it joins
``alarm``                     counts what others should read
``failure``                   JSON, an exception that ends the process of a rank: rank, type, message, traceback
``{run}/failure``             the same, of one that ends a run: the process may go on
``{run}/mismatch``            the text for ranks that wait for different exchanges
``{run}/stand/{n}``           JSON, what a rank waits for: the first that has waited long for it
``{run}/at/{kind}/{turn}``    counts the ranks that have waited long for this
``{run}/odds/{tag}``          what an exchange is for, by the number that travels with it
``{run}/position/{rank}``     JSON, how far a rank was when it came to the next run
``{run}/begin``               counts the ranks that have come to the next run
``{run}/begin/complete``      JSON, whether they need a new group; the last one that has come writes it
``connected``                 counts the ranks that have their connections
``connected/complete``        the last one has them
``left``, ``left/{n}``        how many ranks have left for good; JSON, the n-th of them, and what it had entered
``closing``                   rank 0, whose process may host the store, has left
``looks``                     counts the looks of those who have waited long
``question``                  counts the questions who is there
``answer/{rank}``             JSON, the last question that this rank has answered, and where it is
``answers/{question}``        counts the answers
``verdict/{question}``        what the first that had waited for them concludes
``gone``                      the names of the ranks that died, as the first that found out has them
============================  ========================================================================================
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import sysconfig
import threading
import time
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ddp_callbacks import environment
from ddp_callbacks._torch import sequence_number
from ddp_callbacks.process_group.forking import make_forks_wait

INTERVAL = 0.5  # seconds between two looks of the thread that answers for a rank that computes
OWN_THREADS = "ddp_callbacks"
"""How the names of this library's threads begin. What they wait for keeps nobody from going on."""

_THREAD = f"{OWN_THREADS} presence"
_LEAVES = 2.0  # seconds for which the end of a thread is waited for
_RECENT = 32  # kinds of exchanges that a rank names as entered lately
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
        pid: The process whose it is; not a child that was forked.
        run: The number of the run; all ranks have the same while they exchange anything.
        last: What this rank has entered last.
        failed: Whether this run has failed here.
        waits: Whether the thread that trains waits, and looks into the store itself.
        is_closing: Whether the store is about to go: torch prints a warning for who looks into one that has gone.
        answered: The last question that was answered here.
        heard: What has ended the run elsewhere, by its key in the store, which may have gone when this rank asks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.pid = os.getpid()
        self.run = 0
        self.last = "nothing yet"
        self.failed = False
        self.waits = False
        self._counts: dict[str, int] = {}
        self._entered = 0
        self.is_closing = False
        self.answered = 0
        self.heard: dict[str, str] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._stop.set)

    def enter(self, doing: str) -> None:
        """Note that this rank takes part in an exchange. Costs a microsecond; sends nothing."""
        counts = self._counts
        counts[doing] = counts.pop(doing, 0) + 1  # the latest is the last
        if len(counts) > _KINDS:
            del counts[next(iter(counts))]
        self.last = doing
        self._entered += 1

    def turn(self, doing: str) -> int:
        """How often this rank has entered it in this run."""
        return self._counts.get(doing, 0)

    def recent(self) -> dict[str, int]:
        """What was entered lately, and how often."""
        return dict(list(self._counts.items())[-_RECENT:])

    def position(self) -> list[int]:
        """What must be equal on all ranks where they are in step."""
        counts = json.dumps(sorted(self._counts.items()))
        return [zlib.crc32(counts.encode()), sequence_number(dist.group.WORLD)]

    def begin(self, run: int) -> None:
        """Start to count anew, in a run of this number."""
        self.run, self.failed = run, False
        self._counts.clear()
        self.heard.clear()

    # --- who is there ---------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Answer for this rank from now on, in a thread that ends with the process group."""
        if self._thread is None:
            make_forks_wait()
            self._thread = threading.Thread(
                target=_answer, args=(weakref.ref(self), self._stop), name=_THREAD, daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """End the thread. Blocks until it has left the store, for two seconds at most."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread() and os.getpid() == self.pid:
            thread.join(_LEAVES)

    def answer(self) -> None:
        """Say that this rank is there, and where, if somebody has asked since the last answer."""
        with self._lock:
            question = store().add("question", 0)
            if question > self.answered:
                self.answered = question
                store().set(f"answer/{dist.get_rank()}", json.dumps({"question": question, **self._place()}))
                store().add(f"answers/{question}", 1)

    def listen_for_ends(self) -> None:
        """Keep what has ended the run, while there is a store to read it from."""
        for key in (f"{self.run}/failure", "failure", "gone"):
            if key not in self.heard and store().check([key]):
                self.heard[key] = store().get(key).decode()

    def _place(self) -> dict[str, Any]:
        sequence, (function, line) = sequence_number(dist.group.WORLD), _of_torch()
        return {
            "waits": self.waits,
            "last": self.last,
            "recent": self.recent(),
            "torch": function,
            "line": line,
            "sequence": sequence,
        }

    def is_quiet(self, entered: int) -> tuple[bool, int]:
        """Whether nothing was entered since the count was ``entered``, and the count now."""
        return self._entered == entered and not self.waits, self._entered


def presence() -> Presence:
    """Of this process in the default group, which there must be."""
    world = dist.group.WORLD
    assert world is not None
    found = _presences.get(world)
    if found is None:
        found = _presences[world] = Presence(world)
    return found


def enter(doing: str) -> None:
    """Note that this rank takes part in an exchange for ``doing``. Sends nothing."""
    presence().enter(doing)


def is_beside_training() -> bool:
    """Whether this is one of the library's own threads."""
    return threading.current_thread().name.startswith(OWN_THREADS)


def store() -> dist.Store:
    """The store of the world, which all ranks read, whatever group they wait in."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("the process group has been left")
    return dist.PrefixStore("ddp_callbacks", world.get_group_store())


def raise_alarm() -> None:
    """Let everybody who waits read what is new."""
    store().add("alarm", 1)


def await_key(key: str, seconds: float) -> bool:
    """Whether somebody has written it within so many seconds; ``Store.wait`` prints a warning if nobody has."""
    end, pause = time.monotonic() + seconds, 1e-3
    while not store().check([key]):
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return True


class Alarm:
    """What one wait has heard of it."""

    def __init__(self) -> None:
        self._heard = -1

    def rings(self) -> bool:
        """Whether it was raised since the last call, or this is the first. One round trip to the store."""
        before, self._heard = self._heard, store().add("alarm", 0)
        return before != self._heard


def announce_join() -> None:
    """Write this rank's host name and process id, so that messages can name it, and answer for it from now on."""
    place = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "processes": environment.host_identity(),
        "start": start_of("self"),
    }
    store().set(f"host/{dist.get_rank()}", json.dumps(place))
    presence().listen()


def describe(rank: int) -> str:
    """``rank 1 (host node2, pid 4711)`` for a rank of the world; less if less is known."""
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
    """When a process has started, in the kernel's ticks; empty if it has ended, or nobody can know."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]


# --- the thread ---------------------------------------------------------------------------------------------------


@atexit.register
def _end_threads() -> None:
    """One that comes back from the store while the interpreter takes itself apart would abort the process."""
    for found in list(_presences.values()):
        found.close()
    for thread in threading.enumerate():
        if thread.name == _THREAD:  # of a group that has gone: it has been told to end
            thread.join(_LEAVES)


def _answer(reference: weakref.ref[Presence], stop: threading.Event) -> None:
    """Look for questions while the rank neither exchanges anything nor waits."""
    pid, entered, alarm = os.getpid(), -1, Alarm()
    while not stop.wait(INTERVAL):
        here = reference()
        world = dist.group.WORLD
        if here is None or world is None or _presences.get(world) is not here or os.getpid() != pid:
            return
        del world
        quiet, entered = here.is_quiet(entered)
        try:
            if quiet and alarm.rings():
                here.listen_for_ends()
                if store().check(["closing"]):
                    here.is_closing = True
                    return
                here.answer()
        except RuntimeError:
            return
        del here


def _of_torch() -> tuple[str, str]:
    """The function of torch.distributed that the main thread is in, and the line of the program that it is at."""
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
    """Of several ranks."""
    return ", ".join(describe(rank) for rank in sorted(ranks))
