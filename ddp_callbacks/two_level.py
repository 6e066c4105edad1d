"""Sums over several hosts in two levels: in shared memory on each host, over the network between them.

gloo's ring knows no hosts: with k ranks on each of two hosts, a ring of all sends 2 (2k - 1) / 2k times the bytes of
the gradients through each host's link. Here the ranks of a host first add up what they have; then each carrier sums its
slice over the hosts, so that all carriers share the wire and it carries each byte once (2 (H - 1) / H times with H
hosts); then everybody on the host gets it. The idea is that of Jia et al., 2018 (arXiv:1807.11205).

Two threads beside the training do that, so that it goes on while backward runs. Each works in the order of launch,
which is the same on all ranks; two, so that the next bucket is summed and sent while the last one is awaited::

    main thread    fill ──────────────────── ... backward ... ────────────────── collect
    first thread        sum the slice, start it on the wire
    second thread                                            await it, deliver

A long sum is made in pieces, so that one is summed or delivered while another is on the wire.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ddp_callbacks.collectives import as_real
from ddp_callbacks.failures import enter, wait
from ddp_callbacks.presence import OWN_THREADS
from ddp_callbacks.shared_memory import GRAIN
from ddp_callbacks.summation import Pending, allocate

DOING = "gradients that are summed beside backward"
_MOMENT = 1e-3  # seconds of the usual wait
MOST_PIECES = 8
"""Of a sum: memory between processes has room for a number of sums that are under way, and each piece is one."""


class HostMemory(Protocol):
    """One host's part of a sum, in the steps of :class:`ddp_callbacks.shared_memory.SharedMemory`."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...

    def fill(self, tensor: torch.Tensor, carriers: int | None = None, doing: str = "") -> Any: ...

    def sum(self, reduction: Any, doing: str) -> torch.Tensor: ...

    def deliver(self, reduction: Any) -> None: ...

    def collect(self, reduction: Any, doing: str) -> None: ...


class Starts(Protocol):
    """A wire: starts to sum a slice over the hosts."""

    def start(self, part: torch.Tensor) -> Sequence[Pending]: ...


class TwoLevelAllReduce:
    """See :class:`ddp_callbacks.summation.AllReduce`.

    Args:
        memory: Of this rank's host.
        wire: Between the hosts; ``None`` on a rank that carries nothing.
        threads: That do the work; all two-level sums of a group have the same.
        exact: Whether the wire rounds nothing.
        carriers: How many ranks of each host sum a slice; ``None`` is as many as every host has.
        piece_nbytes: What is summed at a time, all slices together, if that makes at most :data:`MOST_PIECES`; ``None``
            is everything.
    """

    unattended = True

    def __init__(
        self,
        memory: HostMemory,
        wire: Starts | None,
        threads: Threads,
        *,
        exact: bool = True,
        carriers: int | None = None,
        piece_nbytes: int | None = None,
    ) -> None:
        self._memory, self._wire, self._threads, self._carriers = memory, wire, threads, carriers
        self._piece_nbytes = piece_nbytes
        self.exact = exact
        self.allocate = memory.allocate

    def launch(self, tensor: torch.Tensor, doing: str = "") -> Pieces:
        """Start to sum ``tensor`` (flat, contiguous) over all ranks, in place. Does not block."""
        if doing:
            enter(doing)
        numel = tensor.numel()
        if self._piece_nbytes is not None:
            numel = max(self._piece_nbytes // tensor.itemsize, -(-numel // (MOST_PIECES * GRAIN)) * GRAIN)
        return Pieces([self._launch(piece, doing) for piece in tensor.split(max(numel, 1))])

    def _launch(self, piece: torch.Tensor, doing: str) -> TwoLevelReduction:
        filled = self._memory.fill(piece, self._carriers, doing)
        reduction = TwoLevelReduction(self._memory, filled, self._wire, self._threads.group)
        self._threads.sums.submit(partial(self._sum, reduction))
        return reduction

    def _sum(self, reduction: TwoLevelReduction) -> None:
        reduction.sum()
        self._threads.deliveries.submit(reduction.deliver)


@dataclass(frozen=True)
class Pieces:
    """A sum over all ranks that is under way, piece by piece."""

    pieces: Sequence[Pending]

    def wait(self, doing: str) -> None:
        """Block until the sum is there. Raises :class:`PeerError` as :func:`ddp_callbacks.failures.wait` does."""
        for piece in self.pieces:
            piece.wait(doing)


class TwoLevelReduction:
    """A piece of such a sum."""

    def __init__(
        self, memory: HostMemory, reduction: Any, wire: Starts | None, group: weakref.ref[dist.ProcessGroup]
    ) -> None:
        self._memory, self._reduction, self._wire, self._group = memory, reduction, wire, group
        self._sent: Sequence[Pending] = ()
        self._delivered = threading.Event()
        self._error: BaseException | None = None

    def sum(self) -> None:
        """In the first thread."""
        try:
            part = self._memory.sum(self._reduction, DOING)
            if self._wire is not None:
                self._sent = self._wire.start(part)
        except BaseException as error:
            self._error = error

    def deliver(self) -> None:
        """In the second thread."""
        try:
            if self._error is None:
                for pending in self._sent:
                    pending.wait(DOING)
                self._memory.deliver(self._reduction)
        except BaseException as error:
            self._error = error
        self._delivered.set()

    def wait(self, doing: str) -> None:
        """See :class:`ddp_callbacks.summation.Pending`."""
        if not self._delivered.wait(_MOMENT):
            group = self._group()
            assert group is not None
            wait(self, doing, group)
        if self._error is not None:
            raise self._error
        self._memory.collect(self._reduction, doing)

    def wait_slice(self, seconds: float) -> bool:
        """Whether the threads were done with it within ``seconds``; whatever they wait for has a limit."""
        return self._delivered.wait(seconds)


class Threads:
    """The two threads of a process that sum for ``group``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = weakref.ref(group)
        self.sums, self.deliveries = Worker(f"{OWN_THREADS} sums"), Worker(f"{OWN_THREADS} deliveries")


class Worker:
    """Runs calls one after the other, in a thread that ends when this object has gone. The calls must not raise."""

    def __init__(self, name: str) -> None:
        calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.submit = calls.put
        # A daemon: at the end of the process nobody waits for it.
        threading.Thread(target=_run, args=(calls,), name=name, daemon=True).start()
        weakref.finalize(self, calls.put, None).atexit = False


def _run(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # its tensors


@dataclass(frozen=True)
class OwnReduction:
    """What is summed on a host of one rank: nothing, yet."""

    tensor: torch.Tensor


class OwnMemory:
    """The memory of a host of one rank, with the steps of :class:`SharedMemory`."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return allocate(numel, dtype, device)

    def fill(self, tensor: torch.Tensor, carriers: int | None = None, doing: str = "") -> OwnReduction:
        return OwnReduction(as_real(tensor))

    def sum(self, reduction: OwnReduction, doing: str) -> torch.Tensor:
        return reduction.tensor

    def deliver(self, reduction: OwnReduction) -> None:
        pass

    def collect(self, reduction: OwnReduction, doing: str) -> None:
        pass
