"""Sums between hosts: within each through shared memory, between them over the network, whole or rounded."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.ranks import Nursery, live_on_hosts, note
from shared_worlds import TWO, WIDE, World, by_rank
from test_shared_memory import summand
from torch import Tensor
from ways import Way

from ddp_callbacks.comm import hierarchical
from ddp_callbacks.comm.group_sums import ProcessGroupAllReduce
from ddp_callbacks.comm.hierarchical import HierarchicalAllReduce
from ddp_callbacks.comm.protocol import AllReduce
from ddp_callbacks.comm.topology import Hosts, new_subgroup
from ddp_callbacks.errors import PeerError
from ddp_callbacks.process_group import join_process_group, resolve_group

pytestmark = pytest.mark.shares_results()
WORLD = World(__name__)
CPU = torch.device("cpu")
SIZES = [0, 1, 65, 1000, 200_001]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
HALF = (torch.bfloat16, torch.float16)
FOUR = Way(4, tier="night")

# By the number of ranks: how many each host has, what is sent between hosts, and in pieces of how many bytes.
CASES: dict[int, list[tuple[tuple[int, ...], torch.dtype | None, int | None]]] = {
    2: [((1, 1), torch.bfloat16, None), ((1, 1), torch.float16, None), ((1, 1), torch.bfloat16, 1)],
    3: [
        ((2, 1), None, None),
        ((1, 2), None, None),
        ((2, 1), torch.float16, None),
        ((1, 1, 1), torch.bfloat16, None),
        ((2, 1), None, 1),
        ((2, 1), torch.bfloat16, 1),
    ],
    4: [((2, 2), None, None), ((2, 1, 1), None, None), ((2, 2), None, 1), ((2, 1, 1), None, 1)],
}


def expected(layout: tuple[int, ...], size: int, kind: torch.dtype, wire: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Sums of the hosts in the order of the ranks, then over the hosts; and by how much roundings may change them.

    Where numbers travel in half precision, each addition after the first rounds what was added so far.
    """
    wide = torch.float32 if kind in HALF else kind
    wire = None if kind in HALF else wire  # only wider numbers are rounded
    rank, hosts = 0, []
    for count in layout:
        total = summand(rank, size, kind).to(wide)
        for other in range(rank + 1, rank + count):
            total = total + summand(other, size, kind).to(wide)
        hosts.append(total.to(kind))
        rank += count
    sent = [part.to(wide) if wire is None else part.to(wire).float() for part in hosts]
    total = sent[0]
    for part in sent[1:]:
        total = total + part
    half = [dtype for dtype in (wire, kind) if dtype in HALF]  # what the sum is rounded to at the end
    bound = max(torch.finfo(dtype).eps for dtype in half or [kind]) * total.abs()
    if not half:
        bound += 1e-4 if kind == torch.float32 else 1e-12  # terms of some hundred cancel out
    elif len(sent) > 2:
        bound *= 0
        bound += torch.finfo(half[0]).eps * sum(part.abs() for part in sent)
    return total, bound


def summed(way: AllReduce) -> Iterator[tuple[torch.dtype, int, Tensor]]:
    """Each size and dtype, all under way at a time."""
    rank, tensors = dist.get_rank(), []
    for kind in DTYPES:
        for size in SIZES:
            tensors.append((kind, size, way.allocate(size, kind, CPU).copy_(summand(rank, size, kind))))
    pending = [way.launch(tensor, "the test") for _, _, tensor in tensors]
    for sum_ in pending:
        sum_.wait()
    yield from tensors


def sums_beside_their_truth(layout: tuple[int, ...], wire: torch.dtype | None, piece: int | None) -> None:
    """Twice, with the same bits on all ranks."""
    with pytest.MonkeyPatch.context() as patch:
        if piece is not None:
            patch.setattr(hierarchical, "CHUNK_NBYTES", piece)
        way = live_on_hosts(layout, dist.new_group()).all_reduce(wire)
    shares = max(layout) > 1
    assert isinstance(way, HierarchicalAllReduce if shares else ProcessGroupAllReduce) and way.exact == (wire is None)
    bits = []
    for kind, size, tensor in [*summed(way), *summed(way)]:
        wanted, bound = expected(layout, size, kind, wire)
        assert ((tensor.to(wanted.dtype) - wanted).abs() <= bound).all(), (layout, size, kind, wire)
        bits.append(hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest())
    assert bits[: len(bits) // 2] == bits[len(bits) // 2 :], "the second time the bits are others"
    assert by_rank(bits) == [bits] * dist.get_world_size()


@WORLD.on(TWO, WIDE, FOUR)
def test_every_rank_gets_the_same_bits_and_they_are_the_sum_rounded_once_on_each_way() -> None:
    """Sums between hosts give all the same bits."""
    for case in CASES[dist.get_world_size()]:
        sums_beside_their_truth(*case)


def ones(way: AllReduce, numel: int) -> Tensor:
    return way.allocate(numel, torch.float32, CPU).fill_(1.0)


def sum_of_ones(hosts: Hosts) -> float:
    way = hosts.all_reduce()
    way.launch(ones(way, 500), "a sum that nobody waits for")
    way.launch(tensor := ones(way, 1000), "the test").wait()
    return float(tensor.sum())


@WORLD.on(WIDE)
def test_groups_that_only_some_ranks_have_made_do_not_let_the_others_wait() -> None:
    """Groups of some ranks keep no other waiting."""
    # torch names a group by the number of those before it: the ranks would wait for different names.
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    dist.new_group([0, 2])
    part, same = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    assert sum_of_ones(live_on_hosts((2, 1), resolve_group())) == 3000
    assert dist.get_rank() == 2 or sum_of_ones(live_on_hosts((1, 1), part)) == 2000
    assert sum_of_ones(live_on_hosts((2, 1), same)) == 3000
    if dist.get_rank() == 0:
        dist.new_group([0])  # after which no other group of torch can be made: no test comes after this one
    assert new_subgroup([0, 1, 2], resolve_group()) is not None


# --- failures ---------------------------------------------------------------------------------------------------------


def boom() -> None:
    raise ValueError("boom")


# What happens to the last rank between two sums, and what the others say of it.
HAPPENS: dict[str, tuple[Callable[[], Any], str]] = {
    "is killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "died"),
    "raises": (boom, "failed with ValueError: boom"),
    "stops": (lambda: os.kill(os.getpid(), signal.SIGSTOP), "died or went silent"),
}
PATIENCE = 5


def sum_twice(layout: tuple[int, ...], how: str) -> None:
    """With two ranks, what is sent is rounded."""
    env = join_process_group(timeout=timedelta(seconds=PATIENCE if how == "stops" else 300))
    way = live_on_hosts(layout, resolve_group()).all_reduce(torch.bfloat16 if len(layout) == sum(layout) else None)
    way.launch(ones(way, 10), "the first sum").wait()
    if env.rank == sum(layout) - 1:
        HAPPENS[how][0]()
    way.launch(ones(way, 1_000_000), "the second sum").wait()


@pytest.mark.parametrize(
    ("how", "layout"),
    [
        ("is killed", (1, 1)),
        pytest.param("is killed", (2, 1), marks=pytest.mark.wide),
        ("raises", (1, 1)),
        pytest.param("raises", (2, 1), marks=pytest.mark.wide),
        pytest.param("stops", (2, 1), marks=pytest.mark.night),
        pytest.param("stops", (2, 2), marks=pytest.mark.night),
    ],
)
def test_what_happens_to_a_rank_of_one_host_is_told_on_all_hosts(
    nursery: Nursery, tmp_path: Path, how: str, layout: tuple[int, ...]
) -> None:
    """All hosts hear of a failure on one."""
    # Those that wait for it directly are not all: each group between hosts may have nobody missing.
    ended: list[int] = []

    def kill_the_stopped(rank: int, pids: list[int]) -> None:
        ended.append(rank)
        if how == "stops" and len(ended) == len(pids) - 1:
            os.kill(pids[-1], signal.SIGKILL)

    options = {"finalize": how == "raises", "on_end": kill_the_stopped}  # the threads must not crash at the end
    *ranks, last = nursery.run_watched(sum_twice, sum(layout), tmp_path, layout, how, **options)
    for rank in ranks:
        assert rank.code == 1
        assert f"rank {len(ranks)} (host {os.uname().nodename}, pid {last.pid}) {HAPPENS[how][1]}" in rank.stderr
        assert "terminate called" not in rank.stderr and "Fatal" not in rank.stderr
        assert how != "is killed" or rank.ended - last.ended < 8 * rank.slowness


def die_beyond_a_carrier_that_stays() -> None:
    """Rank 1 waits for rank 0 in the memory of their host, and rank 0, which lives, for rank 2 on the other."""
    env = join_process_group()
    way = live_on_hosts((2, 1), resolve_group()).all_reduce()
    way.launch(ones(way, 10), "the first sum").wait()
    if env.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    told = Path("told")
    try:
        way.launch(ones(way, 1_000_000), "the second sum").wait()
    except PeerError:
        end = time.monotonic() + 20
        while env.rank == 0 and not told.exists() and time.monotonic() < end:
            time.sleep(0.05)
        note("told", told.exists())
        told.touch()
        raise


@pytest.mark.wide
def test_a_rank_hears_of_a_death_although_the_one_that_it_waits_for_lives(nursery: Nursery, tmp_path: Path) -> None:
    # It said that the store could not be reached where rank 0, which had it, was slow to end.
    first, second, dead = nursery.run(die_beyond_a_carrier_that_stays, 3, tmp_path)
    assert first.notes["told"] and not second.notes["told"]
    for rank in (first, second):
        assert f"PeerError: rank 2 (host {os.uname().nodename}, pid {dead.pid}) died" in rank.stderr
