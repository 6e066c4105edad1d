"""Hierarchical all-reduce: within each node through shared memory, between nodes over the network."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from nursery import Nursery, note
from test_shared_memory import summand
from torch import Tensor
from two_hosts import live_on_hosts

from ddp_callbacks.comm import topology as topology_module
from ddp_callbacks.comm.collectives import new_subgroup
from ddp_callbacks.comm.hierarchical import HierarchicalAllReduce
from ddp_callbacks.comm.topology import Topology
from ddp_callbacks.errors import ConfigurationError, PeerError
from ddp_callbacks.process_group import join_process_group, resolve_group

SIZES = [0, 1, 65, 1000, 200_001]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
HALF = (torch.bfloat16, torch.float16)
LAYOUTS = [(2, 1), (1, 2), (2, 2), (2, 1, 1)]


def all_sums(layout: tuple[int, ...], dtype: torch.dtype | None, slice_nbytes: int | None = None) -> list[list[Tensor]]:
    """Each size and dtype, in a segment and elsewhere, several under way at a time; twice."""
    if slice_nbytes is not None:
        topology_module.CHUNK_NBYTES = slice_nbytes
    topology, rank = live_on_hosts(layout, resolve_group()), dist.get_rank()
    way = topology.all_reduce(dtype)
    assert isinstance(way, HierarchicalAllReduce) and way.exact == (dtype is None)
    results = []
    for _ in range(2):
        tensors = []
        for kind in DTYPES:
            for size in SIZES:
                tensors.append(way.allocate(size, kind, torch.device("cpu")).copy_(summand(rank, size, kind)))
                tensors.append(summand(rank, size, kind))
        pending = [way.launch(tensor) for tensor in tensors]
        for sum_ in pending:
            sum_.wait("the test")
        results.append([tensor.clone() for tensor in tensors])
    return results


def expected(layout: tuple[int, ...], size: int, kind: torch.dtype, wire: torch.dtype | None) -> Tensor:
    """Sums of the hosts in the order of the ranks, then over the hosts; half precision in float32 each time."""
    wide = torch.float32 if kind in HALF else kind
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
    return total


def check(layout: tuple[int, ...], results: list[Any], wire: torch.dtype | None) -> None:
    for first, second in results:
        at = iter(zip(first, second, results[0][0], strict=True))
        for kind in DTYPES:
            half = [dtype for dtype in (wire, kind) if dtype in HALF]  # what the sum is rounded to at the end
            relative = max(torch.finfo(dtype).eps for dtype in half or [kind])
            for size in SIZES:
                wanted = expected(layout, size, kind, wire)
                absolute = 1e-4 if not half and kind == torch.float32 else 1e-12  # terms of some hundred cancel out
                for _ in range(2):
                    one, two, of_rank_0 = next(at)
                    assert torch.equal(one, two) and torch.equal(one, of_rank_0), (kind, size)
                    torch.testing.assert_close(one.to(wanted.dtype), wanted, rtol=relative, atol=absolute)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_gets_the_same_bits_and_they_are_the_sum(layout: tuple[int, ...]) -> None:
    check(layout, run_distributed(all_sums, sum(layout), layout, None), None)


@pytest.mark.parametrize(("layout", "wire"), [((2, 2), None), ((2, 1, 1), None), ((2, 1), torch.bfloat16)])
def test_long_sums_are_the_same_in_pieces(layout: tuple[int, ...], wire: torch.dtype | None) -> None:
    check(layout, run_distributed(all_sums, sum(layout), layout, wire, 1), wire)


def number_of_pieces(sizes: list[int]) -> list[int]:
    way = live_on_hosts((1, 1), resolve_group()).all_reduce(torch.float16)
    launched = [way.launch(torch.zeros(size, dtype=torch.float64)) for size in sizes]
    for sum_ in launched:
        sum_.wait("the test")
    return [len(sum_.chunks) for sum_ in launched]


def test_a_sum_has_pieces_of_4_mib_and_at_most_8() -> None:
    full = (4 << 20) // 8
    for counted in run_distributed(number_of_pieces, 2, [0, full, full + 1, 8 * full, 9 * full]):
        assert counted == [1, 1, 2, 8, 8]


@pytest.mark.parametrize(
    ("layout", "wire"), [((2, 1), torch.float16), ((1, 1), torch.bfloat16), ((1, 1, 1), torch.bfloat16)]
)
def test_what_goes_over_the_wire_is_rounded_once_on_each_way(layout: tuple[int, ...], wire: torch.dtype) -> None:
    check(layout, run_distributed(all_sums, sum(layout), layout, wire), wire)


def sums_beside_groups_of_some_ranks() -> tuple[float, float, str]:
    """Of the world, of groups whose ranks are in different numbers of others, and why the world has no third."""
    dist.new_group([0, 2])
    part, same = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    everywhere = sum_of_ones(live_on_hosts((2, 1), resolve_group()))
    in_part = sum_of_ones(live_on_hosts((1, 1), part)) if dist.get_rank() < 2 else 0.0
    in_same = sum_of_ones(live_on_hosts((2, 1), same))
    if dist.get_rank() == 0:
        dist.new_group([0])
    with pytest.raises(ConfigurationError) as refused:
        new_subgroup([[0, 1, 2]], resolve_group())
    assert everywhere == in_same
    return everywhere, in_part, str(refused.value)


def sum_of_ones(topology: Topology) -> float:
    tensor = torch.ones(1000)
    topology.all_reduce().launch(tensor).wait("the test")
    return float(tensor.sum())


def test_groups_that_only_some_ranks_have_made_do_not_let_the_others_wait() -> None:
    """torch names a group by the number of those before it: the ranks would wait for different names."""
    first, second, third = run_distributed(sums_beside_groups_of_some_ranks, 3)
    assert first[:2] == second[:2] == (3000, 2000) and third[:2] == (3000, 0)
    assert first[2] == second[2] == third[2]
    assert "have made different numbers of groups: [" in first[2] and "call new_group for the same groups" in first[2]


def die_on_one_of_two_hosts(layout: tuple[int, ...], victim: int) -> None:
    env = join_process_group()
    way = live_on_hosts(layout, resolve_group()).all_reduce()
    way.launch(torch.ones(10)).wait("the first sum")
    if env.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    way.launch(torch.ones(1_000_000)).wait("the second sum")


@pytest.mark.parametrize(("layout", "victim"), [((2, 2), 3), ((2, 2), 2), ((1, 2), 2), ((2, 1), 2)])
def test_a_rank_killed_on_one_host_is_named_on_all_hosts(
    nursery: Nursery, tmp_path: Path, layout: tuple[int, ...], victim: int
) -> None:
    ranks = nursery.run_watched(die_on_one_of_two_hosts, sum(layout), tmp_path, layout, victim)
    dead = ranks.pop(victim)
    for rank in ranks:
        assert f"PeerError: rank {victim} (host {os.uname().nodename}, pid {dead.pid}) died" in rank.stderr
        assert rank.code == 1 and rank.ended - dead.ended < 8 * rank.slowness


def die_beyond_a_carrier_that_stays() -> None:
    """Rank 1 waits for rank 0 in the memory of their host, and rank 0, which lives, for rank 2 on the other."""
    env = join_process_group()
    way = live_on_hosts((2, 1), resolve_group()).all_reduce()
    way.launch(torch.ones(10)).wait("the first sum")
    if env.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    told = Path("told")
    try:
        way.launch(torch.ones(1_000_000)).wait("the second sum")
    except PeerError:
        end = time.monotonic() + 20
        while env.rank == 0 and not told.exists() and time.monotonic() < end:
            time.sleep(0.05)
        note("told", told.exists())
        told.touch()
        raise


def test_a_rank_hears_of_a_death_although_the_one_that_it_waits_for_lives(nursery: Nursery, tmp_path: Path) -> None:
    """It said that the store could not be reached where rank 0, which had it, was slow to end."""
    first, second, dead = nursery.run(die_beyond_a_carrier_that_stays, 3, tmp_path)
    assert first.notes["told"] and not second.notes["told"]
    for rank in (first, second):
        assert f"PeerError: rank 2 (host {os.uname().nodename}, pid {dead.pid}) died" in rank.stderr


def raise_on_one_of_two_hosts() -> None:
    env = join_process_group()
    way = live_on_hosts((2, 1), resolve_group()).all_reduce()
    way.launch(torch.ones(10)).wait("the first sum")
    if env.rank == 2:
        raise ValueError("boom")
    way.launch(torch.ones(1_000_000)).wait("the second sum")


def test_an_exception_on_one_host_ends_all_and_the_threads_end_in_peace(nursery: Nursery, tmp_path: Path) -> None:
    ranks = nursery.run(raise_on_one_of_two_hosts, 3, tmp_path, finalize=True)
    for rank in ranks[:2]:
        assert "rank 2 (host" in rank.stderr and "failed with ValueError: boom" in rank.stderr
    for rank in ranks:
        assert rank.code == 1
        assert "terminate called" not in rank.stderr and "Fatal" not in rank.stderr


def stop_on_one_of_two_hosts() -> None:
    env = join_process_group(timeout=timedelta(seconds=5))
    way = live_on_hosts((2, 2), resolve_group()).all_reduce()
    way.launch(torch.ones(10), "the first sum").wait("the first sum")
    if env.rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    way.launch(torch.ones(1_000_000), "the second sum").wait("the second sum")


def test_a_rank_that_goes_silent_on_one_of_two_hosts_is_named_by_all_others(nursery: Nursery, tmp_path: Path) -> None:
    """Those that wait for it directly are not all: each group between hosts may have nobody missing."""
    ended: list[int] = []

    def kill_the_stopped(rank: int, pids: list[int]) -> None:
        ended.append(rank)
        if len(ended) == 3:
            os.kill(pids[3], signal.SIGKILL)

    ranks = nursery.run(stop_on_one_of_two_hosts, 4, tmp_path, on_end=kill_the_stopped)
    for rank in ranks[:3]:
        assert rank.code == 1
        assert f"PeerError: rank 3 (host {os.uname().nodename}, pid {ranks[3].pid}) died or went silent" in rank.stderr
