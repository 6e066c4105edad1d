"""Hierarchical all-reduce: reduce-scatter within each node, all-reduce between nodes, all-gather within each node.

gloo's ring knows no nodes: with k ranks on each of two nodes, one ring of all ranks sends 2 (2k - 1) / 2k times the
bytes of the gradients through each node's link. Here the ranks of a node first add up what they have (reduce-scatter,
in shared memory); each node leader then sums its shard with the leaders on the other nodes, so that all leaders share
the link and it carries each byte once (2 (H - 1) / H times with H nodes); then every rank of the node gets the result
(all-gather). The idea is that of Jia et al., 2018 (arXiv:1807.11205).

Two threads do that beside training, so that backward goes on. Each works in the order of launch, which is the same on
all ranks. With two, the next bucket is reduced and sent while the last one is awaited::

    main thread      post ────────────────── ... backward ... ────────────────── finish
    reduce thread         reduce-scatter the shard, start its all-reduce between nodes
    gather thread                                  wait for it, all-gather

A long sum is cut into chunks, so that one is reduced or gathered while another is on the network.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ddp_callbacks.comm.group_sums import ProcessGroupWork
from ddp_callbacks.comm.protocol import Work, alive
from ddp_callbacks.comm.shared_memory import ALIGNMENT, SharedMemoryAllReduce, SharedMemoryWork
from ddp_callbacks.process_group.failures import enter, wait
from ddp_callbacks.process_group.presence import OWN_THREADS

T = TypeVar("T")
DOING = "gradients that are summed during backward"
CHUNK_NBYTES = 4 << 20
"""The size of a shard that is worth a sum by itself; with less, gloo's ring runs short of work."""

_MAX_CHUNKS = 8  # of a sum: an inbox has room for a limited number of sums under way, and each chunk is one


class HierarchicalAllReduce:
    """See :class:`.protocol.AllReduce`.

    Args:
        memory: Sums within this rank's node.
        between: Sums between the nodes.
        dtype: Between nodes, as in :class:`.group_sums.ProcessGroupWork`.
    """

    def __init__(self, memory: SharedMemoryAllReduce, between: Between, dtype: torch.dtype | None = None) -> None:
        self._memory, self._between, self._dtype = memory, between, dtype
        self.allocate = memory.allocate
        self.exact = dtype is None

    def launch(self, tensor: torch.Tensor, doing: str) -> ChunkedWork:
        """Start to sum ``tensor`` (flat, contiguous) over all ranks, in place. Does not block."""
        enter(doing)
        fewest = -(-tensor.numel() // (_MAX_CHUNKS * ALIGNMENT)) * ALIGNMENT
        numel = CHUNK_NBYTES * self._memory.local_ranks.leaders // tensor.itemsize
        return ChunkedWork([self._launch(chunk, doing) for chunk in tensor.split(max(numel, fewest, 1))])

    def _launch(self, chunk: torch.Tensor, doing: str) -> HierarchicalWork:
        posted = self._memory.post(chunk, doing)
        sent = self._between.reduce.submit(partial(self._reduce, posted))
        gathered = self._between.gather.submit(partial(self._gather, posted, sent))
        return HierarchicalWork(self._memory, posted, gathered, self._between.group)

    def _reduce(self, posted: SharedMemoryWork) -> ProcessGroupWork | None:
        """In the reduce thread: start to sum this rank's shard between the nodes."""
        shard, leaders = self._memory.reduce_scatter(posted, DOING), self._between.leaders
        if leaders is None or not shard.numel():
            return None
        return ProcessGroupWork(shard, leaders, posted.doing, self._dtype)

    def _gather(self, posted: SharedMemoryWork, sent: Future[ProcessGroupWork | None]) -> None:
        """In the gather thread."""
        if (work := sent.result()) is not None:
            work.wait(DOING)
        self._memory.all_gather(posted)


@dataclass(frozen=True)
class ChunkedWork:
    """The handle of a sum over all ranks, chunk by chunk; see :class:`.protocol.Work`."""

    chunks: Sequence[Work]

    def wait(self) -> None:
        """Block until the sum is there. Raises :class:`PeerError` if a rank fails."""
        for chunk in self.chunks:
            chunk.wait()


@dataclass(frozen=True)
class HierarchicalWork:
    """The handle of one chunk; see :class:`.protocol.Work`."""

    memory: SharedMemoryAllReduce
    posted: SharedMemoryWork
    gathered: Future[None]
    group: weakref.ref[dist.ProcessGroup]

    def wait(self) -> None:
        """Block until the sum is there. Raises :class:`PeerError` if a rank fails."""
        wait(self, self.posted.doing, alive(self.group))
        self.gathered.result()
        self.memory.finish(self.posted)

    def wait_slice(self, seconds: float) -> bool:
        """Whether the threads finished it within ``seconds``; every wait of theirs has a limit."""
        with suppress(TimeoutError):
            self.gathered.exception(seconds)
        return self.gathered.done()


class Between:
    """What sums between the nodes for one process: two threads, and a process group.

    Args:
        group: All ranks.
        leaders: The leaders of this rank's shard, one on each node; ``None`` on a rank that sums no shard.
    """

    def __init__(self, group: dist.ProcessGroup, leaders: dist.ProcessGroup | None) -> None:
        self.group, self.leaders = weakref.ref(group), leaders
        self.reduce, self.gather = Worker(f"{OWN_THREADS} reduce"), Worker(f"{OWN_THREADS} gather")


class Worker:
    """Runs calls one after the other, in a daemon thread, which cannot keep the process alive."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=_run, args=(self._calls,), name=name, daemon=True).start()
        weakref.finalize(self, self._calls.put, None).atexit = False

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Make a call in the thread."""
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future


def _run(calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]) -> None:
    while (item := calls.get()) is not None:
        call, future = item
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        del item, call, future  # their tensors
