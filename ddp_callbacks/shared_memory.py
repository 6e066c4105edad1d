"""Sums between the processes of one host through memory that they share: no socket, and no copy.

gloo sends every byte over TCP, between two processes of one machine too. Here the buckets themselves lie in memory
that all ranks of the host have mapped (see :mod:`ddp_callbacks.segments`). Each carrier adds up its slice of
everybody's bucket, in the order of the ranks, and writes the sum into everybody's, so all get the same bits::

    launch     signal "mine is filled"                                                    does not block
    sum        await that signal of every rank, sum the own slice
    deliver    write the sum into everybody's bucket, signal "done"                       does not block
    collect    await "done" of every rank

On one host every rank is a carrier, and the last three are done when somebody waits. Between several hosts
(:mod:`ddp_callbacks.two_level`) the slice is summed over the hosts in between.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ddp_callbacks import segments
from ddp_callbacks.collectives import all_gather_json, as_real
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.failures import ProcessEnded, diagnose, enter, require_tags, tag_of, wait
from ddp_callbacks.segments import outside_inference_mode
from ddp_callbacks.signals import LINE, Signals

SWITCH = "DDP_CALLBACKS_SHARED_MEMORY"
"""Environment variable: 0 on any rank turns shared memory off, on all."""

_MAPPINGS = 4  # of each rank, per segment: a bucket has several memories where gradients are kept between steps
_ROWS = 8192  # of the board: how many reductions can be under way
GRAIN = 64
"""Elements. Slices begin at a multiple, so that no two ranks write to the same cache line."""


@dataclass(frozen=True)
class Neighbours:
    """The ranks of one host.

    Attributes:
        ranks: Their numbers in the group.
        pids: Their process ids.
        here: Which of them this one is.
        carriers: How many of them, the first ones, sum a slice each.
    """

    ranks: list[int]
    pids: list[int]
    here: int
    carriers: int


class SharedMemory:
    """The memory that the ranks of a host share. Every rank must launch the same sums in the same order.

    Args:
        group: To which the ranks belong.
        neighbours: Those on this host.
        control: Descriptor of a segment that all of them have opened, of :meth:`control_nbytes`.
    """

    exact = True
    unattended = False  # each rank sums its slice when it waits

    def __init__(self, group: dist.ProcessGroup, neighbours: Neighbours, control: int) -> None:
        self._group = weakref.ref(group)
        self.neighbours = neighbours
        self._here, self._size = neighbours.here, len(neighbours.ranks)
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        nbytes = Signals.nbytes(self._size)
        ranks = neighbours.ranks
        self._filled, self._done = (Signals(control, at, ranks, self._here, timeout) for at in (0, nbytes))
        # What each rank sums where, by number of the signal: serial number and descriptor of the segment, where in it,
        # how many bytes, and what for.
        board = memoryview(mmap.mmap(control, self.control_nbytes(self._size)))
        self._board = board[2 * nbytes :].cast("q")
        self._segments: dict[int, _Segment] = {}  # this rank's, by address
        self._serial = 0
        self._collected = 0  # number of the last reduction that is done on all
        self._launched: deque[SharedReduction] = deque()
        self._under_way = False  # a sum is half done
        # Kept until every rank is done: nobody may be waiting for it, but others still have to open its memory.
        self._delivered: deque[SharedReduction] = deque()
        self._spare: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._lock = threading.RLock()  # a communication hook's future is completed by another thread

    @staticmethod
    def control_nbytes(size: int) -> int:
        return 2 * Signals.nbytes(size) + size * _ROWS * LINE

    @outside_inference_mode
    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        """A flat tensor on the CPU that the other ranks can open. Local. Its segment goes with it."""
        size = max(numel, 1)
        try:
            storage = segments.create_storage(size * dtype.itemsize)
        except (OSError, RuntimeError) as error:
            raise ConfigurationError(
                f"no shared memory of {size * dtype.itemsize} bytes for gradients: {error}. Raise that limit "
                f"(ulimit -n), or set {SWITCH}=0 to sum through gloo."
            ) from error
        tensor = torch.empty(0, dtype=dtype).set_(storage)
        self._serial += 1
        segment = _Segment(self._serial, segments.descriptor_of(storage), [OrderedDict() for _ in range(self._size)])
        self._segments[_address(tensor)] = segment
        weakref.finalize(tensor, _forget, self._segments, _address(tensor), segment).atexit = False
        return tensor[:numel]

    def launch(self, tensor: torch.Tensor, doing: str = "") -> SharedReduction:
        """Start to sum ``tensor`` (flat, contiguous) over the ranks of this host, in place. Does not block."""
        if doing:
            enter(doing)
        reduction = self.fill(tensor, doing=doing)
        self._launched.append(reduction)
        return reduction

    def finish(self, reduction: SharedReduction, doing: str) -> None:
        """Do this rank's part of all that is launched; return when ``reduction`` is done on every rank."""
        with self._lock:
            self._require_whole()
            while self._launched:
                first = self._launched[0]
                self._find_slices(first, doing)  # if this raises, the sum can be made later
                self._under_way = True
                _sum_into_first(first.slices)
                self.deliver(first)
                self._launched.popleft()
                self._under_way = False
            self.collect(reduction, doing)

    def _require_whole(self) -> None:
        if self._under_way:
            raise RuntimeError(
                "a sum of gradients was interrupted (Ctrl-C) when it was half done, and the other processes have parts "
                "of it already. Start the processes again."
            )

    # --- the steps of a sum -------------------------------------------------------------------------------------------

    def fill(self, tensor: torch.Tensor, carriers: int | None = None, doing: str = "") -> SharedReduction:
        """Tell the others that they can read ``tensor``. Does not block."""
        if self._filled.sent - self._collected >= _ROWS:
            raise ConfigurationError(f"more than {_ROWS} sums are under way: raise bucket_cap_mb.")
        result = as_real(tensor)
        home, segment = self._home_of(result)
        number = self._filled.sent + 1
        row, at = self._row(self._here, number), int(home.storage_offset()) * home.itemsize
        for column, entry in enumerate((segment.serial, segment.fd, at, home.nbytes, tag_of(doing))):
            self._board[row + column] = entry
        self._filled.send()
        return SharedReduction(self, result, home, segment, number, carriers or self.neighbours.carriers, doing)

    def sum(self, reduction: SharedReduction, doing: str) -> torch.Tensor:
        """Sum this rank's slice, and return it. Blocks until every rank of the host has filled."""
        self._find_slices(reduction, doing)
        _sum_into_first(reduction.slices)
        return reduction.slices[0]

    def _find_slices(self, reduction: SharedReduction, doing: str) -> None:
        """Block until every rank of the host has filled."""
        self._await(self._filled, reduction.number, doing)
        rows = [self._row(index, reduction.number) for index in range(self._size)]
        self._require_same(rows, reduction.doing)
        # The usual step sums the same memory as the one before.
        places = tuple(self._board[row + column] for row in rows for column in (0, 2, 3))
        key = (reduction.home.dtype, reduction.carriers, places)
        known = reduction.segment.slices
        at = int(reduction.home.storage_offset())
        if at not in known or known[at][0] != key:
            known[at] = key, self._cut(reduction, rows, doing)
        _, reduction.slices = known[at]

    def deliver(self, reduction: SharedReduction) -> None:
        """Write this rank's slice into everybody's memory. Does not block."""
        first, *others = reduction.slices
        for other in others:
            other.copy_(first)
        self._delivered.append(reduction)
        self._done.send()

    def collect(self, reduction: SharedReduction, doing: str) -> None:
        """Block until every rank of the host has delivered its slice."""
        with self._lock:
            self._await(self._done, reduction.number, doing)
            self._collected = max(self._collected, reduction.number)
            while self._delivered and self._delivered[0].number <= reduction.number:
                self._delivered.popleft()
        if reduction.home is not reduction.result:
            reduction.result.copy_(reduction.home)
            self._spare[reduction.home.numel(), reduction.home.dtype] = reduction.home
            reduction.home = reduction.result  # whoever waits once more has it; the next sum may have its home

    def _home_of(self, tensor: torch.Tensor) -> tuple[torch.Tensor, _Segment]:
        """``tensor`` if it lies in a segment, else a copy that does."""
        segment = self._segments.get(_address(tensor))
        if segment is not None:
            return tensor, segment
        home = self._spare.pop((tensor.numel(), tensor.dtype), None)
        home = self.allocate(tensor.numel(), tensor.dtype) if home is None else home
        return home.copy_(tensor), self._segments[_address(home)]

    @outside_inference_mode
    def _cut(self, reduction: SharedReduction, rows: list[int], doing: str) -> list[torch.Tensor]:
        """This rank's slice of everybody's memory."""
        begin, end = self._bounds(reduction)
        slices = []
        for index, row in enumerate(rows):
            serial, fd, at, nbytes = self._board[row : row + 4]
            self._require_size(index, nbytes, reduction.home.nbytes)
            # The own memory is mapped once more, too: a view of the tensor itself would look like a user who keeps it.
            home = self._open(index, serial, fd, reduction.segment, doing)[at : at + nbytes]
            slices.append(home.view(reduction.home.dtype)[begin:end])
        return slices

    def _bounds(self, reduction: SharedReduction) -> tuple[int, int]:
        """Where this rank's slice begins and ends."""
        numel, carriers = reduction.home.numel(), reduction.carriers
        grains = -(-numel // GRAIN)
        first, last = (grains * min(at, carriers) // carriers * GRAIN for at in (self._here, self._here + 1))
        return min(first, numel), min(last, numel)

    def _require_same(self, rows: list[int], doing: str) -> None:
        tags = [self._board[row + 4] for row in rows]
        if tags.count(tags[0]) < len(tags):
            group = self._group()
            assert group is not None
            require_tags(tags, doing, group, self.neighbours.ranks)

    def _require_size(self, index: int, nbytes: int, own: int) -> None:
        if nbytes != own:
            there, here = self.neighbours.ranks[index], self.neighbours.ranks[self._here]
            raise ConfigurationError(
                f"rank {there} sums {nbytes} bytes of gradients where rank {here} sums {own}: every rank must make "
                "the same calls in the same order, with the same model and bucket_cap_mb."
            )

    def _open(self, index: int, serial: int, fd: int, segment: _Segment, doing: str) -> torch.Tensor:
        """The memory of the rank at ``index``, as bytes."""
        mapped = segment.mapped[index]
        if serial not in mapped:
            mapped[serial] = self._map(index, fd, doing)
            if len(mapped) > _MAPPINGS:
                mapped.popitem(last=False)
        mapped.move_to_end(serial)
        return mapped[serial]

    def _map(self, index: int, fd: int, doing: str) -> torch.Tensor:
        """The segment of another rank, which may have died since it launched."""
        try:
            return segments.map_bytes(self.neighbours.pids[index], fd)
        except (OSError, RuntimeError) as error:
            group, dead = self._group(), self._filled.dead()
            assert group is not None
            text = f"the memory of rank {self.neighbours.ranks[index]} cannot be opened: {error}"
            raise diagnose(group, doing, ProcessEnded(dead) if dead else RuntimeError(text)) from error

    def _await(self, signals: Signals, number: int, doing: str) -> None:
        group = self._group()
        assert group is not None
        while (arrival := signals.missing(number)) is not None:
            wait(arrival, doing, group)

    def _row(self, index: int, number: int) -> int:
        return (index * _ROWS + number % _ROWS) * (LINE // 8)


@dataclass(eq=False)
class SharedReduction:
    """A sum over the ranks of a host that is under way; :meth:`SharedMemory.launch` makes it.

    Attributes:
        result: Where the sum is wanted.
        home: Where it is made, in ``segment``; ``result`` itself if that lies there.
        number: Of the signal that ``home`` is filled, and of the one that this rank's slice is delivered.
        carriers: How many ranks sum a slice each.
        doing: What it is for.
        slices: This rank's slice of everybody's memory once it is summed; the sum is in the first.
    """

    memory: SharedMemory
    result: torch.Tensor
    home: torch.Tensor
    segment: _Segment
    number: int
    carriers: int
    doing: str = ""
    slices: list[torch.Tensor] = field(default_factory=list)

    def wait(self, doing: str) -> None:
        """Block until the sum is there. Raises :class:`PeerError` as :func:`ddp_callbacks.failures.wait` does."""
        self.memory.finish(self, doing)


@dataclass(eq=False)
class _Segment:
    """A segment of this rank.

    Attributes:
        serial, fd: Its number and descriptor, as the others know it.
        mapped: Of each rank, what was summed with it, by number.
        slices: By where in the segment: what was summed there the last time, after a key that says what that was.
    """

    serial: int
    fd: int
    mapped: list[OrderedDict[int, torch.Tensor]]
    slices: dict[int, tuple[Hashable, list[torch.Tensor]]] = field(default_factory=dict)


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


def _forget(segments: dict[int, _Segment], address: int, segment: _Segment) -> None:
    if segments.get(address) is segment:  # else its storage was exchanged, and another has got the address
        del segments[address]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()  # a tensor without elements has none of its own


def refusal() -> str:
    """Why this process cannot or should not share memory; empty if it can."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0 is set"
    if not segments.can_create():
        return "this system has no memfd_create"
    return "" if segments.host_identity() else "this system does not say which host it is (/proc)"


def open_shared_memory(
    group: dist.ProcessGroup, hosts: list[list[int]], pids: list[int]
) -> tuple[SharedMemory | None, str]:
    """The memory of this rank's host; or nothing, and why some rank of the group cannot open its own. A collective.

    Args:
        hosts: The ranks of the group, host by host.
        pids: Their process ids.
    """
    doing = "the shared memory of the host"
    neighbours = next(ranks for ranks in hosts if group.rank() in ranks)
    here = neighbours.index(group.rank())
    control, problem = _create_control(len(neighbours)) if here == 0 else (-1, "")
    created, problems = zip(*all_gather_json([control, problem], doing, group), strict=True)
    if problem := next(filter(None, problems), ""):
        _close(control)
        return None, problem
    memory: SharedMemory | None = None
    try:
        if here > 0:
            control = segments.open_control(pids[neighbours[0]], created[neighbours[0]])
        carriers = min(map(len, hosts))
        memory = SharedMemory(
            group, Neighbours(neighbours, [pids[rank] for rank in neighbours], here, carriers), control
        )
        weakref.finalize(group, _close, control).atexit = False
    except OSError as error:
        problem = f"rank {group.rank()} cannot open what rank {neighbours[0]} shares: {error}"
        _close(control)
    # Nobody signals before every rank has made its semaphores.
    problem = next(filter(None, all_gather_json(problem, doing, group)), "")
    return (None, problem) if problem else (memory, "")


def _create_control(size: int) -> tuple[int, str]:
    try:
        return segments.create(SharedMemory.control_nbytes(size)), ""
    except OSError as error:
        return -1, f"shared memory cannot be created: {error}"


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
