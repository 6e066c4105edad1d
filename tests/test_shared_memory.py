"""Sums through the memory of a host against sums in one process, and what happens when it cannot be had."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from nursery import Nursery, note, noting_errors
from torch import Tensor

from ddp_callbacks import GradientSynchronizer, environment, join_process_group
from ddp_callbacks.comm import memfd, shared_memory
from ddp_callbacks.comm.shared_memory import SWITCH, SharedMemoryAllReduce
from ddp_callbacks.comm.topology import choose_all_reduce
from ddp_callbacks.process_group import resolve_group

SIZES = [0, 1, 63, 64, 65, 129, 1000, 100_003]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.int64]


def opened(group: dist.ProcessGroup | None = None) -> SharedMemoryAllReduce:
    memory = choose_all_reduce(resolve_group(group), [torch.device("cpu")])
    assert isinstance(memory, SharedMemoryAllReduce)
    return memory


def summand(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(17 * size + rank)
    values = torch.randn(size, 2, generator=generator, dtype=torch.float64)
    return torch.view_as_complex(values).to(dtype) if dtype.is_complex else (100 * values[:, 0]).to(dtype)


def all_sums() -> dict[str, list[Tensor]]:
    """Each size and dtype, in a segment and elsewhere, several under way at a time."""
    memory, rank = opened(), dist.get_rank()
    results = {}
    for dtype in DTYPES:
        shared = [memory.allocate(size, dtype).copy_(summand(rank, size, dtype)) for size in SIZES]
        private = [summand(rank, size, dtype) for size in SIZES]
        pending = [memory.launch(tensor) for tensor in [*shared, *private]]
        for sum_ in pending:
            sum_.wait("the test")
        results[str(dtype)] = [tensor.clone() for tensor in [*shared, *private]]
    return results


def sum_by_rank(world_size: int, size: int, dtype: torch.dtype) -> Tensor:
    """The sum in the order of the ranks; half precision in float32."""
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = summand(0, size, dtype).to(wide)
    for rank in range(1, world_size):
        total = total + summand(rank, size, dtype).to(wide)
    return total.to(dtype)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_rank_gets_the_sum_in_the_order_of_the_ranks_bit_for_bit(world_size: int) -> None:
    for results in run_distributed(all_sums, world_size):
        for dtype in DTYPES:
            expected = [sum_by_rank(world_size, size, dtype) for size in SIZES] * 2
            for actual, wanted in zip(results[str(dtype)], expected, strict=True):
                assert actual.dtype == dtype and torch.equal(actual, wanted), (dtype, len(wanted))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident() -> int:
    """Shared memory that this process has mapped, in bytes."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssShmem")]
    return int(line.split()[1]) * 1024


def use_new_memory_each_time() -> tuple[int, int]:
    memory = opened()
    for _ in range(3):
        memory.launch(memory.allocate(1 << 18, torch.float32).zero_()).wait("the test")
    before = descriptors(), resident()
    for _ in range(40):
        memory.launch(memory.allocate(1 << 18, torch.float32).zero_()).wait("the test")
    gc.collect()
    dist.barrier()
    return descriptors() - before[0], resident() - before[1]


def test_memory_that_is_dropped_takes_its_descriptors_and_mappings_with_it() -> None:
    for extra_descriptors, extra_bytes in run_distributed(use_new_memory_each_time, 2):
        assert extra_descriptors <= 0
        assert extra_bytes < 4 << 20  # 40 segments of 1 MiB were used, on each of two ranks


def train_some_steps() -> tuple[int, int]:
    model = torch.nn.Linear(300, 300)
    synchronizer = GradientSynchronizer(model)
    seen, before = set(), descriptors()
    for step in range(6):
        model.zero_grad()
        model(torch.ones(1, 300)).sum().backward()
        assert model.weight.grad is not None
        seen.add(model.weight.grad.data_ptr())
        before = descriptors() if step == 1 else before
    synchronizer.close()
    return len(seen), descriptors() - before


def test_every_step_sums_in_the_same_memory() -> None:
    assert run_distributed(train_some_steps, 2) == [(1, 0)] * 2


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:")


def use_groups_in_turn() -> tuple[int, int]:
    seen = []
    for _ in range(4):
        group = dist.new_group()
        memory = opened(group)
        memory.launch(torch.ones(10)).wait("the test")  # by way of memory that is kept for the next time
        dist.barrier()
        dist.destroy_process_group(group)
        del memory, group
        gc.collect()
        seen.append((descriptors(), mappings()))
    return seen[-1][0] - seen[0][0], seen[-1][1] - seen[0][1]


def test_a_group_that_is_destroyed_takes_its_shared_memory_with_it() -> None:
    assert run_distributed(use_groups_in_turn, 2) == [(0, 0)] * 2


def send_a_gradient() -> float:
    model = torch.nn.Linear(3, 2)
    synchronizer = GradientSynchronizer(model)
    model(torch.ones(1, 3)).sum().backward()
    synchronizer.close()
    queue = torch.multiprocessing.SimpleQueue()
    queue.put(model.weight.grad)
    received = queue.get()
    queue.close()
    return float(received.sum())


def test_a_gradient_can_be_sent_to_another_process() -> None:
    assert run_distributed(send_a_gradient, 2) == [6.0, 6.0]


def alternate_and_abandon() -> list[float]:
    """Two memories in turns, as where gradients are kept, and a sum in between that nobody waits for."""
    memory, rank = opened(), dist.get_rank()
    tensors = [memory.allocate(500, torch.float64) for _ in range(2)]
    seen = []
    for step in range(20):
        if step % 5 == 3:
            memory.launch(memory.allocate(77, torch.float64).fill_(1e9))
        mine = tensors[(step + rank) % 2].fill_(10**rank * step)
        memory.launch(mine).wait("the test")
        seen.append(float(mine.max() - mine.min()) + float(mine[0]))
    return seen


def test_sums_that_are_abandoned_on_every_rank_disturb_no_later_one() -> None:
    for seen in run_distributed(alternate_and_abandon, 3):
        assert seen == [111.0 * step for step in range(20)]


def wait_twice() -> list[float]:
    """The second sum lies in the memory of the first, which is waited for once more when the second is done."""
    memory, first, second = opened(), torch.ones(100), torch.full((100,), 5.0)
    one = memory.launch(first)
    one.wait("the test")
    two = memory.launch(second)
    two.wait("the test")
    one.wait("the test")
    three, third = memory.launch(torch.zeros(100)), memory.launch(fourth := torch.full((100,), 7.0))
    three.wait("the test")
    third.wait("the test")
    return [first.sum().item(), second.sum().item(), fourth.sum().item()]


def test_a_sum_that_is_waited_for_twice_keeps_its_value() -> None:
    assert run_distributed(wait_twice, 2) == [[200.0, 1000.0, 1400.0]] * 2


def interrupt_between_sum_and_delivery() -> list[str]:
    """Ctrl-C on rank 0, as if it came when the slice was summed."""
    memory, tensor, said = opened(), torch.ones(100), []
    reduction = memory.launch(tensor)
    whole = shared_memory._sum_into_first

    def interrupted(parts: list[Tensor]) -> None:
        whole(parts)
        raise KeyboardInterrupt

    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(shared_memory, "_sum_into_first", interrupted)
            reduction.wait("the test")
        with pytest.raises(RuntimeError) as caught:
            reduction.wait("the test")
        said.append(str(caught.value))
    return said


def test_a_sum_that_is_interrupted_half_done_is_an_error_not_a_wrong_sum() -> None:
    said, _ = run_distributed(interrupt_between_sum_and_delivery, 2)
    assert "interrupted halfway (Ctrl-C)" in said[0] and "Restart all processes" in said[0]


def fail_to_open() -> tuple[int, str]:
    """How many descriptors are left where the constructor raises, and what is done in its place."""
    group = resolve_group()
    choose_all_reduce(dist.new_group([0, 1]), [torch.device("cpu")])  # what is opened once for all is there now
    before = descriptors()

    def raises(self: SharedMemoryAllReduce, *_: object) -> None:
        raise OSError(38, "sem_init between processes")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedMemoryAllReduce, "__init__", raises)
        chosen = choose_all_reduce(group, [torch.device("cpu")])
    return descriptors() - before, type(chosen).__name__


def test_memory_that_cannot_be_used_after_all_leaves_no_descriptor() -> None:
    assert run_distributed(fail_to_open, 2) == [(0, "ProcessGroupAllReduce")] * 2


def sum_what_differs() -> str:
    memory = opened()
    with pytest.raises(ValueError) as caught:
        memory.launch(torch.zeros(3 + dist.get_rank())).wait("the test")
    return str(caught.value)


def test_ranks_that_sum_different_sizes_are_named_with_both() -> None:
    first, second = run_distributed(sum_what_differs, 2)
    assert "rank 1 sums 16 bytes of gradients, but rank 0 sums 12" in first
    assert "rank 0 sums 12 bytes of gradients, but rank 1 sums 16" in second


def too_many_under_way() -> str:
    memory = opened()
    tensor = memory.allocate(1, torch.float32)
    with pytest.raises(ValueError, match="raise bucket_cap_mb") as caught:
        for _ in range(10_000):
            memory.launch(tensor)
    return str(caught.value)


def test_more_sums_under_way_than_there_is_room_for_is_an_error() -> None:
    for message in run_distributed(too_many_under_way, 2):
        assert message.startswith("more than 8192 sums are in flight")


def no_room(spare: int) -> tuple[str, int]:
    memory = opened()
    before = descriptors()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.dup(0)  # the lowest free number
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe + spare, limit[1]))
    with pytest.raises(ValueError) as caught:
        memory.allocate(10, torch.float32)
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    return str(caught.value), descriptors() - before


@pytest.mark.parametrize(
    ("spare", "cause"), [(0, "Too many open files"), (1, "could not duplicate a shared memory file descriptor")]
)
def test_memory_that_cannot_be_had_is_an_error_with_the_remedy(spare: int, cause: str) -> None:
    for message, extra_descriptors in run_distributed(no_room, 2, spare):
        assert message.startswith("no shared memory of 40 bytes for gradients: ")
        assert cause in message and "ulimit -n" in message and f"{SWITCH}=0" in message
        assert extra_descriptors == 0


# --- where it cannot be shared ----------------------------------------------------------------------------------------


def switch_off(rank: int) -> None:
    if rank == 1:
        os.environ[SWITCH] = "0"


def live_on_two_hosts(rank: int) -> None:
    environment.host_identity = lambda: f"host of rank {rank}"


def open_nothing(rank: int) -> None:
    if rank == 1:
        memfd.path_of = lambda pid, fd: f"/proc/{pid}/fd/nothing"


def have_no_memfd(rank: int) -> None:
    if rank == 0:
        del os.memfd_create


REFUSALS: dict[str, tuple[Callable[[int], None], str]] = {
    "switch": (switch_off, f"gloo: {SWITCH}=0 is set"),
    "hosts": (live_on_two_hosts, "gloo: every rank is on a different host"),
    "open": (open_nothing, "gloo: rank 1 cannot open what rank 0 shares: "),
    "memfd": (have_no_memfd, "gloo: this system has no memfd_create"),
}


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def train_without(name: str) -> tuple[Any, list[str]]:
    handler = Records()
    logger = logging.getLogger("ddp_callbacks")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    if name in REFUSALS:
        REFUSALS[name][0](dist.get_rank())
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).double()
    synchronizer = GradientSynchronizer(model)
    (model(torch.full((1, 3), float(dist.get_rank())).double()).sum()).backward()
    synchronizer.close()
    assert model.weight.grad is not None
    return model.weight.grad.tolist(), handler.texts


@pytest.mark.parametrize("name", REFUSALS)
def test_ranks_that_cannot_share_memory_agree_on_gloo_and_rank_0_says_why(name: str) -> None:
    first, second = run_distributed(train_without, 2, name)
    assert first[0] == second[0] == [[0.5] * 3] * 2
    assert len(first[1]) == 1 and not second[1]
    assert REFUSALS[name][1] in first[1][0]


def test_rank_0_says_that_memory_is_shared() -> None:
    first, second = run_distributed(train_without, 2, "")
    assert first == ([[0.5] * 3] * 2, ["summing CPU tensors using shared memory"])
    assert not second[1]


# --- ranks that die ---------------------------------------------------------------------------------------------------


def die_while_others_wait(how: str) -> None:
    env = join_process_group()
    memory = opened()
    memory.launch(torch.ones(10)).wait("the first sum")
    if env.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with noting_errors():
        if how == "launched":
            memory.launch(torch.ones(10)).wait("the second sum")
        else:
            memory.launch(torch.ones(10))
            memory.launch(torch.ones(10)).wait("the second sum")
    note("never")


@pytest.mark.parametrize("how", ["launched", "several launched"])
def test_a_rank_killed_while_others_wait_in_shared_memory_is_named_and_leaves_nothing(
    nursery: Nursery, tmp_path: Path, how: str
) -> None:
    ranks = nursery.run_watched(die_while_others_wait, 3, tmp_path, how)
    assert ranks[1].code == -signal.SIGKILL
    for rank in (ranks[0], ranks[2]):
        kind, message = rank.notes["error"]
        assert kind == "PeerError" and f"rank 1 (host {os.uname().nodename}, pid {ranks[1].pid}) died" in message
        assert rank.ended - ranks[1].ended < 5 * rank.slowness
        assert "never" not in rank.notes


def end_before_others_have_opened_its_memory(how: str) -> None:
    env = join_process_group()
    memory = opened()
    if env.rank == 1:
        memory.launch(torch.ones(10))
        if how == "raises":
            raise ValueError("boom")
        os.kill(os.getpid(), signal.SIGKILL)
    while memory._posted.dead() != {1}:
        time.sleep(0.01)  # bounded by the deadline of the ranks
    with noting_errors():
        memory.launch(torch.ones(10)).wait("the first sum")


@pytest.mark.parametrize(("how", "says"), [("raises", "failed with ValueError: boom"), ("is killed", "died")])
def test_a_rank_that_ends_before_others_have_opened_its_memory_is_named(
    nursery: Nursery, tmp_path: Path, how: str, says: str
) -> None:
    ranks = nursery.run(end_before_others_have_opened_its_memory, 3, tmp_path, how)
    for rank in (ranks[0], ranks[2]):
        kind, message = rank.notes["error"]
        assert kind == "PeerError"
        assert f"rank 1 (host {os.uname().nodename}, pid {ranks[1].pid}) {says}" in message


def end_in_a_sub_group(how: str) -> None:
    env = join_process_group()
    group = dist.new_group([1, 2])
    if env.rank == 0:
        return
    memory = opened(group)
    memory.launch(torch.ones(10)).wait("the first sum")
    if env.rank == 2:
        if how == "raises":
            raise ValueError("boom")
        os.kill(os.getpid(), signal.SIGKILL)
    with noting_errors():
        memory.launch(torch.ones(10)).wait("the second sum")


@pytest.mark.parametrize(("how", "says"), [("raises", "failed with ValueError: boom"), ("is killed", "died")])
def test_in_a_sub_group_a_rank_is_named_by_its_number_in_the_world(
    nursery: Nursery, tmp_path: Path, how: str, says: str
) -> None:
    ranks = nursery.run(end_in_a_sub_group, 3, tmp_path, how)
    kind, message = ranks[1].notes["error"]
    assert kind == "PeerError"
    assert f"rank 2 (host {os.uname().nodename}, pid {ranks[2].pid}) {says}" in message
    assert f"rank 1 (host {os.uname().nodename}, pid {ranks[1].pid})" in message
