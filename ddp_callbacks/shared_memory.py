"""Sums between the processes of one host through memory that they share: no socket, and no copy.

gloo sends every byte over TCP, between two processes of one machine too. Here the buckets themselves lie in memory
that all ranks of the host have mapped. Rank r adds up slice r of everybody's bucket, in the order of the ranks, and
writes the sum into everybody's, so all get the same bits::

    launch    signal "mine is filled"                                          does not block
    wait      for all that is launched: await that signal of every rank, sum the own slice, signal "done";
              then await "done" of every rank

[Note: memory without a name]
A segment is a memfd. It has no name, so nothing is left in /dev/shm however the processes end, and a container's small
/dev/shm is no limit. The other ranks open it as /proc/PID/fd/FD, which works within one PID namespace for one user;
where it does not work, the ranks agree on gloo.
"""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_callbacks.collectives import all_gather_json, as_real
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.failures import wait
from ddp_callbacks.process_group import get_world_size
from ddp_callbacks.signals import LINE, Signals

SWITCH = "DDP_CALLBACKS_SHARED_MEMORY"
"""Environment variable: 0 on any rank turns shared memory off, on all."""

_MAPPINGS = 4  # of each other rank, per segment: a bucket has several memories where gradients are kept between steps
_ROWS = 4096  # of the board; a reduction takes two numbers, so half as many can be under way
_GRAIN = 64  # elements; slices begin at a multiple, so that no two ranks write to the same cache line

_log = logging.getLogger(__name__)
_opened: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedMemory | None] = weakref.WeakKeyDictionary()


def shared_memory_of(group: dist.ProcessGroup) -> SharedMemory | None:
    """The shared memory of ``group``, opened at the first call; ``None`` where its ranks cannot share any.

    A collective, the first time: every rank must call it, and either all get memory or none does.
    """
    if group not in _opened:
        _opened[group] = _open(group)
    return _opened[group]


class SharedMemory:
    """The memory that all ranks of a group share. Every rank must launch the same reductions in the same order.

    Attributes:
        signals: Between the ranks; they have a number each, and so has what they announce.
    """

    def __init__(self, group: dist.ProcessGroup, pids: list[int], control: int) -> None:
        self._group = weakref.ref(group)
        self._pids = pids
        self._rank, self._size = group.rank(), len(pids)
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        self.signals = Signals(control, self._rank, self._size, timeout)
        self._board = memoryview(mmap.mmap(control, _control_nbytes(self._size)))[Signals.nbytes(self._size) :].cast("q")
        self._segments: dict[int, _Segment] = {}  # by address
        self._launched: deque[SharedReduction] = deque()
        # Kept until every rank is done: nobody may be waiting for it, but others still have to open its memory.
        self._summed: deque[SharedReduction] = deque()
        self._serial = 0

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        """A flat tensor (on the CPU) that the other ranks can open. Local. Its segment goes with it."""
        size = max(numel, 1)
        fd = _create_segment(size * dtype.itemsize)
        tensor = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=size, dtype=dtype)
        self._serial += 1
        address = _address(tensor)
        self._segments[address] = _Segment(self._serial, fd, [OrderedDict() for _ in range(self._size)])
        weakref.finalize(tensor, self._forget, address, fd).atexit = False
        return tensor[:numel]

    def launch(self, tensor: torch.Tensor) -> SharedReduction:
        """Start to sum ``tensor`` (flat, contiguous, real) over the ranks, in place. Does not block."""
        if self._launched and self.signals.sent - self._launched[0].number >= _ROWS // 2:
            raise ConfigurationError(f"more than {_ROWS // 2} reductions are under way: raise bucket_cap_mb.")
        reduction = SharedReduction(self, tensor, self.signals.sent + 1)
        self._announce(reduction)
        self.signals.send()
        self._launched.append(reduction)
        return reduction

    def finish(self, reduction: SharedReduction, doing: str) -> None:
        """Do this rank's part of everything that is launched; return when ``reduction`` is done on every rank."""
        while self._launched:
            self._sum_own_slice(self._launched[0], doing)
            self._summed.append(self._launched.popleft())
        self._await(reduction.done, doing)
        while self._summed and self._summed[0].done <= reduction.done:
            self._summed.popleft()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies at the start of a segment of this rank."""
        return _address(tensor) in self._segments and not tensor.storage_offset()

    def _announce(self, reduction: SharedReduction) -> None:
        segment = self._segments[_address(reduction.tensor)]
        row = self._row(self._rank, reduction.number)
        self._board[row], self._board[row + 1], self._board[row + 2] = segment.serial, segment.fd, reduction.nbytes

    def _sum_own_slice(self, reduction: SharedReduction, doing: str) -> None:
        self._await(reduction.number, doing)
        grains = -(-reduction.tensor.numel() // _GRAIN)
        begin, end = (grains * rank // self._size * _GRAIN for rank in (self._rank, self._rank + 1))
        if begin < reduction.tensor.numel():
            _sum_into_all([self._tensor_of(rank, reduction)[begin:end] for rank in range(self._size)])
        reduction.done = self.signals.send()

    def _tensor_of(self, rank: int, reduction: SharedReduction) -> torch.Tensor:
        """What ``rank`` sums in this reduction."""
        own = reduction.tensor
        if rank == self._rank:
            return own
        row = self._row(rank, reduction.number)
        serial, fd, nbytes = self._board[row : row + 3]
        if nbytes != reduction.nbytes:
            raise RuntimeError(
                f"rank {rank} sums {nbytes} bytes where rank {self._rank} sums {reduction.nbytes}: every rank must "
                f"make the same calls in the same order."
            )
        mapped = self._segments[_address(own)].mapped[rank]
        if serial not in mapped:
            mapped[serial] = _map_segment(_path(self._pids[rank], fd))
            if len(mapped) > _MAPPINGS:
                mapped.popitem(last=False)
        mapped.move_to_end(serial)
        return mapped[serial][:nbytes].view(own.dtype)

    def _await(self, number: int, doing: str) -> None:
        group = self._group()
        assert group is not None
        while (arrival := self.signals.missing(number)) is not None:
            wait(arrival, doing, group)

    def _row(self, rank: int, number: int) -> int:
        return (rank * _ROWS + number % _ROWS) * (LINE // 8)

    def _forget(self, address: int, fd: int) -> None:
        segment = self._segments.get(address)
        if segment is not None and segment.fd == fd:
            del self._segments[address]
        os.close(fd)


class SharedReduction:
    """A sum over the ranks that is under way; :class:`SharedMemory` makes it."""

    def __init__(self, memory: SharedMemory, tensor: torch.Tensor, number: int) -> None:
        self._memory = memory
        self._result = as_real(tensor)
        self.tensor = self._result if memory.holds(tensor) else memory.allocate(self._result.numel(), self._result.dtype)
        if self.tensor is not self._result:
            self.tensor.copy_(self._result)
        self.nbytes = self.tensor.nbytes
        self.number = number  # of the signal that it is filled
        self.done = 0  # number of the signal that this rank's slice is summed

    def wait(self, doing: str) -> None:
        """Block until the sum is there. Raises :class:`PeerError` as :func:`ddp_callbacks.failures.wait` does."""
        self._memory.finish(self, doing)
        if self.tensor is not self._result:
            self._result.copy_(self.tensor)


@dataclass
class _Segment:
    """What is known of a segment of this rank: its number, its descriptor, what of the others was summed with it."""

    serial: int
    fd: int
    mapped: list[OrderedDict[int, torch.Tensor]]  # by rank, then by serial; bytes


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()  # a tensor without elements has none of its own


def _sum_into_all(parts: list[torch.Tensor]) -> None:
    """Write the sum of ``parts`` into each of them. Half precision is summed in float32."""
    first, *others = parts
    if first.dtype in (torch.float16, torch.bfloat16):
        total = first.float()
        for other in others:
            total += other
        first.copy_(total)
    else:
        for other in others:
            first += other
    for other in others:
        other.copy_(first)


# --- opening ----------------------------------------------------------------------------------------------------------


def _open(group: dist.ProcessGroup) -> SharedMemory | None:
    doing = "the shared memory of the host"
    control, refusal = _create_control(group.size()) if group.rank() == 0 else (-1, _refusal())
    known = all_gather_json([_host(), os.getpid(), control, refusal], doing, group)
    hosts, pids, controls, refusals = zip(*known, strict=True)
    refusal = next(filter(None, refusals), "" if len(set(hosts)) == 1 else "the ranks are on several hosts")
    memory = None
    if not refusal:
        try:
            fd = control if group.rank() == 0 else os.open(_path(pids[0], controls[0]), os.O_RDWR)
            memory = SharedMemory(group, list(pids), fd)
        except OSError as error:
            refusal = f"rank {group.rank()} cannot open what rank 0 shares: {error}"
    # Nobody signals before every rank has made its semaphores.
    refusal = next(filter(None, all_gather_json(refusal, doing, group)), "")
    if group.rank() == 0:
        _log.info("gradients on the CPU are summed by %s", f"gloo: {refusal}" if refusal else "shared memory")
    return None if refusal else memory


def _refusal() -> str:
    """Why this process cannot or should not share memory; empty if it can."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 is set"
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create"
    return ""


def _host() -> str:
    """Equal for two processes that can name each other by their process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    return f"{boot.read_text().strip()} {os.readlink(namespace)}" if boot.exists() and namespace.is_symlink() else ""


def _create_control(size: int) -> tuple[int, str]:
    refusal = _refusal()
    try:
        return (-1, refusal) if refusal else (_create_segment(_control_nbytes(size)), "")
    except OSError as error:
        return -1, f"rank 0 cannot create shared memory: {error}"


def _control_nbytes(size: int) -> int:
    return Signals.nbytes(size) + size * _ROWS * LINE


def _create_segment(nbytes: int) -> int:
    fd = os.memfd_create("ddp_callbacks")
    try:
        os.posix_fallocate(fd, 0, nbytes)  # too little memory is an error here, not a killed process later
    except OSError:
        os.close(fd)
        raise
    return fd


def _map_segment(path: str) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=os.stat(path).st_size, dtype=torch.uint8)


def _path(pid: int, fd: int) -> str:
    return f"/proc/{pid}/fd/{fd}"
