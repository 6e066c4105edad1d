"""All ranks stop at the same moment once one of them has been asked to."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed

from ddp_callbacks import Preemption
from ddp_callbacks.comm.collectives import all_gather_json, all_reduce
from ddp_callbacks.errors import ConfigurationError, PeerError
from ddp_callbacks.process_group.failures import report_failure


def steps_until_a_stop(preemption: Preemption, most: int = 10_000) -> int:
    """How many steps this rank takes, of which each waits for all ranks."""
    for step in range(1, most + 1):
        all_reduce(torch.ones(1), "a step")
        if preemption.is_requested():
            return step
    return 0


def stop_by_a_signal_to_one_rank_while_the_others_are_in_a_step() -> list[tuple[int, str]]:
    ends = []
    for rank, number in ((1, signal.SIGUSR1), (0, signal.SIGTERM)):
        with Preemption() as preemption:
            if dist.get_rank() == rank:
                assert not preemption.is_requested()  # a moment of its own before the others' first
                os.kill(os.getpid(), number)
            else:
                assert not preemption.is_requested()
            ends.append((steps_until_a_stop(preemption), preemption.reason))
            assert preemption.is_requested()  # it stays so
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return ends


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.wide)])
def test_a_signal_to_one_rank_stops_all_at_the_same_step_and_is_named_on_all(world_size: int) -> None:
    first, *others = run_distributed(stop_by_a_signal_to_one_rank_while_the_others_are_in_a_step, world_size)
    assert all(ends == first for ends in others)
    (steps_one, reason_one), (steps_two, reason_two) = first
    assert steps_one > 0 and steps_two > 0
    assert reason_one.startswith("SIGUSR1 on rank 1 (host ") and reason_two.startswith("SIGTERM on rank 0 (host ")


def stop_ranks_that_do_not_wait_for_each_other() -> int:
    """Rank 0 is far ahead when rank 1 is asked to stop, as with local steps."""
    taken = 0
    with Preemption() as preemption:
        if dist.get_rank() == 0:
            while taken < 500:
                assert not preemption.is_requested()
                taken += 1
        all_reduce(torch.ones(1), "a meeting")
        if dist.get_rank() == 1:
            preemption.request("the budget is spent")
        while not preemption.is_requested():
            taken += 1
            if dist.get_rank() == 0:
                time.sleep(1e-3)
        assert preemption.reason.startswith("the budget is spent on rank 1 (host ")
    return taken


def test_ranks_that_are_far_apart_stop_where_the_first_of_them_is() -> None:
    one, other = run_distributed(stop_ranks_that_do_not_wait_for_each_other, 2)
    assert one == other >= 500


def ask_when_another_rank_has_ended() -> list[bool]:
    answers = []
    with Preemption() as preemption:
        if dist.get_rank() == 1:
            answers = [preemption.is_requested() for _ in range(2)]
            preemption.request("too late for rank 0")
            answers += [preemption.is_requested()]
        else:
            answers = [preemption.is_requested() for _ in range(3)]
    all_gather_json(None, "the end")
    return answers


def test_a_request_behind_the_last_moment_of_another_rank_stops_nobody_and_blocks_nobody() -> None:
    assert run_distributed(ask_when_another_rank_has_ended, 2) == [[False] * 3] * 2


def stop_by_time() -> list[str]:
    # Only the clock of one rank says so.
    limit = timedelta(seconds=0.3) if dist.get_rank() == 1 else timedelta(hours=1)
    with Preemption(time_limit=limit) as preemption:
        begin = time.monotonic()
        steps_until_a_stop(preemption, 10**6)
        assert 0.2 < time.monotonic() - begin < 20
        return [preemption.reason]


def test_a_time_limit_stops_all() -> None:
    one, other = run_distributed(stop_by_time, 2)
    assert one == other and one[0].startswith("the time limit on rank 1")


def fail_while_another_wants_to_stop() -> str:
    if dist.get_rank() == 1:  # it enters no context: its process may have died as well
        report_failure(RuntimeError("the disk is full"))
        return ""
    begin = time.monotonic()
    with Preemption() as preemption, pytest.raises(PeerError) as caught:
        preemption.request("a test")
        while not preemption.is_requested():
            time.sleep(1e-3)
    assert time.monotonic() - begin < 20
    return str(caught.value)


def test_a_rank_that_wants_to_stop_hears_of_one_that_fails_instead() -> None:
    text, _ = run_distributed(fail_while_another_wants_to_stop, 2)
    assert text.startswith("rank 1 failed with RuntimeError: the disk is full")


# --- one process ------------------------------------------------------------------------------------------------------


def test_one_process_stops_by_a_signal_a_request_and_time_without_a_group() -> None:
    with Preemption() as preemption:
        assert not preemption.is_requested()
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.is_requested()
        assert preemption.reason.startswith("SIGTERM on rank 0 (host ")
    with Preemption() as preemption:
        assert not preemption.is_requested()
        preemption.request("a test")
        assert preemption.is_requested()
    with Preemption(time_limit=timedelta(microseconds=1)) as preemption:
        assert preemption.is_requested()
        assert preemption.reason.startswith("the time limit")


def test_a_time_limit_must_be_longer_than_zero() -> None:
    with pytest.raises(ConfigurationError, match="time_limit must be longer than zero, got 0:00:00"):
        Preemption(time_limit=timedelta(0))


PROGRAM = """
import os, signal, sys, time
from ddp_callbacks import Preemption
from ddp_callbacks.process_group import preemption
preemption.SAME = float(sys.argv[1])
with Preemption() as asked:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here", asked.is_requested(), flush=True)
"""


@pytest.mark.parametrize(("same", "code", "printed"), [(3.0, 0, "still here True\n"), (0.0, -signal.SIGTERM, "")])
def test_a_second_signal_ends_the_process_at_once_unless_it_comes_right_behind_the_first(
    same: float, code: int, printed: str
) -> None:
    command = [sys.executable, "-c", PROGRAM, str(same)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (code, printed), ended.stderr


def test_a_forked_child_still_ends_when_it_is_terminated() -> None:
    with Preemption() as preemption:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        child.terminate()
        child.join(20)
        assert child.exitcode == -signal.SIGTERM
        assert not preemption.is_requested()
