"""Pending operations, and the progress engine that advances them.

MPI advances a nonblocking operation only while the process is inside an MPI call. A thread that waits for an operation
tests it; a background thread tests operations that no one waits for, so that they overlap with backward. All MPI calls
are made under one lock, so MPI_THREAD_SERIALIZED is enough, and none of them blocks: unlike in a queue, no operation
waits for another.

A waiting thread sleeps between two tests, the longer the longer it has waited, so that a late rank does not cost the
others a core. If nothing is pending, the background thread sleeps.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddp_callbacks.comm.mpi.runtime import MPI
from ddp_callbacks.process_group.failures import SLICE, wait

_SPIN, _YIELD = 0.00005, 0.0005  # seconds of testing without a pause, and then without sleep: most waits are shorter
_SHORTEST, _LONGEST = 0.00005, 0.001  # seconds of sleep between two tests
_LINGER = 0.02  # seconds that the idle thread stays awake: a training loop soon starts more


@dataclass
class Operation:
    """An operation that a collective needs from MPI.

    Attributes:
        name: For messages: "all-reduce".
        post: Starts it; called once, under the lock.
        outputs: The tensors that hold the result.
        finish: Local work once MPI is done. Gets the statuses of the requests if ``receives``.
        receives: Whether ``finish`` needs the statuses: the length and sender of a message.
    """

    name: str
    post: Callable[[], Sequence[MPI.Request]]
    outputs: list[torch.Tensor] = field(default_factory=list)
    finish: Callable[[list[MPI.Status]], Any] | None = None
    receives: bool = False


class Work(dist.Work):
    """The work handle of an operation; :meth:`Progress.start` makes it.

    Attributes:
        since: Its start (``time.monotonic``).
        watched: Whether a waiting thread tests it.
    """

    def __init__(self, progress: Progress, operation: Operation, group: dist.ProcessGroup, timeout: timedelta) -> None:
        super().__init__()
        self.since = time.monotonic()
        self.watched = False
        self.group = group
        self.name = operation.name
        self._progress = progress
        self._operation = operation
        self._end = self.since + timeout.total_seconds()
        self._timeout = timeout
        self._requests: Sequence[MPI.Request] | None = None
        self._statuses: list[MPI.Status] = []
        self._lock = threading.Lock()
        self._done = False
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._guarded = False
        self._source = -1

    def post(self) -> None:
        """Start it. The caller holds the MPI lock."""
        self._requests = self._operation.post()
        if self._operation.receives:
            self._statuses = [MPI.Status() for _ in self._requests]

    def claim(self) -> bool:
        """Test it: true once, for the caller that then completes it. The caller holds the MPI lock."""
        if self._requests is None:
            return False
        if time.monotonic() > self._end:
            self._error = RuntimeError(f"{self.name} over MPI was not complete after {self._timeout}")
            self._progress.abandoned.append((self, self._requests))
        else:
            try:
                if not MPI.Request.Testall(self._requests, self._statuses or None):
                    return False
            except MPI.Exception as error:
                self._error = RuntimeError(f"{self.name} over MPI failed: {error}")
                self._progress.abandoned.append((self, self._requests))
        self._requests = None
        return True

    def complete(self) -> None:
        """Finish it and notify all waiting threads. Callbacks of the future run here."""
        if self._error is None and self._operation.finish is not None:
            try:
                self._operation.finish(self._statuses)
            except Exception as error:
                self._error = error
        if self._statuses:
            self._source = self._statuses[0].Get_source()
        with self._lock:
            self._done = True
            future = self._future
        if future is not None:
            self._resolve(future)

    def cancel(self) -> bool:
        """Cancel a receive; return False for other operations. The caller holds the MPI lock."""
        if self._requests is None or not self._operation.receives:
            return False
        for request in self._requests:
            request.Cancel()
            request.Free()
        self._requests = None
        return True

    def guard(self) -> None:
        """Wait on behalf of C++ code, which does not check that the other ranks are alive."""
        try:
            self.wait()
        except RuntimeError as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._progress.lock:
            requests, self._requests = self._requests, None
            if requests is None:
                return
            self._error = error
            self._progress.abandoned.append((self, requests))
        self.complete()

    def wait_slice(self, seconds: float) -> bool:
        """Whether it completes within ``seconds``. Raises RuntimeError if it failed."""
        self.watched = True
        try:
            begin = time.monotonic()
            while not self.is_completed():
                waited = time.monotonic() - begin
                if waited > seconds:
                    return False
                pause(waited)
        finally:
            self.watched = False
        if self._error is not None:
            raise self._error
        return True

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until it is complete, or for ``timeout`` if that is positive.

        Raises:
            PeerError: Another rank reported a failure, left, or nothing came within the group's timeout.
            RuntimeError: It was not complete after ``timeout``; the operation continues.
        """
        if timeout <= timedelta(0):
            wait(self, f"{self.name} over MPI", self.group)
        elif not self.wait_slice(timeout.total_seconds()):
            raise RuntimeError(f"{self.name} over MPI is not complete after {timeout}")
        return True

    def is_completed(self) -> bool:
        if not self._done:
            self._progress.advance(self)
        return self._done

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._operation.outputs

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def needs_guard(self) -> bool:
        """Whether it takes long and its future is in use; true once."""
        if self._guarded or self._future is None or time.monotonic() - self.since < SLICE.total_seconds():
            return False
        self._guarded = True
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the list of output tensors, for C++ code that waits, as in DistributedDataParallel."""
        with self._lock:
            created = self._future is None
            future = self._future = self._future or torch.futures.Future()
            resolve = created and self._done
        # A future failed from Python fails only for Python; a future whose callback raises fails for C++ too.
        chained = future.then(_value_of)
        if resolve:
            self._resolve(future)
        else:
            self._progress.hurry()
        return chained

    def _resolve(self, future: torch.futures.Future[Any]) -> None:
        future.set_result((self._error, self._operation.outputs))


class Progress:
    """The progress engine of this process. Its methods may be called from any thread, also from callbacks.

    Attributes:
        lock: Held during every MPI call.
        abandoned: Failed operations that MPI has not completed; kept because MPI may still use their buffers.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.abandoned: list[tuple[Work, Sequence[MPI.Request]]] = []
        self._pending: dict[Work, None] = {}
        self._wake = threading.Event()
        self._asleep = False
        self._thread: threading.Thread | None = None

    def drop_receives(self) -> bool:
        """Cancel unanswered receives; return whether no MPI operation is left, so that MPI can be finalized."""
        with self.lock:
            for work in [work for work in self._pending if work.cancel()]:
                del self._pending[work]
        return not self._pending and not self.abandoned

    def works_for(self, group: dist.ProcessGroup) -> bool:
        """Whether an MPI operation of ``group`` is pending."""
        return any(work.group is group for work in [*self._pending, *(work for work, _ in self.abandoned)])

    def start(self, operation: Operation, group: dist.ProcessGroup, timeout: timedelta) -> Work:
        """Start ``operation``, which fails after ``timeout``. Does not block."""
        work = Work(self, operation, group, timeout)
        with self.lock:
            work.post()
        self._pending[work] = None
        # Called in a callback of the thread itself, which may then wait: start another thread in its place.
        if self._thread is None or self._thread is threading.current_thread():
            self._thread = threading.Thread(target=self._run, name="ddp_callbacks.mpi", daemon=True)
            self._thread.start()
        elif self._asleep:
            self._wake.set()
        return work

    def advance(self, work: Work) -> None:
        """Test ``work``, and complete it if MPI is done with it."""
        with self.lock:
            arrived = work.claim()
        if arrived:
            self._pending.pop(work, None)
            work.complete()

    def hurry(self) -> None:
        """Wake the thread."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread, unless it is in a callback."""
        thread, self._thread = self._thread, None
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(1.0)

    def _run(self) -> None:
        me, busy = threading.current_thread(), time.monotonic()
        while self._thread is me:
            pending = list(self._pending)
            for work in pending:
                if not work.watched:
                    self.advance(work)
                if work.needs_guard():
                    threading.Thread(target=work.guard, name="ddp_callbacks.comm.mpi.guard", daemon=True).start()
            now = time.monotonic()
            if pending:
                busy = now
            if now - busy > _LINGER:
                self._sleep()
                busy = time.monotonic()
            elif self._thread is me:
                self._wake.wait(_interval(min([now - work.since for work in pending if not work.watched], default=1.0)))
                self._wake.clear()

    def _sleep(self) -> None:
        self._asleep = True
        if not self._pending and self._thread is not None:
            self._wake.wait()
        self._asleep = False
        self._wake.clear()


def pause(waited: float) -> None:
    """Pause between two tests, after this thread has waited for ``waited`` seconds."""
    if _SPIN <= waited < _YIELD:
        os.sched_yield()  # the awaited rank may need this core
    elif waited >= _YIELD:
        time.sleep(_interval(waited))


def _interval(waited: float) -> float:
    return min(max(waited / 10, _SHORTEST), _LONGEST)


def _value_of(future: torch.futures.Future[Any]) -> list[torch.Tensor]:
    error: BaseException | None
    outputs: list[torch.Tensor]
    error, outputs = future.value()
    if error is not None:
        raise error
    return outputs
