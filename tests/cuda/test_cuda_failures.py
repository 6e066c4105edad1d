"""A rank on a GPU that fails is named on the other, within seconds, by gloo and by NCCL."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import device_failures as failures
import device_trainers as trainers
import pytest
from kit.ranks import Nursery

WITHIN = 10.0  # seconds
TIMEOUT = 10.0  # of the process group, for a rank that goes silent


@pytest.mark.parametrize("reads", [False, True], ids=["", "while the host waits for the loss"])
@pytest.mark.parametrize("misfortune", ["raises", "is killed"])
def test_a_rank_on_a_gpu_that_fails_is_named_within_seconds(
    fresh: Nursery, tmp_path: Path, misfortune: str, reads: bool
) -> None:
    """A failed rank frees hosts waiting for GPUs."""
    ranks = fresh.run_watched(failures.train_until, 2, tmp_path, fresh.kind, misfortune, 1, reads, deadline=90.0)
    failures.assert_named(ranks, misfortune, WITHIN)


def test_a_rank_on_a_gpu_that_goes_silent_is_named_after_the_timeout(fresh: Nursery, tmp_path: Path) -> None:
    """A timeout names silent ranks."""

    def kill_the_stopped(rank: int, pids: list[int]) -> None:
        if rank == 0:
            os.kill(pids[1], signal.SIGKILL)

    arguments = (fresh.kind, "is stopped", 1, True, TIMEOUT)
    ranks = fresh.run_watched(failures.train_until, 2, tmp_path, *arguments, on_end=kill_the_stopped, deadline=120.0)
    failures.assert_named(ranks, "is stopped", TIMEOUT + 3 * WITHIN)


def test_two_ranks_on_a_gpu_in_different_exchanges_are_named(fresh: Nursery, tmp_path: Path) -> None:
    ranks = fresh.run_watched(failures.meet_in_different_exchanges, 2, tmp_path, fresh.kind, deadline=90.0)
    failures.assert_lost_ranks_are_named(ranks, WITHIN)


def test_on_a_gpu_a_run_after_two_that_failed_is_that_of_one_process(fresh: Nursery, tmp_path: Path) -> None:
    ranks = fresh.run_watched(trainers.train_after_a_failure, 2, tmp_path, fresh.kind, deadline=180.0)
    trainers.assert_trained_after(ranks)
