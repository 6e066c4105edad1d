"""What runs on a node, from its standard input: it starts the job there, and ends it with the connection.

This file is sent to the node as it is (see :mod:`ddp_callbacks.launcher.remote`) and run by an interpreter that knows
nothing of this package, so it imports the standard library alone. Linux.

Standard input is the lifeline. While it is open the job runs; when it ends, for whatever reason (the launcher has ended
or was killed, the connection broke), or after the byte ``T``, every process of the job gets SIGTERM, and SIGKILL
:data:`GRACE` seconds later; after the byte ``K``, SIGKILL at once.

[Note: every process]
A process group is not enough: torchrun puts each worker into a session of its own, and a worker's children may do the
same. This process is a subreaper (prctl(2)), so whatever the job starts stays its descendant, however often it forks.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import BinaryIO

GRACE = 2.5  # seconds between SIGTERM and SIGKILL
_PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    """Read the job and run it; its exit code, in the shell's way (128 + signal)."""
    stdin = sys.stdin.buffer
    job = json.loads(stdin.read(int(stdin.readline())))
    argv = [bytes.fromhex(word) for word in job["argv"]]
    environ = {**os.environb, **{bytes.fromhex(name): bytes.fromhex(value) for name, value in job["environ"].items()}}
    cwd = bytes.fromhex(job["cwd"])
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The lifeline ends with whoever sends these. A handler, unlike SIG_IGN, is not inherited by the job.
        signal.signal(number, lambda *_: None)
    try:
        os.chdir(cwd)
    except OSError as error:
        return _refuse(f"cannot enter the working directory {os.fsdecode(cwd)}: {error.strerror}")
    try:
        child = subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL, start_new_session=True).pid
    except OSError as error:
        return _refuse(f"cannot start {os.fsdecode(argv[0])}: {error.strerror}")
    code = _watch(child, stdin)
    _end_descendants(at_once=True)  # what the job left behind
    return code if code >= 0 else 128 - code


def _refuse(reason: str) -> int:
    print(f"ddprun: {reason}", file=sys.stderr, flush=True)
    return 2


def _watch(child: int, lifeline: BinaryIO) -> int:
    """The child's exit code, negative for a signal, once it has ended by itself or with the lifeline."""
    poll = select.poll()
    poll.register(os.pidfd_open(child), select.POLLIN)
    poll.register(lifeline, select.POLLIN | select.POLLHUP)
    os.set_blocking(lifeline.fileno(), False)
    codes: dict[int, int] = {}
    while child not in codes:
        # None if there is nothing. Not os.read: a byte may have been read ahead with the job.
        word: bytes | None = lifeline.read(1)
        if word is None:
            poll.poll()
        elif word in (b"", b"T", b"K"):
            codes |= _end_descendants(at_once=word == b"K")
        codes |= _reap()
    return codes[child]


def _end_descendants(at_once: bool) -> dict[int, int]:
    """End every descendant, also those that appear in the meantime; the exit codes of this process's children."""
    codes: dict[int, int] = {}
    end = time.monotonic() + (0 if at_once else GRACE)
    if not at_once:
        _signal(signal.SIGTERM)
    while _descendants():
        if time.monotonic() >= end:
            _signal(signal.SIGKILL)
        time.sleep(0.02)
        codes |= _reap()
    return codes | _reap()


def _signal(number: int) -> None:
    for pid in _descendants():
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass  # it has ended by now


def _reap() -> dict[int, int]:
    """The exit codes of the children, orphans of the job among them, that have ended since the last call."""
    codes: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return codes
        if not pid:
            return codes
        codes[pid] = os.waitstatus_to_exitcode(status)


def _descendants() -> list[int]:
    """The process ids of all that still run, parents first."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue  # it has ended by now
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(entry))
    found = list(children.get(os.getpid(), []))
    for pid in found:
        found += children.get(pid, [])
    return found


if __name__ == "__main__":
    sys.exit(main())
