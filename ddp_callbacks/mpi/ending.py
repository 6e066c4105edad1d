"""The end of a process in which MPI runs.

MPI_Finalize waits for all processes, so a job of which one has failed would hang in it. Here a process that ends looks
after the others first::

    it fails      tells the others; once they have ended, or after LINGER seconds, MPI_Abort, which ends the job
    it ends       waits until all have come to their end, asleep; then MPI_Finalize
                  but if another fails meanwhile, it ends with its own exit code, without MPI_Finalize

Who fails only because another has failed or left (:class:`PeerError`) lets that one decide the job's exit code, and
aborts a second later. A process that is killed is the launcher's business: mpiexec ends the job.

Keys in the store of the default group: ``mpi/aborts``, some rank fails; ``mpi/ended/{rank}``, a rank that has nothing
more to say.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from types import TracebackType

import torch.distributed as dist

from ddp_callbacks.errors import PeerError
from ddp_callbacks.failures import LINGER, announce_leave, report_failure
from ddp_callbacks.mpi.progress import Progress
from ddp_callbacks.mpi.runtime import MPI, finalizes_itself

_LOOK = 0.2  # seconds between two looks into the store
_FIRST = 1.0  # seconds for which whoever has the cause ends before the others
_INTERRUPTED = 130  # the exit code of a shell's child that Ctrl-C has ended


class Ending:
    """Ends MPI with this process. Make one in a process, before anything else that runs when the process ends."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._store: dist.Store | None = None
        self._pid = os.getpid()
        self._failure: BaseException | None = None
        atexit.register(self._end)
        self._previous_hook = sys.excepthook
        sys.excepthook = self._note_failure

    def watch(self, store: dist.Store) -> None:
        """``store`` is the world's; it lives as long as this process."""
        self._store = dist.PrefixStore("mpi", store)

    def _note_failure(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._failure = error
        if dist.is_initialized():
            report_failure(error)
        self._previous_hook(kind, error, trace)

    def _end(self) -> None:
        if os.getpid() != self._pid or MPI.Is_finalized():
            return
        if dist.is_initialized():
            _try(announce_leave)
        if self._failure is None and self._all_end():
            self._finalize()
        elif self._failure is None:
            self._await_ends()
            if finalizes_itself():
                MPI._set_abort_status(1)
        else:
            self._abort(self._failure)

    def _all_end(self) -> bool:
        """Wait until all processes have come to their end; false if one fails."""
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
            return True  # rank 0, which hosts the store, has gone without a word

    def _await_ends(self) -> None:
        """Let the others print what they have to say."""
        assert self._store is not None
        _flush()
        end = time.monotonic() + LINGER
        keys = [f"ended/{rank}" for rank in range(MPI.COMM_WORLD.Get_size())]
        try:
            self._store.set(keys[MPI.COMM_WORLD.Get_rank()], "1")
            while not self._store.check(keys) and time.monotonic() < end:
                time.sleep(0.05)
        except RuntimeError:
            pass  # the store has gone with rank 0

    def _abort(self, failure: BaseException) -> None:
        store = self._store
        if store is not None:
            _try(lambda: store.set("aborts", "1"))
            self._await_ends()
        if isinstance(failure, PeerError):
            time.sleep(_FIRST)
        self.progress.stop()
        MPI.COMM_WORLD.Abort(_INTERRUPTED if isinstance(failure, KeyboardInterrupt) else 1)

    def _finalize(self) -> None:
        self.progress.stop()
        if not self.progress.drop_receives():
            print("MPI still works on an operation that not all ranks have started: the job is aborted.", file=sys.stderr)
            _flush()
            MPI.COMM_WORLD.Abort(1)
        if not finalizes_itself():
            MPI.Finalize()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass


def _try(call: object) -> None:
    try:
        call()  # type: ignore[operator]
    except RuntimeError:
        pass  # the store has gone with the process that hosted it
