"""What all ranks may want at the same moment is found out when one of them wants it."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from distributed import run_distributed

from ddp_callbacks.comm.collectives import any_rank
from ddp_callbacks.errors import PeerError
from ddp_callbacks.process_group.failures import report_failure
from ddp_callbacks.process_group.votes import abstain, is_unanimous

DOING = "the decision to stop"


def vote_four_times() -> list[bool]:
    results = [is_unanimous(DOING)]
    for absent in (0, 1):  # it goes on, and meets the other only in the exchange behind
        if dist.get_rank() == absent:
            abstain()
        else:
            results.append(is_unanimous(DOING))
        any_rank(False, "an exchange")
    return [*results, is_unanimous(DOING)]


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.wide)])
def test_a_vote_is_unanimous_only_where_all_ranks_cast_it_at_that_moment(world_size: int) -> None:
    for rank, results in enumerate(run_distributed(vote_four_times, world_size)):
        assert results == [True, *([False] if rank < 2 else [False, False]), True]


def fail_while_another_votes() -> str:
    if dist.get_rank() == 1:
        report_failure(RuntimeError("the disk is full"))
        return ""
    begin = time.monotonic()
    with pytest.raises(PeerError) as caught:
        is_unanimous(DOING)
    assert time.monotonic() - begin < 20
    return str(caught.value)


def test_a_rank_that_votes_hears_of_one_that_fails_instead() -> None:
    text, _ = run_distributed(fail_while_another_votes, 2)
    assert text.startswith("rank 1 failed with RuntimeError: the disk is full")
