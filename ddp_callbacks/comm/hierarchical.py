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
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ddp_callbacks.comm.protocol import Work, allocate, as_real
from ddp_callbacks.comm.shared_memory import ALIGNMENT
from ddp_callbacks.process_group.failures import enter, wait
from ddp_callbacks.process_group.presence import OWN_THREADS

DOING = "gradients that are summed beside backward"
_MOMENT = 1e-3  # seconds of the usual wait
MAX_CHUNKS = 8
"""Per sum: shared memory has room for a limited number of sums under way, and each chunk is one."""


class IntraNode(Protocol):
    """The part of a sum within one node, in the steps of :class:`.shared_memory.SharedMemoryAllReduce`."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor: ...

    def post(self, tensor: torch.Tensor, leaders: int | None = None, doing: str = "") -> Any: ...

    def reduce_scatter(self, work: Any, doing: str) -> torch.Tensor: ...

    def all_gather(self, work: Any) -> None: ...

    def finish(self, work: Any, doing: str) -> None: ...


class InterNode(Protocol):
    """The part of a sum between nodes."""

    def start(self, shard: torch.Tensor, doing: str) -> Sequence[Work]: ...


class HierarchicalAllReduce:
    """See :class:`.protocol.AllReduce`.

    Args:
        intra_node: Sums within this rank's node.
        inter_node: Sums between the nodes; ``None`` on a rank that is no node leader.
        threads: That do the work; all hierarchical sums of a group use the same.
        exact: Whether ``inter_node`` rounds nothing.
        leaders: How many ranks of each node sum a shard each; ``None`` is as many as every node has.
        chunk_nbytes: How much is summed at a time, all shards together, unless that makes more than
            :data:`MAX_CHUNKS`; ``None`` is everything.
    """

    def __init__(
        self,
        intra_node: IntraNode,
        inter_node: InterNode | None,
        threads: SummingThreads,
        *,
        exact: bool = True,
        leaders: int | None = None,
        chunk_nbytes: int | None = None,
    ) -> None:
        self._intra_node, self._inter_node, self._threads, self._leaders = intra_node, inter_node, threads, leaders
        self._chunk_nbytes = chunk_nbytes
        self.exact = exact
        self.allocate = intra_node.allocate

    def launch(self, tensor: torch.Tensor, doing: str = "") -> ChunkedWork:
        """Start to sum ``tensor`` (flat, contiguous) over all ranks, in place. Does not block."""
        if doing:
            enter(doing)
        numel = tensor.numel()
        if self._chunk_nbytes is not None:
            numel = max(self._chunk_nbytes // tensor.itemsize, -(-numel // (MAX_CHUNKS * ALIGNMENT)) * ALIGNMENT)
        return ChunkedWork([self._launch(chunk, doing) for chunk in tensor.split(max(numel, 1))])

    def _launch(self, chunk: torch.Tensor, doing: str) -> HierarchicalWork:
        posted = self._intra_node.post(chunk, self._leaders, doing)
        work = HierarchicalWork(self._intra_node, posted, self._inter_node, self._threads.group)
        self._threads.reduce.submit(partial(self._reduce, work, doing))
        return work

    def _reduce(self, work: HierarchicalWork, doing: str) -> None:
        work.reduce(doing)
        self._threads.gather.submit(work.gather)


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
        self, intra_node: IntraNode, posted: Any, inter_node: InterNode | None, group: weakref.ref[dist.ProcessGroup]
    ) -> None:
        self._intra_node, self._posted, self._inter_node, self._group = intra_node, posted, inter_node, group
        self._sent: Sequence[Work] = ()
        self._gathered = threading.Event()
        self._error: BaseException | None = None

    def reduce(self, doing: str) -> None:
        """In the reduce thread."""
        try:
            shard = self._intra_node.reduce_scatter(self._posted, DOING)
            if self._inter_node is not None:
                self._sent = self._inter_node.start(shard, doing)
        except BaseException as error:
            self._error = error

    def gather(self) -> None:
        """In the gather thread."""
        try:
            if self._error is None:
                for work in self._sent:
                    work.wait(DOING)
                self._intra_node.all_gather(self._posted)
        except BaseException as error:
            self._error = error
        self._gathered.set()

    def wait(self, doing: str) -> None:
        """Block until the sum is there. Raises :class:`PeerError` if a rank fails."""
        if not self._gathered.wait(_MOMENT):
            group = self._group()
            assert group is not None
            wait(self, doing, group)
        if self._error is not None:
            raise self._error
        self._intra_node.finish(self._posted, doing)

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


class SingleRankNode:
    """A node of one rank: nothing to sum within it. Its work is the tensor itself; see :class:`IntraNode`."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return allocate(numel, dtype, device)

    def post(self, tensor: torch.Tensor, leaders: int | None = None, doing: str = "") -> torch.Tensor:
        return as_real(tensor)

    def reduce_scatter(self, work: torch.Tensor, doing: str) -> torch.Tensor:
        return work

    def all_gather(self, work: torch.Tensor) -> None:
        pass

    def finish(self, work: torch.Tensor, doing: str) -> None:
        pass
