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
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from ddp_callbacks.comm.group_sums import ProcessGroupWork
from ddp_callbacks.comm.protocol import Work, alive
from ddp_callbacks.comm.shared_memory import ALIGNMENT, SharedMemoryAllReduce, SharedMemoryWork
from ddp_callbacks.process_group.failures import enter, wait
from ddp_callbacks.process_group.presence import OWN_THREADS

DOING = "gradients that are summed during backward"
CHUNK_NBYTES = 4 << 20
"""The size of a shard that is worth a sum by itself; with less, gloo's ring runs short of work."""

_MOMENT = 1e-3  # seconds of the usual wait
_MAX_CHUNKS = 8  # of a sum: shared memory has room for a limited number of sums under way, and each chunk is one


class HierarchicalAllReduce:
    """See :class:`.protocol.AllReduce`.

    Args:
        memory: Sums within this rank's node.
        leaders: The leaders of this rank's shard, one on each node; ``None`` on a rank that sums no shard.
        threads: That do the work; all hierarchical sums of a group use the same.
        dtype: Between nodes, as in :class:`.group_sums.ProcessGroupWork`.
    """

    def __init__(
        self,
        memory: SharedMemoryAllReduce,
        leaders: dist.ProcessGroup | None,
        threads: SummingThreads,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._memory, self._leaders, self._threads, self._dtype = memory, leaders, threads, dtype
        self.allocate = memory.allocate
        self.exact = dtype is None

    def launch(self, tensor: torch.Tensor, doing: str = "") -> ChunkedWork:
        """Start to sum ``tensor`` (flat, contiguous) over all ranks, in place. Does not block."""
        if doing:
            enter(doing)
        fewest = -(-tensor.numel() // (_MAX_CHUNKS * ALIGNMENT)) * ALIGNMENT
        numel = CHUNK_NBYTES * self._memory.local_ranks.leaders // tensor.itemsize
        return ChunkedWork([self._launch(chunk, doing) for chunk in tensor.split(max(numel, fewest, 1))])

    def _launch(self, chunk: torch.Tensor, doing: str) -> HierarchicalWork:
        work = HierarchicalWork(self._memory, self._memory.post(chunk, doing), self._threads.group)
        self._threads.reduce.submit(partial(self._reduce, work, doing))
        return work

    def _reduce(self, work: HierarchicalWork, doing: str) -> None:
        work.reduce(partial(self._sum_between_nodes, doing=doing))
        self._threads.gather.submit(work.gather)

    def _sum_between_nodes(self, shard: torch.Tensor, doing: str) -> Work | None:
        if self._leaders is None or not shard.numel():
            return None
        return ProcessGroupWork(shard, self._leaders, doing, self._dtype)


@dataclass(frozen=True)
class ChunkedWork:
    """The handle of a sum over all ranks, chunk by chunk; see :class:`.protocol.Work`."""

    chunks: Sequence[Work]

    def wait(self, doing: str) -> None:
        """Block until the sum is there. Raises :class:`PeerError` if a rank fails."""
        for chunk in self.chunks:
            chunk.wait(doing)


class HierarchicalWork:
    """The handle of one chunk; see :class:`.protocol.Work`."""

    def __init__(
        self, memory: SharedMemoryAllReduce, posted: SharedMemoryWork, group: weakref.ref[dist.ProcessGroup]
    ) -> None:
        self._memory, self._posted, self._group = memory, posted, group
        self._sent: Work | None = None
        self._gathered = threading.Event()
        self._error: BaseException | None = None

    def reduce(self, sum_between_nodes: Callable[[torch.Tensor], Work | None]) -> None:
        """In the reduce thread."""
        try:
            self._sent = sum_between_nodes(self._memory.reduce_scatter(self._posted, DOING))
        except BaseException as error:
            self._error = error

    def gather(self) -> None:
        """In the gather thread."""
        try:
            if self._error is None:
                if self._sent is not None:
                    self._sent.wait(DOING)
                self._memory.all_gather(self._posted)
        except BaseException as error:
            self._error = error
        self._gathered.set()

    def wait(self, doing: str) -> None:
        """Block until the sum is there. Raises :class:`PeerError` if a rank fails."""
        if not self._gathered.wait(_MOMENT):
            wait(self, doing, alive(self._group))
        if self._error is not None:
            raise self._error
        self._memory.finish(self._posted, doing)

    def wait_slice(self, seconds: float) -> bool:
        """Whether the threads finished it within ``seconds``; every wait of theirs has a limit."""
        return self._gathered.wait(seconds)


class SummingThreads:
    """The two threads of a process that sum for ``group``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = weakref.ref(group)
        self.reduce, self.gather = Worker(f"{OWN_THREADS} reduce"), Worker(f"{OWN_THREADS} gather")


class Worker:
    """Runs calls one after the other, in a thread that ends when this object has gone. The calls must not raise."""

    def __init__(self, name: str) -> None:
        calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.submit = calls.put
        # A daemon thread, so that it cannot keep the process alive.
        threading.Thread(target=_run, args=(calls,), name=name, daemon=True).start()
        weakref.finalize(self, calls.put, None).atexit = False


def _run(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # its tensors
