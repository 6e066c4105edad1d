"""Start processes, and read their state from the kernel.

A process group is not enough to end a job: a rank's children may start sessions of their own. This process is a
subreaper (prctl(2)), so everything that the ranks start stays its descendant, however often it forks. The ranks are
killed if this process dies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import termios
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MFD_CLOEXEC = 1
# Pipes of a rank beside its output, each with the variable that names it.
_PIPES = {"s": "DDP_CALLBACKS_STACKS", "f": "TORCHELASTIC_ERROR_FILE", "r": "DDP_CALLBACKS_REPORT"}


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def memory_file(name: str) -> int:
    """Return the descriptor of a new file in memory. (Conda's Python lacks os.memfd_create.)"""
    descriptor = _LIBC.memfd_create(name.encode(), _MFD_CLOEXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "this system has no files in memory (memfd_create)")
    return int(descriptor)


def start(
    words: list[str], cores: set[int] | None = None, ignored: Sequence[int] = (), **options: Any
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own; it dies with this one.

    Args:
        cores: The cores that the process may use; ``None`` for all.
        ignored: Signals that the process ignores.
        options: Options for :class:`subprocess.Popen`.
    """
    prepare = partial(_prepare, os.getpid(), ignored, cores)
    return subprocess.Popen(words, start_new_session=True, preexec_fn=prepare, **options)


class StartRanks(NamedTuple):
    """How the ranks of a node are started.

    ``defaults`` are variables that the ranks get unless this node has set them. The PYTHONPATH in ``environ`` comes
    before this node's own. A rank that was stopped for longer than ``patience`` seconds is killed. Rank 0 inherits the
    descriptor ``stdin``; with ``None``, it reads what the launcher passes on. The ranks ``shown`` (``None``: all) write
    to a terminal of this ``size``, in lines and columns, if there is one; with ``one_stream``, all to the same.
    """

    argv: list[str]
    ranks: list[int]
    environ: dict[str, str]
    defaults: dict[str, str]
    store: list[str]
    bind: str
    patience: float | None
    stdin: int | None = None
    size: tuple[int, int] | None = None
    shown: list[int] | None = None
    one_stream: bool = False  # whether standard output is standard error, so that lines keep their order


class StartRank(NamedTuple):
    """How the processes of one of them are started."""

    ranks: StartRanks
    rank: int
    environ: dict[str, str]
    cores: set[int]

    @property
    def size(self) -> tuple[int, int] | None:
        """Lines and columns of the terminal to which it writes."""
        return None if self.ranks.shown and self.rank not in self.ranks.shown else self.ranks.size


class Rank(NamedTuple):
    """A rank that runs here, and the write ends of its pipes beside its output."""

    number: int
    process: subprocess.Popen[bytes]
    pipes: list[int]


def start_rank(how: StartRank, taken: int, news: int) -> tuple[Rank, dict[int, str]]:
    """Start a process for a rank.

    Args:
        taken: A descriptor: its standard input, which is closed here.
        news: A descriptor of the file from which it reads what the launcher lets it know.

    Returns:
        The process, and the descriptors from which to read its streams, see :mod:`ddp_callbacks.launcher.node`.
    """
    pipes = {stream: os.pipe() for stream in _PIPES}
    errors = _stream(how.size)
    output = errors if how.ranks.one_stream else _stream(how.size)
    own = {"DDP_CALLBACKS_NEWS": news} | {_PIPES[stream]: pipes[stream][1] for stream in pipes}
    files = {name: f"/proc/{os.getpid()}/fd/{descriptor}" for name, descriptor in own.items()}
    streams: dict[str, Any] = {"stdin": taken, "stdout": output[1], "stderr": errors[1]}
    process = start(how.ranks.argv, how.cores, env=how.environ | files, **streams)
    for descriptor in {*streams.values()} - {subprocess.DEVNULL}:
        os.close(descriptor)
    read = {output[0]: "o", errors[0]: "e"} | {pipes[stream][0]: stream for stream in pipes}
    for descriptor in read:
        os.set_blocking(descriptor, False)
    return Rank(how.rank, process, [end for _, end in pipes.values()]), read


def _stream(size: tuple[int, int] | None) -> tuple[int, int]:
    """Return the ends from which to read, and to which to write, of a terminal that changes nothing, or a pipe."""
    if size is None:
        return os.pipe()
    try:
        read, write = os.openpty()
    except OSError:  # a container without /dev/pts
        return os.pipe()
    attributes = termios.tcgetattr(write)
    attributes[1] &= ~termios.OPOST  # no carriage return before a newline
    termios.tcsetattr(write, termios.TCSANOW, attributes)
    termios.tcsetwinsize(write, size)
    return read, write


def _prepare(parent: int, ignored: Sequence[int], cores: set[int] | None) -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    if cores:
        os.sched_setaffinity(0, cores)
    if os.getppid() != parent:
        os._exit(1)


def descendants() -> set[int]:
    """Return the process ids of all running descendants of this process."""
    children = _children()
    found = list(children.get(os.getpid(), []))
    for pid in found:
        found += children.get(pid, [])
    return set(found)


def _children() -> dict[int, list[int]]:
    """Return the ids of the running children of each process, by its id."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue  # it has ended
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(entry))
    return children


def handled_by(pid: int) -> set[int] | None:
    """Return the signals for which a process has a handler; ``None`` if it has ended."""
    try:
        with open(f"/proc/{pid}/status") as file:
            (mask,) = (int(line.split()[1], 16) for line in file if line.startswith("SigCgt:"))
    except (OSError, ValueError):
        return None
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}
