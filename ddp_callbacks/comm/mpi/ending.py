"""Exit handler of a process that uses MPI.

MPI_Finalize waits for all processes, so if one has failed, the job would hang in it. So at exit a process does this::

    it fails      tells the others; waits until they have printed their output, at most LINGER seconds; then calls
                  MPI_Abort with its exit code, which ends the job
    it ends       waits, asleep, until all processes end, then calls MPI_Finalize; if another one fails meanwhile,
                  this one has left too early, and fails too

A process that fails only because another one has failed or left (:class:`PeerError`) lets that one decide the job's
exit code. If a process is killed, its launcher handles it: mpiexec ends the job.

Keys in the store of the default group: ``mpi/aborts``, the first rank that fails; ``mpi/ended/{rank}``, a rank that has
printed all its output.

[Note: exit codes]
Python exposes the exit code only after it is too late for MPI_Abort. But CPython reads ``SystemExit.code`` once more
just before exiting, with no Python frame on the stack; that is how we recognize it. So ``sys.exit`` raises a SystemExit
that records the code. After ``raise SystemExit(3)`` the job ends too, once the others miss this rank, but with code 1.
"""

from __future__ import annotations

import atexit
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch.distributed as dist

from ddp_callbacks.comm.mpi.progress import Progress
from ddp_callbacks.comm.mpi.runtime import MPI, finalizes_itself
from ddp_callbacks.errors import PeerError
from ddp_callbacks.process_group.failures import LINGER, announce_leave, report_end

_LOOK = 0.2  # seconds between two checks of the store
_INTERRUPTED = 130  # a shell's exit code for a child ended by Ctrl-C


class Ending:
    """Ends MPI with this process. Make one per process, before other exit handlers."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._store: dist.Store | None = None
        self._pid = os.getpid()
        self._code = 0
        self._follows = False  # whether it fails because of another process
        self._previous_hook = sys.excepthook
        sys.excepthook = self._note_exception
        sys.exit = _exit_that_tells(self._note_exit)
        atexit.register(self._end)

    def watch(self, store: dist.Store) -> None:
        """Use the default group's ``store``, which lives as long as this process."""
        self._store = dist.PrefixStore("mpi", store)

    def _note_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._code = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        self._follows = isinstance(error, PeerError)
        if dist.is_initialized():
            report_end(error)
        self._previous_hook(kind, error, trace)

    def _note_exit(self, code: object) -> None:
        self._code = 0 if code is None else code & 0xFF if isinstance(code, int) else 1

    def _end(self) -> None:
        if os.getpid() != self._pid or MPI.Is_finalized():
            return
        if dist.is_initialized():
            _try(announce_leave)
        if self._code == 0 and self._all_end():
            self._finalize()
        else:
            self._abort(self._code or 1)

    def _all_end(self) -> bool:
        """Wait until all processes end; return False if one fails."""
        begin = looked = time.monotonic()
        with self.progress.lock:
            request = MPI.COMM_WORLD.Ibarrier()
        while True:
            with self.progress.lock:
                if request.Test():
                    return True
            now = time.monotonic()
            if now - looked > _LOOK:
                looked = now
                if self._somebody_fails():
                    return False
            time.sleep(min((now - begin) / 10, 0.01))

    def _somebody_fails(self) -> bool:
        assert self._store is not None
        try:
            return self._store.check(["aborts"])
        except RuntimeError:
            return True  # rank 0, which hosts the store, is gone without a message

    def _first_to_abort(self) -> bool:
        assert self._store is not None
        me = str(MPI.COMM_WORLD.Get_rank())
        try:
            return self._store.compare_set("aborts", "", me).decode() == me
        except RuntimeError:
            return False  # the store is gone with rank 0

    def _await_ends(self) -> None:
        """Give the others time to print their output."""
        assert self._store is not None
        _flush()
        end = time.monotonic() + LINGER
        keys = [f"ended/{rank}" for rank in range(MPI.COMM_WORLD.Get_size())]
        try:
            self._store.set(keys[MPI.COMM_WORLD.Get_rank()], "1")
            while not self._store.check(keys) and time.monotonic() < end:
                time.sleep(0.05)
        except RuntimeError:
            pass  # the store is gone with rank 0

    def _abort(self, code: int) -> None:
        first = self._first_to_abort()
        self._await_ends()
        if self._follows or not first:
            time.sleep(LINGER)
        self.progress.stop()
        _unlink_segments()
        MPI.COMM_WORLD.Abort(code)

    def _finalize(self) -> None:
        self.progress.stop()
        if not self.progress.drop_receives():
            print(
                "MPI still works on an operation that not all ranks have started: the job is aborted.", file=sys.stderr
            )
            _flush()
            MPI.COMM_WORLD.Abort(1)
        if not finalizes_itself():
            MPI.Finalize()


def _exit_that_tells(note: Callable[[object], None]) -> Callable[..., NoReturn]:
    """A ``sys.exit`` that calls ``note`` with the code just before the interpreter exits with it."""
    plain: Any = SystemExit.code

    class Exit(SystemExit):
        @property
        def code(self) -> Any:
            code = plain.__get__(self)
            try:
                sys._getframe(1)
            except ValueError:
                note(code)
            return code

        @code.setter
        def code(self, code: Any) -> None:
            plain.__set__(self, code)

    def exit(status: Any = None, /) -> NoReturn:
        raise Exit(status)

    Exit.__name__ = Exit.__qualname__ = "SystemExit"
    return exit


def _unlink_segments() -> None:
    """Remove MPICH's shared memory files mapped by this process, which MPI_Abort does not remove."""
    try:
        mapped = set(re.findall(r"/dev/shm/mpich_shm_\w+$", Path("/proc/self/maps").read_text(), re.MULTILINE))
        for path in mapped:
            Path(path).unlink(missing_ok=True)
    except OSError:
        pass


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass


def _try(call: Callable[[], None]) -> None:
    try:
        call()
    except RuntimeError:
        pass  # the store is gone with its host process
