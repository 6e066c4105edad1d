"""Ranks that live and are not where the others expect them: told by name if they never will be, else left in peace."""

from __future__ import annotations

import _thread
import ctypes
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.ranks import HOSTNAME, Nursery, Rank, note, noting_errors, run_distributed
from misfortunes import believe_in_hosts, my_rank
from side_by_side import World, run_side_by_side
from torch import nn

from ddp_callbacks import BatchNormSynchronizer, GradientSynchronizer, join_process_group
from ddp_callbacks.comm.collectives import (
    all_gather_object,
    all_reduce,
    any_rank,
    barrier,
    broadcast,
    broadcast_object,
)
from ddp_callbacks.comm.group_sums import ProcessGroupAllReduce
from ddp_callbacks.comm.topology import choose_all_reduce
from ddp_callbacks.errors import PeerError
from ddp_callbacks.process_group import resolve_group
from ddp_callbacks.process_group.failures import enter, report_failure, wait
from ddp_callbacks.process_group.presence import presence
from ddp_callbacks.process_group.runs import begin_run

pytestmark = pytest.mark.shares_results()

# --- bodies -----------------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")
Exchange = Callable[[str], Any]  # of a name, which messages say


def sum_in_shared_memory(name: str) -> Any:
    way = choose_all_reduce(dist.group.WORLD, [CPU])
    return way.launch(way.allocate(1000, torch.float32, CPU).fill_(1.0), name).wait()


def sum_by_gloo(numel: int) -> Exchange:
    return lambda name: ProcessGroupAllReduce(dist.group.WORLD).launch(torch.ones(numel), name).wait()


def vote(name: str) -> Any:
    return any_rank(True, name)


def gather(name: str) -> Any:
    return all_gather_object(1, name)


def send(name: str) -> Any:
    return broadcast_object(1, name)


def send_and_vote(name: str) -> Any:
    """Who sends does not hear of it until it waits for an answer."""
    return send(name), any_rank(False, "what comes next")


def exchange_rows(name: str) -> Any:
    return all_gather_object([1.0], name)


DIFFERENT: dict[str, tuple[Exchange, Exchange]] = {
    "one message, two meanings": (vote, vote),
    "a decision and a message": (vote, gather),
    "two barriers": (barrier, barrier),
    "two broadcasts": (send_and_vote, send),
    "two kinds of message": (gather, lambda name: broadcast(torch.ones(3), name)),
    "rows of numbers": (exchange_rows, exchange_rows),
    "shared memory and gloo": (exchange_rows, send),
    "sums in shared memory": (sum_in_shared_memory, sum_in_shared_memory),
    "small sums by gloo": (lambda name: all_reduce(torch.ones(10), name),) * 2,
    "a small and a large sum by gloo": (sum_by_gloo(10), sum_by_gloo(1 << 20)),
}


def meet_in_different_exchanges(names: list[str], layout: list[int]) -> None:
    """Rank 1 is in another exchange; afterwards, as in a sweep that goes on, the ranks can exchange again."""
    torch.set_num_threads(1)
    believe_in_hosts(layout)
    join_process_group()
    begin_run()
    for name in names:
        any_rank(False, "the start of an exchange")
        begin = time.monotonic()
        try:
            DIFFERENT[name][my_rank() == 1]("the right" if my_rank() == 1 else "the left")
        except Exception as error:
            note(name, [type(error).__name__, str(error), time.monotonic() - begin])
        begin_run()
    note("sum", float(all_reduce(torch.tensor([my_rank() + 1.0]), "the sum at the end")))


def fail_again_and_again(times: int) -> None:
    """In each run, the others wait for rank 1 in a sum, which fails before."""
    join_process_group()
    begin_run()
    held = []
    for _ in range(times):
        if my_rank() == 1:
            report_failure(ValueError("not this time"))
        else:
            with pytest.raises(PeerError, match="not this time"):
                sum_by_gloo(1000)("the sum")
        begin_run()
        for thread in threading.enumerate():
            if thread.name.endswith("frees groups"):
                thread.join()
        held.append([len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")])
    note("held", held)


def draw_in_vain() -> int:
    join_process_group()
    begin_run()
    if my_rank() == 0:
        presence().drawn.note(2, 0, (4, 8))
    begin_run()
    return presence().drawn.count


def test_batches_that_a_rank_drew_before_it_failed_do_not_count_in_the_next_run() -> None:
    assert run_distributed(draw_in_vain, 2) == [0, 0]


class Late:
    """Something that comes after so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.at = time.monotonic() + seconds

    def wait_slice(self, seconds: float) -> bool:
        time.sleep(max(0.0, min(seconds, self.at - time.monotonic())))
        return time.monotonic() >= self.at


def wait_for(seconds: float, name: str) -> None:
    enter(name)
    wait(Late(seconds), name, resolve_group())


def begin() -> None:
    join_process_group(timeout=timedelta(seconds=120))
    begin_run()
    note("begin")


def wait_in_a_thread_of_autograd() -> None:
    """Python has not made this thread: so it is for hooks that backward calls where the gradients are on a GPU."""
    begin()
    ended = threading.Event()

    def backward() -> None:
        note("thread", type(threading.current_thread()).__name__)
        try:
            wait_for(60, "the right" if my_rank() == 1 else "the left")
        except Exception as error:
            note("error", [type(error).__name__, str(error)])
        ended.set()

    _thread.start_new_thread(backward, ())
    assert ended.wait(90)


def wait_for_one_in_torchs_collective() -> None:
    begin()
    with noting_errors():
        if my_rank() == 1:
            dist.all_reduce(torch.ones(3))  # torch's own, on this rank alone
        any_rank(False, "the left")


def be_ahead() -> None:
    """Rank 0 has sent its broadcast and waits in the next exchange while the other still receives."""
    begin()
    if my_rank() == 0:
        enter("a large broadcast")
        wait_for(5, "what comes next")
    else:
        wait_for(4, "a large broadcast")
        wait_for(1, "what comes next")
    note("sum", float(all_reduce(torch.ones(1), "a sum")))


def take_a_long_step() -> None:
    begin()
    store = presence().store
    before = store.num_keys()
    if my_rank() == 1:
        time.sleep(5)
    note("sum", float(all_reduce(torch.ones(1), "a sum")))
    note("keys", store.num_keys() - before)


def be_late_in_a_deep_network() -> None:
    """As many layers of BatchNorm as in ResNet-50, more buckets than that, and rank 1 is late before the last ones."""
    layers = [layer for _ in range(53) for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8))]
    first, model = nn.Linear(8, 8), nn.Sequential(*layers)
    begin()
    gradients = GradientSynchronizer(nn.Sequential(first, model), bucket_cap_mb=1e-4)
    statistics = BatchNormSynchronizer(model)
    first.register_full_backward_hook(lambda *_: time.sleep(3 * my_rank()))
    model(first(torch.ones(4, 8, requires_grad=True))).sum().backward()
    statistics.close()
    assert len(gradients._reducer.buckets) > 53
    note("sum", float(all_reduce(torch.ones(1), "a sum")))


def leave_while_the_other_receives() -> None:
    """Rank 0 has sent all, and ends; the link of rank 1 is slow."""
    begin()
    if my_rank() == 0:
        enter("the last broadcast")
        note("leaves")
    else:
        wait_for(5, "the last broadcast")
        note("received")


def wait_in_vain_for_one_that_computes() -> None:
    begin()
    group = dist.new_group(timeout=timedelta(seconds=3))
    any_rank(False, "the first message", group)
    while my_rank() == 1 and not Path("told").exists():
        time.sleep(0.05)  # bounded by the deadline of the ranks
    if my_rank() == 0:
        try:
            with noting_errors():
                barrier("the second message", group)
        finally:
            Path("told").touch()


def die_while_one_computes() -> None:
    os.environ["DDP_CALLBACKS_SHARED_MEMORY"] = "0"
    begin()
    if my_rank() == 2:
        note("happens")
        os.kill(os.getpid(), signal.SIGKILL)
    if my_rank() == 1:
        ctypes.PyDLL(None).sleep(8)  # it holds the GIL, so none of its threads runs
    with noting_errors():
        sum_by_gloo(1 << 20)("a large sum")


def exchange_quickly() -> None:
    """Notes how often this process asks the store meanwhile."""
    begin()
    any_rank(False, "the first message")
    asked: list[str] = []

    def counting(name: str, method: Any) -> Any:
        return lambda *args: (asked.append(name), method(*args))[1]

    for name in ("add", "check", "get", "multi_get", "set", "compare_set"):
        setattr(dist.PrefixStore, name, counting(name, getattr(dist.PrefixStore, name)))
    for _ in range(20):
        any_rank(False, "a quick message")
    note("asked", asked)
    if my_rank() == 0:
        with noting_errors():
            barrier("the end")  # the other leaves


# --- tests ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Rank]]:
    bodies = (wait_in_a_thread_of_autograd, wait_for_one_in_torchs_collective, be_ahead, take_a_long_step)
    bodies += (be_late_in_a_deep_network, leave_while_the_other_receives, wait_in_vain_for_one_that_computes)
    worlds = {body.__name__: World(body) for body in bodies}
    worlds |= {name: World(meet_in_different_exchanges, ([name], [])) for name in DIFFERENT}
    return run_side_by_side(nursery, tmp_path_factory.mktemp("two"), worlds)


@pytest.fixture(scope="module")
def wide(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Rank]]:
    worlds = {
        "exchanges": World(meet_in_different_exchanges, (list(DIFFERENT), [2, 1]), size=3),
        "death": World(die_while_one_computes, size=3),
        "quick": World(exchange_quickly),
        "failures": World(fail_again_and_again, (6,), size=3),
    }
    return run_side_by_side(nursery, tmp_path_factory.mktemp("wide"), worlds)


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_in_different_exchanges_are_told_both_names(two: dict[str, list[Rank]], name: str) -> None:
    """Ranks in different exchanges hear both names."""
    assert_told(two[name], name)


@pytest.mark.wide
@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_of_two_hosts_in_different_exchanges_are_told_both_names(wide: dict[str, list[Rank]], name: str) -> None:
    assert_told(wide["exchanges"], name)


def assert_told(ranks: list[Rank], name: str) -> None:
    assert [rank.code for rank in ranks] == [0] * len(ranks), [rank.stderr for rank in ranks]
    for rank in ranks:
        kind, text, took = rank.notes[name]
        assert kind == "MismatchError", text
        assert_names_both(text, ranks)
        assert took < 3 * rank.slowness
        assert rank.notes["sum"] == len(ranks) * (len(ranks) + 1) / 2


def assert_names_both(text: str, ranks: list[Rank]) -> None:
    left, right = text.split(", while ")
    if "the right" in left:
        left, right = right, left
    assert "the left" in left and "the right" in right, text
    others = "|".join(str(rank.pid) for rank in ranks if rank is not ranks[1])
    assert re.search(rf"rank [02] \(host \S+, pid ({others})\)", left), text
    assert f"pid {ranks[1].pid})" in right and "rank 1 (host" in right, text
    assert "Every rank must make the same calls in the same order" in text


def test_a_wait_in_a_thread_of_autograd_is_one_of_training(two: dict[str, list[Rank]]) -> None:
    ranks = two["wait_in_a_thread_of_autograd"]
    for rank in ranks:
        assert rank.notes["thread"] == "_DummyThread"
        kind, text = rank.notes["error"]
        assert kind == "MismatchError"
        assert_names_both(text, ranks)
        assert rank.noted_at["error"] - rank.noted_at["begin"] < 3 * rank.slowness


def test_a_rank_in_torchs_own_collective_is_named_with_its_line(two: dict[str, list[Rank]]) -> None:
    """An error names the line of a late rank."""
    first, second = two["wait_for_one_in_torchs_collective"]
    assert (first.code, second.code) == (1, 1)
    kind, text = first.notes["error"]
    assert kind == "MismatchError", text
    assert f"rank 1 (host {HOSTNAME}, pid {second.pid}) is not in any collective of ddp_callbacks" in text
    assert "it last was in the begin of a run" in text
    assert re.search(r"waits in torch.distributed's all_reduce at .*test_mismatch\.py:\d+", text), text
    assert first.noted_at["error"] - first.noted_at["begin"] < 10 * first.slowness


@pytest.mark.waits(5)
@pytest.mark.parametrize("body", [be_ahead, take_a_long_step, be_late_in_a_deep_network])
def test_a_rank_that_is_ahead_or_computes_for_long_is_no_mismatch(two: dict[str, list[Rank]], body: Any) -> None:
    """A rank in a long step raises nothing."""
    ranks = two[body.__name__]
    assert [rank.notes.get("sum") for rank in ranks] == [2.0, 2.0], [rank.stderr for rank in ranks]


@pytest.mark.waits(5)
def test_a_long_wait_leaves_nothing_in_the_store(two: dict[str, list[Rank]]) -> None:
    assert [rank.notes["keys"] for rank in two["take_a_long_step"]] == [0, 0]


@pytest.mark.waits(5)
def test_a_rank_that_has_sent_all_may_leave_while_the_other_still_receives(two: dict[str, list[Rank]]) -> None:
    """A rank that has sent all may leave while others receive."""
    first, second = two["leave_while_the_other_receives"]
    assert (first.code, second.code, second.stderr) == (0, 0, "")
    took = first.ended - first.noted_at["leaves"]
    assert took < 4 * first.slowness, "rank 0 must not wait for the other, either"


def test_a_rank_that_is_late_is_named_alive_with_its_line(two: dict[str, list[Rank]]) -> None:
    first, second = two["wait_in_vain_for_one_that_computes"]
    kind, text = first.notes["error"]
    assert kind == "PeerError", text
    assert 'waited for the barrier "the second message" in vain, though every rank is alive' in text, text
    assert f"pid {second.pid}) is not in any collective of ddp_callbacks: it last was in the first message" in text
    assert re.search(r"is at .*test_mismatch\.py:\d+\.", text), text


@pytest.mark.wide
def test_a_rank_that_holds_the_gil_is_not_named_dead_beside_one_that_is(wide: dict[str, list[Rank]]) -> None:
    ranks = wide["death"]
    assert [rank.code for rank in ranks] == [1, 1, -signal.SIGKILL], [rank.stderr for rank in ranks]
    for rank in ranks[:2]:
        kind, text = rank.notes["error"]
        assert kind == "PeerError" and text.startswith(f"rank 2 (host {HOSTNAME}, pid {ranks[2].pid}) died")
        assert "rank 1 (" not in text.split(" was waiting for ")[0].split(" died or went silent while ")[0]
    assert ranks[0].noted_at["error"] - ranks[2].noted_at["happens"] < 6 * ranks[0].slowness


@pytest.mark.wide
def test_failed_groups_leave_neither_descriptors_nor_threads(wide: dict[str, list[Rank]]) -> None:
    for rank in wide["failures"]:
        assert rank.code == 0, rank.stderr
        held = rank.notes["held"]
        assert all(later - first < 3 for later, first in zip(held[-1], held[1], strict=True)), held  # a group has 4


@pytest.mark.wide
def test_a_step_sends_no_message_to_the_store(wide: dict[str, list[Rank]]) -> None:
    """A step asks the store nothing."""
    for rank in wide["quick"]:
        assert rank.notes["asked"] == [], rank.stderr


@pytest.mark.wide
def test_a_barrier_that_another_rank_never_reaches_is_named(wide: dict[str, list[Rank]]) -> None:
    kind, text = wide["quick"][0].notes["error"]
    assert kind == "PeerError" and 'still waits for the barrier "the end"' in text, text
