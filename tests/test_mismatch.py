"""Ranks that live and are not where the others expect them: told by name if they never will be, else left in peace."""

from __future__ import annotations

import _thread
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nursery import Nursery, note, noting_errors

from ddp_callbacks import join_process_group
from ddp_callbacks.comm.collectives import all_gather_json, all_reduce, any_rank, broadcast, broadcast_tensors
from ddp_callbacks.comm.process_group import ProcessGroupAllReduce
from ddp_callbacks.comm.protocol import allocate
from ddp_callbacks.comm.scalars import ScalarExchange
from ddp_callbacks.comm.topology import choose_all_reduce
from ddp_callbacks.process_group import resolve_group
from ddp_callbacks.process_group.failures import enter, wait
from ddp_callbacks.process_group.runs import begin_run

WORLD_SIZE = 3  # the odd one is rank 1
Call = Callable[[], Any]


def my_rank() -> int:
    return int(os.environ["RANK"])


def sum_in_shared_memory(numel: int, doing: str) -> Any:
    return choose_all_reduce(dist.group.WORLD, [torch.device("cpu")]).launch(torch.ones(numel), doing).wait(doing)


def sum_by_gloo(numel: int, doing: str) -> Any:
    return ProcessGroupAllReduce(dist.group.WORLD, allocate).launch(torch.ones(numel), doing).wait(doing)


def exchange(doing: str) -> Any:
    return ScalarExchange().exchange([1.0], doing)


def scenarios() -> dict[str, tuple[Call, Call]]:
    """What the ranks do, and what the odd one does; each of them says "the left" and "the right" of it."""
    rows = ScalarExchange()
    return {
        "one message, two meanings": (lambda: any_rank(True, "the left"), lambda: any_rank(True, "the right")),
        "a decision and a message": (lambda: any_rank(True, "the left"), lambda: all_gather_json(1, "the right")),
        "two broadcasts": (
            # Who sends does not hear of it until it waits for an answer.
            lambda: (broadcast_tensors(1, [], "the left"), any_rank(False, "what comes next")),
            lambda: broadcast_tensors(1, [], "the right"),
        ),
        "two kinds of message": (
            lambda: all_gather_json(1, "the left"),
            lambda: broadcast(torch.ones(3), "the right"),
        ),
        "rows of numbers": (lambda: rows.exchange([1.0], "the left"), lambda: rows.exchange([1.0], "the right")),
        "shared memory and gloo": (
            lambda: rows.exchange([1.0], "the left"),
            lambda: broadcast_tensors(1, [], "the right"),
        ),
        "sums in shared memory": (
            lambda: sum_in_shared_memory(1000, "the left"),
            lambda: sum_in_shared_memory(1000, "the right"),
        ),
        "small sums by gloo": (
            lambda: all_reduce(torch.ones(10), "the left"),
            lambda: all_reduce(torch.ones(10), "the right"),
        ),
        "a small and a large sum by gloo": (
            lambda: sum_by_gloo(10, "the left"),
            lambda: sum_by_gloo(1 << 20, "the right"),
        ),
    }


def meet_in_different_exchanges() -> None:
    torch.set_num_threads(1)
    join_process_group()
    begin_run()
    names = list(scenarios())
    for name in names:
        calls = scenarios()[name]
        any_rank(False, "the start of a scenario")
        begin = time.monotonic()
        try:
            note(name, ["no error", repr(calls[my_rank() == 1]()), time.monotonic() - begin])
        except Exception as error:
            note(name, [type(error).__name__, str(error), time.monotonic() - begin])
        begin_run()  # of the next, as a sweep that goes on: the ranks can exchange again
    total = all_reduce(torch.tensor([my_rank() + 1.0]), "the sum at the end")
    note("sum", float(total))


def test_ranks_in_different_collectives_are_told_both_names_within_three_seconds(
    nursery: Nursery, tmp_path: Path
) -> None:
    ranks = nursery.run_watched(meet_in_different_exchanges, WORLD_SIZE, tmp_path)
    assert [rank.code for rank in ranks] == [0] * WORLD_SIZE, [rank.stderr for rank in ranks]
    names = [name for name in ranks[0].notes if name != "sum"]
    assert len(names) == 9
    for name in names:
        for rank in ranks:
            kind, text, took = rank.notes[name]
            assert kind == "MismatchError", (name, rank.notes[name])
            assert_names_both(text, [r.pid for r in ranks])
            assert took < 3 * rank.slowness, (name, took, rank.slowness)
    assert [rank.notes["sum"] for rank in ranks] == [6.0] * WORLD_SIZE


def assert_names_both(text: str, pids: list[int]) -> None:
    left, right = text.split(", while ")
    if "the right" in left:
        left, right = right, left
    assert "the left" in left and "the right" in right, text
    assert re.search(rf"rank [02] \(host \S+, pid ({pids[0]}|{pids[2]})\)", left), text
    assert f"pid {pids[1]})" in right and "rank 1 (host" in right, text
    assert "Every rank must make the same calls in the same order" in text


def meet_in_a_thread_of_autograd() -> None:
    """Python has not made this thread: so it is for hooks that backward calls where the gradients are on a GPU."""
    join_process_group()
    begin_run()
    ended = threading.Event()

    def backward() -> None:
        note("thread", type(threading.current_thread()).__name__)
        doing = "the right" if my_rank() == 1 else "the left"
        enter(doing)
        try:
            wait(Late(60), doing, resolve_group())
        except Exception as error:
            note("error", [type(error).__name__, str(error)])
        ended.set()

    note("begin")
    _thread.start_new_thread(backward, ())
    assert ended.wait(90)


def test_a_wait_in_a_thread_of_autograd_is_one_of_training(nursery: Nursery, tmp_path: Path) -> None:
    ranks = nursery.run_watched(meet_in_a_thread_of_autograd, WORLD_SIZE, tmp_path)
    for rank in ranks:
        assert rank.notes["thread"] == "_DummyThread"
        kind, text = rank.notes["error"]
        assert kind == "MismatchError"
        assert_names_both(text, [r.pid for r in ranks])
        assert rank.noted_at["error"] - rank.noted_at["begin"] < 3 * rank.slowness


def wait_while_one_is_in_torchs() -> None:
    join_process_group(timeout=timedelta(seconds=120))
    begin_run()
    note("begin")
    with noting_errors():
        if my_rank() == 1:
            dist.all_reduce(torch.ones(3))  # torch's own, on this rank alone
        any_rank(False, "the left")


def test_a_rank_in_torchs_own_collective_is_named_with_its_line(nursery: Nursery, tmp_path: Path) -> None:
    ranks = nursery.run_watched(wait_while_one_is_in_torchs, WORLD_SIZE, tmp_path)
    assert [rank.code for rank in ranks] == [1] * WORLD_SIZE
    for rank in (ranks[0], ranks[2]):
        kind, text = rank.notes["error"]
        assert kind == "MismatchError", text
        assert (
            f"rank 1 (host {os.uname().nodename}, pid {ranks[1].pid}) is not in any collective of ddp_callbacks" in text
        )
        assert "it last was in the begin of a run" in text
        assert re.search(r"waits in torch.distributed's all_reduce at .*test_mismatch\.py:\d+", text), text
        assert rank.noted_at["error"] - rank.noted_at["begin"] < 10 * rank.slowness


class Late:
    """Something that comes after so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.at = time.monotonic() + seconds

    def wait_slice(self, seconds: float) -> bool:
        time.sleep(max(0.0, min(seconds, self.at - time.monotonic())))
        return time.monotonic() >= self.at


def be_slow_in_many_ways() -> None:
    """Rank 0 has sent its broadcast and waits in the next exchange while the others still receive; then a long step."""
    join_process_group()
    begin_run()
    world = dist.group.WORLD
    assert world is not None
    enter("a large broadcast")
    if my_rank() > 0:
        wait(Late(4), "a large broadcast", world)
    enter("what comes next")
    wait(Late(5 - 4 * (my_rank() > 0)), "what comes next", world)
    if my_rank() == 1:
        time.sleep(6)  # a long step
    note("sum", float(all_reduce(torch.ones(1), "a sum")))


def test_a_rank_that_is_ahead_or_computes_for_long_is_no_mismatch(nursery: Nursery, tmp_path: Path) -> None:
    ranks = nursery.run(be_slow_in_many_ways, WORLD_SIZE, tmp_path)
    assert [rank.notes.get("sum") for rank in ranks] == [3.0] * WORLD_SIZE, [rank.stderr for rank in ranks]


def die_while_one_computes() -> None:
    os.environ["DDP_CALLBACKS_SHARED_MEMORY"] = "0"
    join_process_group()
    begin_run()
    if my_rank() == 2:
        note("happens")
        os.kill(os.getpid(), signal.SIGKILL)
    if my_rank() == 1:
        time.sleep(8)
    with noting_errors():
        sum_by_gloo(1 << 20, "a large sum")


def test_a_rank_in_a_long_step_is_not_named_dead_beside_one_that_is(nursery: Nursery, tmp_path: Path) -> None:
    ranks = nursery.run_watched(die_while_one_computes, WORLD_SIZE, tmp_path)
    assert [rank.code for rank in ranks] == [1, 1, -signal.SIGKILL], [rank.stderr for rank in ranks]
    for rank in ranks[:2]:
        kind, text = rank.notes["error"]
        assert kind == "PeerError" and text.startswith(f"rank 2 (host {os.uname().nodename}, pid {ranks[2].pid}) died")
        assert "rank 1 (" not in text.split(" was waiting for ")[0].split(" died or went silent while ")[0]
    assert ranks[0].noted_at["error"] - ranks[2].noted_at["happens"] < 6 * ranks[0].slowness


def wait_in_vain_for_one_that_computes() -> None:
    os.environ["DDP_CALLBACKS_SHARED_MEMORY"] = "0"
    join_process_group(timeout=timedelta(seconds=3))
    begin_run()
    any_rank(False, "the first message")
    if my_rank() == 1:
        threading.Event().wait(9)  # in the standard library, as who waits for the workers of a loader
    with noting_errors():
        any_rank(False, "the second message")


def test_a_rank_that_is_late_is_named_alive_with_its_line(nursery: Nursery, tmp_path: Path) -> None:
    ranks = nursery.run(wait_in_vain_for_one_that_computes, 2, tmp_path)
    kind, text = ranks[0].notes["error"]
    assert kind == "PeerError" and "waited for the second message in vain, though every rank is alive" in text, text
    assert f"pid {ranks[1].pid}) is not in any collective of ddp_callbacks: it last was in the first message" in text
    assert re.search(r"is at .*test_mismatch\.py:\d+\.", text), text


# --- how much the store is asked --------------------------------------------------------------------------------------


def count_requests() -> dict[str, int]:
    """Of this process to the store, by method, from now on."""
    counts: dict[str, int] = {}

    def counting(name: str, method: Any) -> Any:
        def counted(*args: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return method(*args)

        return counted

    for name in ("add", "check", "get", "multi_get", "set", "compare_set"):
        setattr(dist.PrefixStore, name, counting(name, getattr(dist.PrefixStore, name)))
    return counts


def wait_for_rank_0() -> None:
    join_process_group()
    begin_run()
    any_rank(False, "the first message")
    counts = count_requests()
    for _ in range(20):
        any_rank(False, "a quick message")
    note("quick", sum(counts.values()))
    if my_rank() == 0:
        time.sleep(6.5)
    any_rank(False, "a late message")
    note("late", sum(counts.values()))


def test_who_waits_asks_the_store_as_often_beside_many_ranks_as_beside_one(nursery: Nursery, tmp_path: Path) -> None:
    asked = {}
    for size in (2, 6):
        folder = tmp_path / str(size)
        folder.mkdir()
        ranks = nursery.run(wait_for_rank_0, size, folder)
        assert [rank.code for rank in ranks] == [0] * size, [rank.stderr for rank in ranks]
        assert [rank.notes["quick"] for rank in ranks] == [0] * size, "a step sends no message to the store"
        asked[size] = max(rank.notes["late"] for rank in ranks[1:])
    # One rank asks where the others are, which costs it some requests for each of them.
    assert asked[6] <= asked[2] + 4 * 6, asked
    assert asked[6] < 90, asked


# --- who leaves early -------------------------------------------------------------------------------------------------


def leave_while_the_other_receives() -> None:
    join_process_group()
    begin_run()
    world = dist.group.WORLD
    assert world is not None
    enter("the last broadcast")
    if my_rank() == 1:
        wait(Late(7), "the last broadcast", world)  # its link is slow; rank 0 has sent all, and ends
        note("received")


def test_a_rank_that_has_sent_all_may_leave_while_the_other_still_receives(nursery: Nursery, tmp_path: Path) -> None:
    first, second = nursery.run(leave_while_the_other_receives, 2, tmp_path)
    assert (first.code, second.code) == (0, 0), second.stderr
    assert "received" in second.notes and second.stderr == ""
    assert first.ended > second.noted_at["received"] - 1, "the store was there as long as somebody looked into it"
