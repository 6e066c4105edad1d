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
where it does not work, the ranks agree on gloo. As with any memory that is shared, a child forked in the middle of
training sees the gradients themselves, not a copy, and keeps their memory until it ends.
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
from ddp_callbacks.failures import ProcessEnded, diagnose, wait
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
    """The memory that all ranks of a group share. Every rank must launch the same sums in the same order.

    Args:
        group: Its ranks are all on this host.
        pids: The ranks' process ids.
        control: Descriptor of a segment that all ranks have opened, of :meth:`control_nbytes`.
    """

    def __init__(self, group: dist.ProcessGroup, pids: list[int], control: int) -> None:
        self._group = weakref.ref(group)
        self._pids = pids
        self._rank, self._size = group.rank(), len(pids)
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        self._signals = Signals(control, self._rank, self._size, timeout)
        # What each rank sums where: serial number and descriptor of the segment, and bytes; by number of the signal.
        board = memoryview(mmap.mmap(control, self.control_nbytes(self._size)))
        self._board = board[Signals.nbytes(self._size) :].cast("q")
        self._segments: dict[int, _Segment] = {}  # this rank's, by address
        self._serial = 0
        self._launched: deque[SharedReduction] = deque()
        # Kept until every rank is done: nobody may be waiting for it, but others still have to open its memory.
        self._summed: deque[SharedReduction] = deque()
        self._spare: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    @staticmethod
    def control_nbytes(size: int) -> int:
        return Signals.nbytes(size) + size * _ROWS * LINE

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        """A flat tensor on the CPU that the other ranks can open. Local. Its segment goes with it."""
        size = max(numel, 1)
        try:
            storage = _create_storage(size * dtype.itemsize)
        except (OSError, RuntimeError) as error:
            raise ConfigurationError(
                f"no shared memory of {size * dtype.itemsize} bytes for gradients: {error}. Raise that limit "
                f"(ulimit -n), or set {SWITCH}=0 to sum through gloo."
            ) from error
        tensor = torch.empty(0, dtype=dtype).set_(storage)
        self._serial += 1
        segment = _Segment(self._serial, storage._share_fd_cpu_()[0], [OrderedDict() for _ in range(self._size)])
        self._segments[_address(tensor)] = segment
        weakref.finalize(tensor, _forget, self._segments, _address(tensor), segment).atexit = False
        return tensor[:numel]

    def launch(self, tensor: torch.Tensor) -> SharedReduction:
        """Start to sum ``tensor`` (flat, contiguous) over the ranks, in place. Does not block."""
        if self._launched and self._signals.sent - self._launched[0].number >= _ROWS // 2:
            raise ConfigurationError(f"more than {_ROWS // 2} sums are under way: raise bucket_cap_mb.")
        result = as_real(tensor)
        reduction = SharedReduction(self, result, self._home_of(result), self._signals.sent + 1)
        self._announce(reduction)
        self._signals.send()
        self._launched.append(reduction)
        return reduction

    def finish(self, reduction: SharedReduction, doing: str) -> None:
        """Do this rank's part of all that is launched; return when ``reduction`` is done on every rank."""
        while self._launched:
            self._sum_own_slice(self._launched[0], doing)
            self._summed.append(self._launched.popleft())
        self._await(reduction.done, doing)
        while self._summed and self._summed[0].done <= reduction.done:
            self._summed.popleft()
        if reduction.home is not reduction.result:
            reduction.result.copy_(reduction.home)
            self._spare[reduction.home.numel(), reduction.home.dtype] = reduction.home

    def _home_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` if it lies at the start of a segment, else a copy that does."""
        if _address(tensor) in self._segments and not tensor.storage_offset():
            return tensor
        home = self._spare.pop((tensor.numel(), tensor.dtype), None)
        return (self.allocate(tensor.numel(), tensor.dtype) if home is None else home).copy_(tensor)

    def _announce(self, reduction: SharedReduction) -> None:
        segment = self._segments[_address(reduction.home)]
        row = self._row(self._rank, reduction.number)
        self._board[row], self._board[row + 1], self._board[row + 2] = segment.serial, segment.fd, reduction.home.nbytes

    def _sum_own_slice(self, reduction: SharedReduction, doing: str) -> None:
        self._await(reduction.number, doing)
        numel = reduction.home.numel()
        grains = -(-numel // _GRAIN)
        begin, end = (grains * rank // self._size * _GRAIN for rank in (self._rank, self._rank + 1))
        homes = [self._home_on(rank, reduction, doing) for rank in range(self._size)]
        if begin < min(end, numel):
            _sum_into_all([home[begin:end] for home in homes])
        reduction.done = self._signals.send()

    def _home_on(self, rank: int, reduction: SharedReduction, doing: str) -> torch.Tensor:
        """What ``rank`` contributes to this reduction."""
        own = reduction.home
        if rank == self._rank:
            return own
        row = self._row(rank, reduction.number)
        serial, fd, nbytes = self._board[row : row + 3]
        if nbytes != own.nbytes:
            raise ConfigurationError(
                f"rank {rank} sums {nbytes} bytes of gradients where rank {self._rank} sums {own.nbytes}: every rank "
                "must make the same calls in the same order, with the same model and bucket_cap_mb."
            )
        mapped = self._segments[_address(own)].mapped[rank]
        if serial not in mapped:
            mapped[serial] = self._map(rank, fd, doing)
            if len(mapped) > _MAPPINGS:
                mapped.popitem(last=False)
        mapped.move_to_end(serial)
        return mapped[serial][:nbytes].view(own.dtype)

    def _map(self, rank: int, fd: int, doing: str) -> torch.Tensor:
        """The segment of another rank, which may have died since it launched."""
        path = _path(self._pids[rank], fd)
        try:
            return torch.from_file(path, shared=True, size=os.stat(path).st_size, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            group = self._group()
            assert group is not None
            dead = self._signals.dead()
            cause = ProcessEnded(dead) if dead else RuntimeError(f"rank {rank}'s memory cannot be opened: {error}")
            raise diagnose(group, doing, cause) from error

    def _await(self, number: int, doing: str) -> None:
        group = self._group()
        assert group is not None
        while (arrival := self._signals.missing(number)) is not None:
            wait(arrival, doing, group)

    def _row(self, rank: int, number: int) -> int:
        return (rank * _ROWS + number % _ROWS) * (LINE // 8)


@dataclass(eq=False)
class SharedReduction:
    """A sum over the ranks that is under way; :meth:`SharedMemory.launch` makes it.

    Attributes:
        result: Where the sum is wanted.
        home: Where it is made, at the start of a segment; ``result`` itself if that lies there.
        number: Of the signal that ``home`` is filled.
        done: Number of the signal that this rank has summed its slice; 0 before.
    """

    memory: SharedMemory
    result: torch.Tensor
    home: torch.Tensor
    number: int
    done: int = 0

    def wait(self, doing: str) -> None:
        """Block until the sum is there. Raises :class:`PeerError` as :func:`ddp_callbacks.failures.wait` does."""
        self.memory.finish(self, doing)


@dataclass(eq=False)
class _Segment:
    """A segment of this rank: its number, its descriptor, and of each other rank what was summed with it, by number."""

    serial: int
    fd: int
    mapped: list[OrderedDict[int, torch.Tensor]]


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


def _forget(segments: dict[int, _Segment], address: int, segment: _Segment) -> None:
    if segments.get(address) is segment:  # else its storage was exchanged, and another has got the address
        del segments[address]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()  # a tensor without elements has none of its own


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
            if group.rank() > 0:
                control = os.open(_path(pids[0], controls[0]), os.O_RDWR)
            memory = SharedMemory(group, list(pids), control)
        except OSError as error:
            refusal = f"rank {group.rank()} cannot open what rank 0 shares: {error}"
    if control >= 0:
        weakref.finalize(group, os.close, control).atexit = False
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
    return "" if _host() else "this system does not say which host it is (/proc)"


def _host() -> str:
    """Equal for two processes that can name each other by their process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    return f"{boot.read_text().strip()} {os.readlink(namespace)}" if boot.exists() and namespace.is_symlink() else ""


def _create_control(size: int) -> tuple[int, str]:
    refusal = _refusal()
    try:
        return (-1, refusal) if refusal else (_create_segment(SharedMemory.control_nbytes(size)), "")
    except OSError as error:
        return -1, f"rank 0 cannot create shared memory: {error}"


def _create_segment(nbytes: int) -> int:
    fd = os.memfd_create("ddp_callbacks")
    try:
        os.ftruncate(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def _create_storage(nbytes: int) -> torch.UntypedStorage:
    """Memory that has a descriptor, as torch makes it for tensors that it sends to other processes."""
    fd = _create_segment(nbytes)
    try:
        storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_fd_cpu(fd, nbytes)  # type: ignore[attr-defined]
        return storage
    finally:
        os.close(fd)


def _path(pid: int, fd: int) -> str:
    return f"/proc/{pid}/fd/{fd}"
