"""All-reduce between the processes of one node through memory that they share: no socket, and no copy.

gloo sends every byte over TCP, between two processes of one machine too. Here the buckets themselves lie in memory
that all ranks of the node have mapped (see :mod:`ddp_callbacks.comm.segments`). Each node leader adds up its shard of
every rank's bucket, in the order of the ranks, and writes the sum into every bucket, so all get the same bits::

    post               tell the others where this bucket is, and that it can be read      does not block
    reduce_scatter     wait until every rank has posted, sum this rank's shard
    all_gather         write the sum into every rank's bucket, tell the others            does not block
    complete           do both; wait until every rank has done so

On a single node every rank is a leader. With several nodes (:mod:`ddp_callbacks.comm.hierarchical`) the shard is summed
between the nodes after the reduce-scatter.
"""

from __future__ import annotations

import struct
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

from ddp_callbacks.comm import segments
from ddp_callbacks.comm.mailbox import LocalRanks, Mailbox
from ddp_callbacks.comm.protocol import alive, as_real
from ddp_callbacks.errors import MismatchError
from ddp_callbacks.process_group.failures import diagnose, enter, require_tags, tag_of

W = TypeVar("W", bound="SharedMemoryWork")
# Where a tensor is: inode and descriptor of its segment, offset in it, number of bytes. Then the tag of the purpose.
_POST = struct.Struct("=QIQQI")
ALIGNMENT = 64
"""Shards begin at multiples of this many elements, so that no two ranks write to the same cache line."""


class SharedMemoryAllReduce:
    """All-reduce through memory shared by the ranks of a node.

    Every rank must launch the same sums in the same order.

    Args:
        group: The process group, which may have ranks on other nodes, too.
        local_ranks: The ranks on this node.
        posted: The mailbox that tells the others that a bucket can be read.
        done: The mailbox that tells them that this rank has written its shard of the sum to every rank.
    """

    exact = True

    def __init__(self, group: dist.ProcessGroup, local_ranks: LocalRanks, posted: Mailbox, done: Mailbox) -> None:
        self.group, self.local_ranks = weakref.ref(group), local_ranks
        self._posted, self._done = posted, done
        # This rank's shards of all ranks' memory, by position, post and dtype. They keep that memory mapped, so they
        # are dropped whenever a segment of this rank is freed: the other ranks then free theirs.
        self._shards: dict[tuple[int, bytes, torch.dtype], torch.Tensor] = {}
        self._segments: dict[int, segments.Segment] = {}  # by the address of the tensor in each
        # Keeps each buffer until every rank has finished: a peer may not have mapped it yet, even if this rank does not
        # wait.
        self._pending: deque[SharedMemoryWork] = deque()

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        """Allocate a flat CPU tensor that the other ranks can map. Local. Its segment is freed with it."""
        tensor, segment = segments.allocate(numel, dtype)
        address = tensor.untyped_storage().data_ptr()
        self._segments[address] = segment
        # Don't bind this object: its pending sums hold their tensors, which the registry of finalizers would keep.
        weakref.finalize(tensor, self._segments.pop, address, None).atexit = False
        weakref.finalize(tensor, self._shards.clear).atexit = False
        return tensor

    def launch(self, tensor: torch.Tensor, purpose: str) -> SharedMemoryWork:
        """Start summing ``tensor`` over the ranks of this node, in place. Does not block."""
        enter(purpose)
        return self.post(tensor, purpose, SharedMemoryWork)

    def complete(self, work: SharedMemoryWork) -> None:
        """Do this rank's part of all launched sums; return when ``work`` is complete on every rank."""
        for pending in list(self._pending):
            if not pending.is_gathered:
                pending.reduce(work.purpose)
                self.all_gather(pending)
        self._done.collect(work.number, work.purpose)
        while self._pending and self._pending[0].number <= work.number:
            self._pending.popleft()

    # --- the steps of a sum -------------------------------------------------------------------------------------------

    def post(self, tensor: torch.Tensor, purpose: str, kind: type[W]) -> W:
        """Tell the others that they can read ``tensor``. Does not block."""
        segment = self._segments[tensor.untyped_storage().data_ptr()]
        at = int(tensor.storage_offset()) * tensor.itemsize
        number = self._posted.post(_POST.pack(*segment, at, tensor.nbytes, tag_of(purpose)))
        work = kind(self, as_real(tensor), number, purpose)
        self._pending.append(work)
        return work

    def reduce_scatter(self, work: SharedMemoryWork, purpose: str) -> torch.Tensor:
        """Sum this rank's shard, and return it. Blocks until every rank of the node has posted."""
        if work.shards:
            raise RuntimeError(
                "a sum of gradients was interrupted halfway (Ctrl-C), and the other processes already have parts of "
                "it. Restart all processes."
            )
        shards = self._find_shards(work, purpose)  # if this raises, the sum can be completed later
        work.shards = shards
        _sum_into_first(shards)
        return shards[0]

    def all_gather(self, work: SharedMemoryWork) -> None:
        """Write this rank's shard into every rank's buffer. Does not block."""
        first, *others = work.shards
        for other in others:
            other.copy_(first)
        self._done.post()
        work.is_gathered = True

    @torch.inference_mode(False)
    def _find_shards(self, work: SharedMemoryWork, purpose: str) -> list[torch.Tensor]:
        """Block until every rank of the node has posted; then find this rank's shard of each buffer."""
        posts = self._posted.collect(work.number, purpose)
        require_tags([_POST.unpack(post)[-1] for post in posts], work.purpose, alive(self.group))
        return [self._shard(index, post, work.tensor, purpose) for index, post in enumerate(posts)]

    def _shard(self, index: int, post: bytes, like: torch.Tensor, purpose: str) -> torch.Tensor:
        """Return this rank's shard of a rank's memory; from the cache if the same memory was summed before."""
        key = index, post, like.dtype
        if key not in self._shards:
            _, fd, at, nbytes, _ = _POST.unpack(post)
            self._require_size(index, nbytes, like.nbytes)
            # Map this rank's memory a second time: a view of the tensor itself would count as a reference from the
            # user.
            whole = self._map(index, fd, purpose)[at : at + nbytes].view(like.dtype)
            size = -(-like.numel() // (self.local_ranks.leaders * ALIGNMENT)) * ALIGNMENT
            start = self.local_ranks.local_rank * size  # past the end (empty) on a rank that is no leader
            self._shards[key] = whole[start : start + size]
        return self._shards[key]

    def _require_size(self, index: int, nbytes: int, own: int) -> None:
        if nbytes != own:
            there, here = (self.local_ranks.ranks[at] for at in (index, self.local_ranks.local_rank))
            raise MismatchError(
                f"rank {there} sums {nbytes} bytes of gradients, but rank {here} sums {own}: every rank must make "
                "the same calls in the same order, with the same model and bucket_cap_mb."
            )

    def _map(self, index: int, fd: int, purpose: str) -> torch.Tensor:
        """Map a segment of another rank, which may have died since it launched."""
        try:
            return segments.map_bytes(self.local_ranks.pids[index], fd)
        except (OSError, RuntimeError) as error:
            text = f"the memory of rank {self.local_ranks.ranks[index]} cannot be opened: {error}"
            raise diagnose(alive(self.group), purpose, RuntimeError(text)) from error


@dataclass(eq=False)
class SharedMemoryWork:
    """The work handle of a sum over the ranks of a node; :meth:`SharedMemoryAllReduce.launch` makes it.

    Attributes:
        memory: The all-reduce that this sum belongs to.
        tensor: The tensor that is summed, in place.
        number: The number of the post that announces this sum, and of the post that finishes it.
        purpose: What the wait is for.
        shards: This rank's shard of every rank's memory, once it sums them; the first one then holds the sum.
        is_gathered: Whether this rank has written its shard everywhere.
    """

    memory: SharedMemoryAllReduce
    tensor: torch.Tensor
    number: int
    purpose: str
    shards: list[torch.Tensor] = field(default_factory=list)
    is_gathered: bool = False

    def reduce(self, purpose: str) -> None:
        """Sum this rank's shard, for a wait for ``purpose``. Blocks until every rank of the node has posted."""
        self.memory.reduce_scatter(self, purpose)

    def wait(self) -> None:
        """Block until the sum is complete. Raises :class:`PeerError` if a rank fails."""
        self.memory.complete(self)


def _sum_into_first(parts: list[torch.Tensor]) -> None:
    """Write the sum of ``parts`` into the first of them. Half precision is summed in float32."""
    first, *others = parts
    if not first.numel():
        return
    total = first.float() if first.dtype in (torch.float16, torch.bfloat16) else first
    for other in others:
        total += other
    if total is not first:
        first.copy_(total)
