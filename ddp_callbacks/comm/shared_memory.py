"""All-reduce between the processes of one node through memory that they share: no socket, and no copy.

gloo sends every byte over TCP, between two processes of one machine too. Here the buckets themselves lie in memory
that all ranks of the node have mapped (see :mod:`ddp_callbacks.comm.memfd`). Each node leader adds up its shard of
every rank's bucket, in the order of the ranks, and writes the sum into every bucket, so all get the same bits::

    post               tell the others that this bucket can be read                       does not block
    reduce_scatter     wait until every rank has posted, sum this rank's shard
    all_gather         write the sum into every rank's bucket, tell the others            does not block
    finish             wait until every rank has done so

On a single node every rank is a leader, and the last three steps run when a rank waits. With several nodes
(:mod:`ddp_callbacks.comm.hierarchical`) the shard is summed between the nodes after the reduce-scatter.
"""

from __future__ import annotations

import mmap
import weakref
from array import array
from collections import deque
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ddp_callbacks._torch import outside_inference_mode, timeout_of
from ddp_callbacks.comm import memfd
from ddp_callbacks.comm.protocol import alive, as_real
from ddp_callbacks.comm.segments import Place, Segments
from ddp_callbacks.comm.semaphores import LINE, SemaphoreChannel
from ddp_callbacks.errors import ConfigurationError, MismatchError
from ddp_callbacks.process_group.diagnosis import ProcessEnded
from ddp_callbacks.process_group.failures import diagnose, enter, require_tags, tag_of, wait

_SLOTS = 8192  # per rank in the ring: the maximum number of pending sums
_ENTRY = 5  # numbers in a slot
ALIGNMENT = 64
"""Shards begin at multiples of this many elements, so that no two ranks write to the same cache line."""


@dataclass(frozen=True)
class LocalRanks:
    """The ranks of one node.

    Attributes:
        ranks: Their ranks in the group.
        pids: Their process ids.
        local_rank: The position of this rank among them.
        leaders: The number of node leaders, which sum a shard each; they are the first ranks.
    """

    ranks: list[int]
    pids: list[int]
    local_rank: int
    leaders: int


class SharedMemoryAllReduce:
    """All-reduce through memory shared by the ranks of a node.

    Every rank must launch the same sums in the same order.

    Args:
        group: The group of these ranks.
        local_ranks: The ranks on this node.
        control: Descriptor of a segment that all of them have opened.
        offset: Where its :meth:`control_nbytes` begin there; a multiple of the page size.
    """

    exact = True

    def __init__(self, group: dist.ProcessGroup, local_ranks: LocalRanks, control: int, offset: int = 0) -> None:
        self._group = weakref.ref(group)
        self.local_ranks = local_ranks
        self._local_rank, self._size = local_ranks.local_rank, len(local_ranks.ranks)
        timeout = timeout_of(group)
        nbytes = SemaphoreChannel.nbytes(self._size)
        ranks = local_ranks.ranks
        self._posted, self._done = (
            SemaphoreChannel(control, offset + at, ranks, self._local_rank, timeout) for at in (0, nbytes)
        )
        # A ring of slots per rank, indexed by the number of the sum: its place, and the tag of its purpose.
        ring = memoryview(mmap.mmap(control, self.control_nbytes(self._size), offset=offset))
        self._descriptors = ring[2 * nbytes :].cast("q")
        self._segments = Segments()
        self._finished = 0  # number of the last work that is complete on all ranks
        self._launched: deque[SharedMemoryWork] = deque()
        self._under_way = False  # whether a sum is half done
        # Keeps a buffer until every rank has finished: a peer may not have mapped it yet, even if this rank does not
        # wait.
        self._gathered: deque[SharedMemoryWork] = deque()

    @staticmethod
    def control_nbytes(size: int) -> int:
        return 2 * SemaphoreChannel.nbytes(size) + size * _SLOTS * LINE

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        """A flat CPU tensor that the other ranks can map. Local. Its segment is freed with it."""
        return self._segments.allocate(numel, dtype)

    def launch(self, tensor: torch.Tensor, doing: str = "") -> SharedMemoryWork:
        """Start summing ``tensor`` over the ranks of this node, in place. Does not block."""
        if doing:
            enter(doing)
        work = self.post(tensor, doing)
        self._launched.append(work)
        return work

    def complete(self, work: SharedMemoryWork, doing: str) -> None:
        """Do this rank's part of all launched sums; return when ``work`` is complete on every rank."""
        self._require_whole()
        while self._launched:
            first = self._launched[0]
            self._find_shards(first, doing)  # if this raises, the sum can be completed later
            self._under_way = True
            _sum_into_first(first.shards)
            self.all_gather(first)
            self._launched.popleft()
            self._under_way = False
        self.finish(work, doing)

    def _require_whole(self) -> None:
        if self._under_way:
            raise RuntimeError(
                "a sum of gradients was interrupted halfway (Ctrl-C), and the other processes already have parts of "
                "it. Restart all processes."
            )

    # --- the steps of a sum -------------------------------------------------------------------------------------------

    def post(self, tensor: torch.Tensor, doing: str = "") -> SharedMemoryWork:
        """Tell the others that they can read ``tensor``. Does not block."""
        if self._posted.posted - self._finished >= _SLOTS:
            raise ConfigurationError(f"more than {_SLOTS} sums are in flight: raise bucket_cap_mb.")
        number = self._posted.posted + 1
        entry = array("q", [*self._segments.place_of(tensor), tag_of(doing)])
        slot = self._slot(self._local_rank, number)
        self._descriptors[slot : slot + len(entry)] = memoryview(entry)
        self._posted.post()
        return SharedMemoryWork(self, as_real(tensor), number, doing)

    def reduce_scatter(self, work: SharedMemoryWork, doing: str) -> torch.Tensor:
        """Sum this rank's shard, and return it. Blocks until every rank of the node has posted."""
        self._find_shards(work, doing)
        _sum_into_first(work.shards)
        return work.shards[0]

    def _find_shards(self, work: SharedMemoryWork, doing: str) -> None:
        """Block until every rank of the node has posted; then find this rank's shard of each buffer."""
        self._await(self._posted, work.number, doing)
        entries = [self._entry(index, work.number) for index in range(self._size)]
        self._require_same([tag for _, tag in entries], work.doing)
        work.shards = [self._shard(index, place, work.tensor, doing) for index, (place, _) in enumerate(entries)]

    def all_gather(self, work: SharedMemoryWork) -> None:
        """Write this rank's shard into every rank's buffer. Does not block."""
        first, *others = work.shards
        for other in others:
            other.copy_(first)
        self._gathered.append(work)
        self._done.post()

    def finish(self, work: SharedMemoryWork, doing: str) -> None:
        """Block until every rank of the node has written its shard everywhere."""
        self._await(self._done, work.number, doing)
        self._finished = max(self._finished, work.number)
        while self._gathered and self._gathered[0].number <= work.number:
            self._gathered.popleft()

    @outside_inference_mode
    def _shard(self, index: int, place: Place, like: torch.Tensor, doing: str) -> torch.Tensor:
        """This rank's shard of a rank's memory. Usually, a step sums the same memory as the previous one."""
        key = index, place, like.dtype
        shard = self._segments.shards.get(key)
        if shard is None:
            _, fd, at, nbytes = place
            self._require_size(index, nbytes, like.nbytes)
            # Map this rank's memory a second time: a view of the tensor itself would count as a reference from the
            # user.
            whole = self._map(index, fd, doing)[at : at + nbytes].view(like.dtype)
            shard = self._segments.shards[key] = whole[self._bounds(like.numel())]
        return shard

    def _bounds(self, numel: int) -> slice:
        """Start and end of this rank's shard."""
        leaders, units = self.local_ranks.leaders, -(-numel // ALIGNMENT)
        first, last = (
            units * min(at, leaders) // leaders * ALIGNMENT for at in (self._local_rank, self._local_rank + 1)
        )
        return slice(min(first, numel), min(last, numel))

    def _require_same(self, tags: list[int], doing: str) -> None:
        if tags.count(tags[0]) < len(tags):
            require_tags(tags, doing, alive(self._group))

    def _require_size(self, index: int, nbytes: int, own: int) -> None:
        if nbytes != own:
            there, here = self.local_ranks.ranks[index], self.local_ranks.ranks[self._local_rank]
            raise MismatchError(
                f"rank {there} sums {nbytes} bytes of gradients, but rank {here} sums {own}: every rank must make "
                "the same calls in the same order, with the same model and bucket_cap_mb."
            )

    def _map(self, index: int, fd: int, doing: str) -> torch.Tensor:
        """Map a segment of another rank, which may have died since it launched."""
        try:
            return memfd.map_bytes(self.local_ranks.pids[index], fd)
        except (OSError, RuntimeError) as error:
            dead = self._posted.dead()
            text = f"the memory of rank {self.local_ranks.ranks[index]} cannot be opened: {error}"
            raise diagnose(alive(self._group), doing, ProcessEnded(dead) if dead else RuntimeError(text)) from error

    def _await(self, channel: SemaphoreChannel, number: int, doing: str) -> None:
        while (missing := channel.missing(number)) is not None:
            wait(missing, doing, alive(self._group))

    def _entry(self, index: int, number: int) -> tuple[Place, int]:
        slot = self._slot(index, number)
        segment, fd, at, nbytes, tag = self._descriptors[slot : slot + _ENTRY]
        return (segment, fd, at, nbytes), tag

    def _slot(self, index: int, number: int) -> int:
        return (index * _SLOTS + number % _SLOTS) * (LINE // 8)


@dataclass(eq=False)
class SharedMemoryWork:
    """The work handle of a sum over the ranks of a node; :meth:`SharedMemoryAllReduce.launch` makes it.

    Attributes:
        tensor: The tensor that is summed, in place.
        number: The number of the post that announces this sum, and of the post that finishes it.
        doing: The purpose.
        shards: This rank's shard of every rank's memory once it is summed; the first one holds the sum.
    """

    memory: SharedMemoryAllReduce
    tensor: torch.Tensor
    number: int
    doing: str
    shards: list[torch.Tensor] = field(default_factory=list)

    def wait(self, doing: str) -> None:
        """Block until the sum is complete. Raises :class:`PeerError` if a rank fails."""
        self.memory.complete(self, doing)


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
