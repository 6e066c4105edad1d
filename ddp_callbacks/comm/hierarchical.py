"""Hierarchical all-reduce: reduce-scatter within each node, all-reduce between nodes, all-gather within each node.

gloo's ring knows no nodes: with k ranks on each of two nodes, one ring of all ranks sends 2 (2k - 1) / 2k times the
bytes of the gradients through each node's link. Here the ranks of a node first add up their gradients (reduce-scatter,
in shared memory). Each node leader then sums its shard with the leaders on the other nodes, so that all leaders share
the link and it carries each byte once (2 (H - 1) / H times with H nodes). Then every rank of the node gets the result
(all-gather). The idea is that of Jia et al., 2018 (arXiv:1807.11205).

A thread sends while backward goes on, in the order of launch::

    main thread      post ────────────────── ... backward ... ────────────────── await the sum between nodes, all-gather
    its thread            reduce-scatter the shard, start its all-reduce between nodes

A long sum is cut into chunks, so that one is reduced or gathered while another is on the network.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from ddp_callbacks.comm.group_sums import ProcessGroupWork
from ddp_callbacks.comm.protocol import alive
from ddp_callbacks.comm.shared_memory import ALIGNMENT, SharedMemoryAllReduce, SharedMemoryWork
from ddp_callbacks.process_group.failures import enter, wait
from ddp_callbacks.process_group.presence import OWN_THREADS

Sent = Future[ProcessGroupWork | None]
Calls = queue.SimpleQueue[tuple[Callable[[], ProcessGroupWork | None], Sent] | None]
DOING = "gradients that are summed during backward"
CHUNK_NBYTES = 4 << 20
"""Bytes of each leader's shard in a chunk of a long sum: with less, gloo's ring runs short of work."""

_MAX_CHUNKS = 8  # per sum: each chunk counts as a pending sum, and an inbox has room for a limited number of these


class HierarchicalAllReduce:
    """All-reduce within each node through shared memory, and between nodes by gloo. See :class:`.protocol.AllReduce`.

    Args:
        memory: The all-reduce within this rank's node.
        leaders: The group of the leaders of this rank's shard, one on each node; ``None`` on a rank that sums no shard.
        calls: The queue from :func:`start_thread`.
        dtype: The dtype between nodes, as in :class:`.group_sums.ProcessGroupWork`.
    """

    def __init__(
        self,
        memory: SharedMemoryAllReduce,
        leaders: dist.ProcessGroup | None,
        calls: Calls,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._memory, self._leaders, self._calls, self._dtype = memory, leaders, calls, dtype
        self.allocate = memory.allocate
        self.exact = dtype is None

    def launch(self, tensor: torch.Tensor, purpose: str) -> HierarchicalWork:
        """Start to sum ``tensor`` (flat, contiguous) over all ranks, in place. Does not block."""
        enter(purpose)
        fewest = -(-tensor.numel() // (_MAX_CHUNKS * ALIGNMENT)) * ALIGNMENT
        numel = CHUNK_NBYTES * self._memory.local_ranks.leaders // tensor.itemsize
        works = [self._launch(chunk, purpose) for chunk in tensor.split(max(numel, fewest, 1))]
        return works[-1]  # it completes after the other chunks

    def _launch(self, chunk: torch.Tensor, purpose: str) -> HierarchicalWork:
        work = self._memory.post(chunk, purpose, HierarchicalWork)
        self._calls.put((partial(self._send, work), work.sent))
        return work

    def _send(self, work: HierarchicalWork) -> ProcessGroupWork | None:
        """Sum this rank's shard within the node, and start to sum it between the nodes. Runs in the thread."""
        shard = self._memory.reduce_scatter(work, DOING)
        if self._leaders is None or not shard.numel():
            return None
        return ProcessGroupWork(shard, self._leaders, work.purpose, self._dtype)


@dataclass(eq=False)
class HierarchicalWork(SharedMemoryWork):
    """The work handle of one chunk; see :class:`.protocol.Work`."""

    sent: Sent = field(default_factory=Future)

    def reduce(self, purpose: str) -> None:
        """Block until this rank's shard is summed over all ranks."""
        whole = alive(self.memory.group)
        wait(self, purpose, whole)
        if (work := self.sent.result()) is not None:
            work.wait(whole)

    def wait_slice(self, seconds: float) -> bool:
        """Wait up to ``seconds``; return whether the thread has started the chunk. The thread's waits have limits."""
        with suppress(TimeoutError):
            self.sent.exception(seconds)
        return self.sent.done()


def start_thread(group: dist.ProcessGroup) -> Calls:
    """Start a daemon thread that makes the calls in the returned queue, in turn, until ``group`` ends."""
    calls: Calls = queue.SimpleQueue()
    threading.Thread(target=_run, args=(calls,), name=f"{OWN_THREADS} reduce", daemon=True).start()
    weakref.finalize(group, calls.put, None).atexit = False
    return calls


def _run(calls: Calls) -> None:
    while (item := calls.get()) is not None:
        call, future = item
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        del item, call, future  # frees their tensors
