"""Make every wait end: a failure on one rank raises an error on every other rank that names the failed one.

gloo cannot abort a pending collective (https://github.com/pytorch/pytorch/issues/130345), so :func:`wait` waits in
slices. Between two slices it checks whether this rank has heard (:mod:`.presence`) that another one failed, died or
left, or waits for this one in a different exchange. Only a wait of more than a second is told to the others.
"""

from __future__ import annotations

import threading
import traceback
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NoReturn, Protocol, TypeAlias

import torch
import torch.distributed as dist

from ddp_callbacks._torch import is_ordered_by_stream, known_groups
from ddp_callbacks.errors import MismatchError, PeerError, Preempted
from ddp_callbacks.process_group.coordinator import FOREVER, REMEDY
from ddp_callbacks.process_group.coordinator import LINGER as LINGER
from ddp_callbacks.process_group.diagnosis import diagnose as diagnose
from ddp_callbacks.process_group.diagnosis import error_of, look
from ddp_callbacks.process_group.presence import OWN_THREADS, Presence, found, is_aborted, presence
from ddp_callbacks.process_group.presence import enter as enter
from ddp_callbacks.reporting.stopwatch import begin_wait, end_wait

_SLICE = timedelta(seconds=0.1)  # how often a waiting rank checks what it has heard
_LONG = 10  # slices of a wait before the others are told
BEGIN = "the begin of a run"
_TRACEBACK = 1 << 16  # characters
_OF_WORKER = "DataLoader worker (pid"
_ABORTED = "operations on GPUs were aborted, because the run has failed"


class Waitable(Protocol):
    """An object of this library that :func:`wait` can wait for, besides torch's work handles."""

    def wait_slice(self, seconds: float) -> bool:
        """Wait up to ``seconds``; return whether it is complete. Raises RuntimeError if it never will be."""


Pending: TypeAlias = dist.Work | Waitable


def announce_join() -> None:
    """Connect this rank to the control channel, if it is not: others hear of its end, and messages name its host."""
    presence()


def describe_rank(group: dist.ProcessGroup, rank: int) -> str:
    """Return ``rank 1 (host node2, pid 4711)`` for a rank of ``group``, by its global rank; less if less is known."""
    return presence().describe(dist.get_global_rank(group, rank))


def wait(pending: Pending, purpose: str, group: dist.ProcessGroup) -> None:
    """Block until ``pending`` is complete.

    Args:
        pending: The work handle of a collective; see :func:`of_device` for collectives on GPUs.
        purpose: What the collective is for, for messages: "the gradients of 0.weight". If the caller has passed it to
            :func:`ddp_callbacks.process_group.presence.enter`, deadlocks are detected too.
        group: The process group that communicates.

    Raises:
        PeerError: Another rank reported a failure, left, or its connection broke, or nothing came within the group's
            timeout.
        MismatchError: Another rank waits for this one in another exchange.
    """
    here, is_beside_training = found(), _is_beside_training()
    run = 0 if here is None else here.run
    if not is_beside_training:
        begin_wait()
    try:
        if not _wait_first_slices(pending, here):
            _wait_long(pending, purpose, group, run)
        if is_aborted() and purpose != BEGIN:
            raise RuntimeError(_ABORTED)  # the result may be meaningless
    except (MismatchError, RuntimeError) as error:
        if str(error).startswith(_OF_WORKER):  # raised by torch's handler of signals in whatever this rank is doing
            presence().failed = True
            raise
        _fail(error, purpose, group, run)
    finally:
        if not is_beside_training:
            end_wait()


@contextmanager
def launching(purpose: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Launch collectives inside this context: if this rank has lost its connections, raise the errors of :func:`wait`.

    Other exceptions, such as for a tensor of the wrong dtype, pass through.

    Args:
        purpose, group: As for :func:`wait`.

    Raises:
        PeerError: Another rank failed or died, so that this rank's operations on GPUs were aborted, or the backend
            cannot reach it.
        MismatchError: Another rank waits for this one in another exchange.
    """
    try:
        if is_aborted():
            raise dist.DistError(_ABORTED)
        yield
    except RuntimeError as error:
        if not is_aborted() and not isinstance(error, dist.DistError):
            raise
        _fail(error, purpose, group, presence().run)


def _fail(error: Exception, purpose: str, group: dist.ProcessGroup, run: int) -> NoReturn:
    """Raise the reason for a broken wait. The run has failed, unless the wait belongs to an earlier run."""
    if _is_of_earlier_run(group, run):
        raise PeerError(f"{purpose}: its run is over") from error
    presence().failed = True
    if isinstance(error, PeerError | MismatchError):
        raise error
    raise diagnose(group, purpose, error) from error


def _is_of_earlier_run(group: dist.ProcessGroup, run: int) -> bool:
    return run != presence().run or group not in known_groups()


def _is_beside_training() -> bool:
    return threading.current_thread().name.startswith(OWN_THREADS)


def _wait_long(pending: Pending, purpose: str, group: dist.ProcessGroup, run: int) -> None:
    here, begins = presence(), purpose == BEGIN
    started = int(isinstance(pending, dist.Work) and group is dist.group.WORLD)
    # At the begin of the next run, a rank waits for the others to give up the failed run.
    place = here.place(purpose, group, started, failed=begins and here.failed)
    with nullcontext() if _is_beside_training() else here.waiting(place):
        look(here, place, begins)
        while not _wait_slice(pending):
            if _is_of_earlier_run(group, run):
                raise PeerError(f"{purpose}: its run is over")
            look(here, place, begins)


# --- reports ----------------------------------------------------------------------------------------------------------


def report_failure(exception: BaseException) -> None:
    """Tell all ranks about ``exception``, which ends the run here. The first one of a run counts.

    Never raises an error; hardly blocks.
    """
    if isinstance(exception, Preempted):
        return  # every rank raises it
    _report(presence().run, exception)


def report_end(exception: BaseException) -> None:
    """Tell all ranks about an exception that ends this process: it ends later runs too."""
    _report(FOREVER, exception)


def _report(run: int | None, exception: BaseException) -> None:
    here = presence()
    here.failed = True
    if isinstance(exception, PeerError):
        return
    report = {
        "rank": dist.get_rank(),
        "type": type(exception).__name__,
        "message": str(exception)[:_TRACEBACK],
        "traceback": "".join(traceback.format_exception(exception))[-_TRACEBACK:],
    }
    here.client.send({"event": "end", "run": run, "what": {"kind": "failure", "report": report}})


# --- mismatches -------------------------------------------------------------------------------------------------------


def tag_of(purpose: str) -> int:
    """Return a number that identifies the purpose of an exchange in its message; a float64 holds it exactly."""
    return zlib.crc32(purpose.encode())


def require_tags(tags: Sequence[object], purpose: str, group: dist.ProcessGroup) -> None:
    """Raise :class:`MismatchError` unless all tags are equal. Every rank that took part must call it.

    Args:
        tags: Each rank's :func:`tag_of`, in any form.
        purpose: What this rank's exchange is for, which it has entered.
        group: The ranks' process group.
    """
    if all(tag == tags[0] for tag in tags):
        return
    here = presence()
    here.failed = True
    with here.waiting(here.place(purpose, group)):  # rank 0 then sees that the ranks wait for each other
        end: Any = here.heard.wait_for(here.end_of_run, LINGER)
    if end:
        raise error_of(here, end, purpose)
    raise MismatchError(f"{here.name} exchanges {purpose}, others do not. {REMEDY}")


# --- slices -----------------------------------------------------------------------------------------------------------
def of_device(work: dist.Work, device: torch.device, group: dist.ProcessGroup) -> Pending:
    """Return an object for :func:`wait` to wait for the collective ``work`` on ``device``.

    With NCCL, only the current stream waits for the result; the host goes on once the collective is in a stream. The
    host cannot notice a failed rank there, so the ranks also meet on the CPU in each step.
    """
    return _StreamWork(work) if is_ordered_by_stream(group, device) else work


class _StreamWork:
    """Lets the current stream wait for a collective on a GPU. (With a timeout, NCCL would block the host.)"""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait_slice(self, seconds: float) -> bool:
        self._work.wait()
        return True


class Launched:
    """Lets :func:`wait` wait until the host has nothing more to do for a future.

    On a GPU, all its collectives are then in a stream. The future's own ``wait`` lets the current stream wait for them.
    """

    def __init__(self, future: torch.futures.Future[torch.Tensor]) -> None:
        self._future = future

    def wait_slice(self, seconds: float) -> bool:
        done = threading.Event()
        self._future.add_done_callback(lambda _: done.set())  # at once, if it is done
        if not done.wait(seconds):
            return False
        self._future.value()  # raises if it has failed
        return True


def _wait_first_slices(pending: Pending, here: Presence | None) -> bool:
    """Wait until ``pending`` is complete, for a second at most; less if the run has ended."""
    for _ in range(_LONG):
        if _wait_slice(pending):
            return True
        if here is not None and here.end_of_run():
            break
    return False


def _wait_slice(pending: Pending) -> bool:
    if not isinstance(pending, dist.Work) or hasattr(pending, "wait_slice"):  # MPI's work is both
        return bool(pending.wait_slice(_SLICE.total_seconds()))
    try:
        pending.wait(_SLICE)
    except RuntimeError:
        if not pending.is_completed():
            return False
        pending.wait()  # it has completed since the slice ended; raises if it failed
    return True
