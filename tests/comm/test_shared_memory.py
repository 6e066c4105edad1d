"""Sums through the memory of a host are those of one process, and what happens where it cannot be had."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from kit.ranks import Nursery, noting_errors
from shared_worlds import TWO, WIDE, World
from torch import Tensor

from ddp_callbacks import GradientSynchronizer, join_process_group
from ddp_callbacks.cluster import environment
from ddp_callbacks.comm import mailbox, topology
from ddp_callbacks.comm.collectives import broadcast_object
from ddp_callbacks.comm.group_sums import ProcessGroupAllReduce
from ddp_callbacks.comm.segments import SWITCH
from ddp_callbacks.comm.shared_memory import SharedMemoryAllReduce
from ddp_callbacks.comm.topology import choose_all_reduce
from ddp_callbacks.process_group import resolve_group
from ddp_callbacks.process_group.presence import presence

pytestmark = pytest.mark.shares_results()
WORLD = World(__name__)
SIZES = [0, 1, 63, 64, 65, 129, 1000, 100_003]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.int64]
CPU = [torch.device("cpu")]


def opened(group: dist.ProcessGroup | None = None) -> SharedMemoryAllReduce:
    """Of a group of its own, all of whose ranks are on this host."""
    memory = choose_all_reduce(group or dist.new_group(), CPU)
    assert isinstance(memory, SharedMemoryAllReduce)
    return memory


def filled(memory: SharedMemoryAllReduce, numel: int, value: float = 1.0) -> Tensor:
    return memory.allocate(numel, torch.float32).fill_(value)


def descriptors() -> int:
    gc.collect()  # those of other tests
    return len(os.listdir("/proc/self/fd"))


# --- where it cannot be shared: first, as each way is said once in a process ------------------------------------------


def switch_off(patch: pytest.MonkeyPatch, rank: int) -> None:
    if rank == 1:
        patch.setenv(SWITCH, "0")


def live_on_two_hosts(patch: pytest.MonkeyPatch, rank: int) -> None:
    patch.setattr(environment, "host_identity", lambda: f"host of rank {rank}")


def open_nothing(patch: pytest.MonkeyPatch, rank: int) -> None:
    if rank == 1:
        patch.setattr(mailbox, "path_of", lambda pid, fd: f"/proc/{pid}/fd/nothing")


def have_no_memfd(patch: pytest.MonkeyPatch, rank: int) -> None:
    if rank == 0:
        patch.delattr(os, "memfd_create")


def need_larger_pipes(patch: pytest.MonkeyPatch, rank: int) -> None:
    if rank == 1:
        patch.setattr(mailbox, "_USUAL", 1 << 30)  # than the system gives, as where the user has many pipes already


WAYS: dict[str, tuple[Callable[[pytest.MonkeyPatch, int], None], str]] = {
    "shared": (lambda patch, rank: None, "shared memory"),
    "switch": (switch_off, f"gloo: rank 1 shares no memory: {SWITCH}=0 is set"),
    "hosts": (live_on_two_hosts, "gloo: every rank is on a different host"),
    "open": (open_nothing, "gloo: rank 1 shares no memory: [Errno 2] No such file or directory"),
    "pipes": (
        need_larger_pipes,
        "gloo: rank 1 shares no memory: the processes of this user have as many pipes as /proc",
    ),
    "memfd": (have_no_memfd, "gloo: rank 0 shares no memory: this system has no memfd_create"),
}


@WORLD.each(WAYS)
def test_the_ranks_agree_how_they_sum_and_rank_0_says_it(name: str) -> None:
    """Rank 0 prints how gradients travel, and why."""
    texts: list[str] = []
    handler, logger, rank = logging.Handler(), logging.getLogger("ddp_callbacks"), dist.get_rank()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    model = torch.nn.Linear(3, 2).double()
    with pytest.MonkeyPatch.context() as patch:
        WAYS[name][0](patch, rank)
        patch.setattr(logger, "level", logging.INFO)
        logger.addHandler(handler)
        synchronizer = GradientSynchronizer(model, process_group=dist.new_group())
        model(torch.full((1, 3), float(rank)).double()).sum().backward()
        synchronizer.close()
        logger.removeHandler(handler)
    assert model.weight.grad is not None and model.weight.grad.tolist() == [[0.5] * 3] * 2
    said = [text.startswith(f"summing CPU tensors using {WAYS[name][1]}") for text in texts]
    assert said == [True] * (rank == 0), texts


@WORLD
def test_memory_that_cannot_be_used_after_all_leaves_no_descriptor() -> None:
    """Without pipes between processes gloo sums, and no descriptor stays open."""

    def raises(*_: object) -> None:
        raise OSError(24, "Too many open files")

    dist.barrier(group := dist.new_group())  # its connections are open
    before = descriptors()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology, "Mailbox", raises)
        assert isinstance(choose_all_reduce(group, CPU), ProcessGroupAllReduce)
    assert descriptors() == before


# --- sums -------------------------------------------------------------------------------------------------------------


def summand(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(17 * size + rank)
    values = torch.randn(size, 2, generator=generator, dtype=torch.float64)
    return torch.view_as_complex(values).to(dtype) if dtype.is_complex else (100 * values[:, 0]).to(dtype)


def sum_by_rank(world_size: int, size: int, dtype: torch.dtype) -> Tensor:
    """The sum in the order of the ranks; half precision in float32."""
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = summand(0, size, dtype).to(wide)
    for rank in range(1, world_size):
        total = total + summand(rank, size, dtype).to(wide)
    return total.to(dtype)


@WORLD.on(TWO, WIDE)
def test_every_rank_gets_the_sum_in_the_order_of_the_ranks_bit_for_bit() -> None:
    """Shared memory sums by rank, half precision in float32."""
    memory, rank, size = opened(), dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        tensors = [memory.allocate(count, dtype).copy_(summand(rank, count, dtype)) for count in SIZES]
        pending = [memory.launch(tensor, "the test") for tensor in tensors]
        for sum_ in pending:
            sum_.wait()
        for count, actual in zip(SIZES, tensors, strict=True):
            assert actual.dtype == dtype and torch.equal(actual, sum_by_rank(size, count, dtype)), (dtype, count)


@WORLD.on(TWO, WIDE)
def test_sums_that_are_abandoned_on_every_rank_disturb_no_later_one() -> None:
    """Abandoned sums disturb no later one."""
    # Two memories in turns, as where gradients are kept, and a sum in between that nobody waits for.
    memory, rank = opened(), dist.get_rank()
    tensors = [memory.allocate(500, torch.float64) for _ in range(2)]
    for step in range(20):
        if step % 5 == 3:
            memory.launch(memory.allocate(77, torch.float64).fill_(1e9), "the test")
        mine = tensors[(step + rank) % 2].fill_(10**rank * step)
        memory.launch(mine, "the test").wait()
        assert (mine == sum(10.0**other * step for other in range(dist.get_world_size()))).all()


@WORLD
def test_a_sum_that_is_waited_for_twice_keeps_its_value() -> None:
    """A sum that is waited for twice keeps its value."""
    memory = opened()
    first, second = (filled(memory, 100, value) for value in (1.0, 5.0))
    (one := memory.launch(first, "the test")).wait()
    memory.launch(second, "the test").wait()
    one.wait()
    assert [set(tensor.tolist()) for tensor in (first, second)] == [{2.0}, {10.0}]


# --- memory and descriptors -------------------------------------------------------------------------------------------


def shared_bytes() -> int:
    """Shared memory that this process has mapped."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssShmem")]
    return int(line.split()[1]) * 1024


@WORLD
def test_memory_that_is_dropped_takes_its_descriptors_and_mappings_with_it() -> None:
    """Tensors and groups release their shared memory."""
    memory = opened()
    for count in (3, 40):
        before = descriptors(), shared_bytes()
        for _ in range(count):
            memory.launch(memory.allocate(1 << 18, torch.float32).zero_(), "the test").wait()
    assert descriptors() <= before[0]
    dist.barrier()
    assert shared_bytes() - before[1] < 4 << 20  # 40 segments of 1 MiB were used, on each of two ranks


def mapped() -> int:
    """Segments of shared memory, this process's and others'."""
    return Path("/proc/self/maps").read_text().count("memfd:")


@WORLD
def test_every_step_sums_in_the_same_memory() -> None:
    """Gradients, kept for a step or not, stay in the same memory."""
    for set_to_none in (True, False):
        assert len(set(places_of_steps(set_to_none)[1:])) == 1


def places_of_steps(set_to_none: bool, keepers: tuple[int, ...] = ()) -> list[tuple[int, int, int]]:
    """Of six steps, where the gradient is, and what is open. These ranks keep each gradient until the next is there."""
    model = torch.nn.Linear(300, 300)
    synchronizer = GradientSynchronizer(model, process_group=dist.new_group())
    seen, kept = [], None
    for _ in range(6):
        model.zero_grad(set_to_none=set_to_none)
        model(torch.ones(1, 300)).sum().backward()
        assert model.weight.grad is not None
        seen.append((model.weight.grad.data_ptr(), descriptors(), mapped()))
        kept = model.weight.grad if dist.get_rank() in keepers else None
    synchronizer.close()
    del kept
    return seen


@WORLD
def test_gradients_that_are_kept_for_one_step_take_no_new_memory_in_each() -> None:
    for keepers in ((0, 1), (1,)):
        seen = places_of_steps(True, keepers)
        assert seen[2:4] == seen[4:], "each step maps memory"


@WORLD
def test_a_gradient_can_be_sent_to_another_process() -> None:
    """You can send a gradient to another process."""
    model = torch.nn.Linear(3, 2)
    synchronizer = GradientSynchronizer(model)
    model(torch.ones(1, 3)).sum().backward()
    queue = torch.multiprocessing.SimpleQueue()
    queue.put(model.weight.grad)
    received = queue.get()
    queue.close()
    assert received.sum() == 6
    model(torch.ones(1, 3)).sum().backward()  # adds to what was sent
    synchronizer.close()
    assert model.weight.grad is not None and model.weight.grad.sum() == 12


# --- errors -----------------------------------------------------------------------------------------------------------


@WORLD
def test_a_sum_that_is_interrupted_half_done_is_an_error_not_a_wrong_sum() -> None:
    """A sum that Ctrl-C interrupts raises an error."""
    # Ctrl-C on rank 0, as if it came when the slice was summed.
    memory = opened()
    reduction = memory.launch(filled(memory, 100), "the test")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(SharedMemoryAllReduce, "all_gather", interrupted)
            reduction.wait()
        with pytest.raises(RuntimeError, match=r"interrupted halfway \(Ctrl-C\).* Restart all processes"):
            reduction.wait()


@WORLD
def test_ranks_that_sum_different_sizes_are_named_with_both() -> None:
    """Failed allocations and unequal sizes raise errors."""
    memory, own, nbytes = opened(), dist.get_rank(), (12, 16)
    other = 1 - own
    says = f"rank {other} sums {nbytes[other]} bytes of gradients, but rank {own} sums {nbytes[own]}"
    with pytest.raises(ValueError, match=says):
        memory.launch(filled(memory, nbytes[own] // 4), "the test").wait()


@WORLD
def test_more_sums_under_way_than_there_is_room_for_are_an_error_with_the_remedy() -> None:
    """Too many sums under way raise an error with the remedy."""
    memory = opened()
    tensor = memory.allocate(1, torch.float32)
    launched = 0
    with pytest.raises(ValueError, match=r"^too many sums are in flight: raise bucket_cap_mb"):
        while launched < 1 << 20:
            memory.launch(tensor, "the test")
            launched += 1
    assert launched > 1000


@WORLD
def test_memory_that_cannot_be_had_is_an_error_with_the_remedy() -> None:
    memory, limit = opened(), resource.getrlimit(resource.RLIMIT_NOFILE)
    for spare, cause in enumerate(("Too many open files", "could not duplicate a shared memory file descriptor")):
        before = descriptors()
        probe = os.dup(0)  # the lowest free number
        os.close(probe)
        resource.setrlimit(resource.RLIMIT_NOFILE, (probe + spare, limit[1]))
        with pytest.raises(ValueError) as caught:
            memory.allocate(10, torch.float32)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        said = str(caught.value)
        assert said.startswith("no shared memory of 40 bytes for gradients: ")
        assert cause in said and "ulimit -n" in said and f"{SWITCH}=0" in said
        assert descriptors() == before


@WORLD
def test_a_rank_without_a_descriptor_for_a_long_message_says_so_and_the_others_have_it() -> None:
    broadcast_object("the connections", "a text")
    limit, rank = resource.getrlimit(resource.RLIMIT_NOFILE), dist.get_rank()
    probe = os.dup(0)  # the lowest free number
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe if rank == 1 else limit[0], limit[1]))
    with pytest.raises(OSError, match="Too many open files") if rank == 1 else nullcontext():
        assert broadcast_object("y" * 100_000, "a long text") == "y" * 100_000
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert broadcast_object("z" * 100_000, "another one") == "z" * 100_000


@WORLD
def test_a_group_that_is_destroyed_takes_its_shared_memory_with_it() -> None:
    seen = []  # behind the other tests: its connections may take a moment to close
    for _ in range(4):
        group = dist.new_group()
        memory = opened(group)
        memory.launch(filled(memory, 10), "the test").wait()
        dist.barrier()
        dist.destroy_process_group(group)
        del memory, group
        seen.append((descriptors(), mapped()))
    assert seen[0] == seen[-1]


# --- ranks that die ---------------------------------------------------------------------------------------------------


ENDS = {"raises": "failed with ValueError: boom", "is killed": "died"}


def end(how: str) -> None:
    if how == "raises":
        raise ValueError("boom")
    os.kill(os.getpid(), signal.SIGKILL)


def end_first(how: str) -> None:
    """Rank 1 ends while the other has not opened its memory."""
    env = join_process_group()
    memory = opened(resolve_group())
    if env.rank == 1:
        memory.launch(filled(memory, 10), "a sum")
        end(how)
    while not Path("ended").exists():
        time.sleep(0.01)  # bounded by the deadline of the ranks
    with noting_errors():
        memory.launch(filled(memory, 10), "a sum").wait()
        memory.launch(filled(memory, 10), "the last sum").wait()


@pytest.mark.parametrize("how", ENDS)
def test_a_rank_that_ends_is_named_by_its_number_in_the_world(nursery: Nursery, tmp_path: Path, how: str) -> None:
    """Killed ranks leave nothing in `/dev/shm`."""

    def touch(rank: int, pids: list[int]) -> None:
        (tmp_path / "ended").touch()

    first, last = nursery.run_watched(end_first, 2, tmp_path, how, on_end=touch)
    kind, message = first.notes["error"]
    assert kind == "PeerError"
    assert f"rank 1 (host {os.uname().nodename}, pid {last.pid}) {ENDS[how]}" in message
    assert first.ended - last.ended < 5 * first.slowness


def die_without_rank_0(shares: bool) -> None:
    """In a group of ranks 1 and 2, rank 2 is killed after rank 0 has left."""
    os.environ[SWITCH] = str(int(shares))
    env = join_process_group()
    group = dist.new_group([1, 2], timeout=timedelta(seconds=6))
    if env.rank == 0:
        return
    way = choose_all_reduce(group, CPU)
    way.launch(way.allocate(10, torch.float32, CPU[0]), "the first sum").wait()
    while not presence().heard.get("closing"):
        time.sleep(0.01)  # bounded by the deadline of the ranks
    if env.rank == 2:
        end("is killed")
    with noting_errors():
        way.launch(way.allocate(10, torch.float32, CPU[0]), "a sum").wait()


@pytest.mark.wide
@pytest.mark.waits(6)
@pytest.mark.parametrize("shares", [True, False])
def test_a_wait_for_a_dead_rank_ends_by_the_timeout_and_says_that_rank_0_has_left(
    nursery: Nursery, tmp_path: Path, shares: bool
) -> None:
    """Without rank 0, a wait ends by the timeout."""
    gone, first, last = nursery.run_watched(die_without_rank_0, 3, tmp_path, shares)
    kind, message = first.notes["error"]
    assert kind == "PeerError"
    assert f"rank 0 (host {os.uname().nodename}, pid {gone.pid}) left the run while rank 1" in message
    assert "still waits for a sum" in message and "First error: " in message
    assert first.ended - last.ended < 6 + 5 * first.slowness
