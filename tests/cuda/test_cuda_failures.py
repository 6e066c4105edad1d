"""Beside a GPU, a rank that fails is named on the other within seconds; and which device a process takes there."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import device_failures as failures
import pytest
from kit.ranks import HOSTNAME, Nursery

WITHIN = 10.0  # seconds
TIMEOUT = 10.0  # of the process group, for a rank that goes silent
ONE_GPU = {"CUDA_VISIBLE_DEVICES": "0"}


def require_named(kind: str, folder: Path, misfortune: str, reads: bool) -> None:
    ranks = Nursery(kind).run_watched(failures.train_until, 2, folder, kind, misfortune, reads, deadline=150.0)
    if kind == "nccl":  # torch ends the process: its watchdog waits a minute for debugging, and aborts
        failures.assert_says(ranks, misfortune, WITHIN)
        assert ranks[0].code in (1, -signal.SIGABRT), ranks[0].stderr
    else:
        failures.assert_named(ranks, misfortune, WITHIN)


@pytest.mark.parametrize("reads", [False, True], ids=["", "while the host waits for the loss"])
@pytest.mark.parametrize("misfortune", ["raises", "is killed", "votes"])
def test_a_rank_on_a_gpu_that_fails_is_named_within_seconds(
    kind: str, tmp_path: Path, misfortune: str, reads: bool
) -> None:
    """A failed rank frees hosts waiting for GPUs."""
    require_named(kind, tmp_path, misfortune, reads)


def test_beside_a_gpu_a_rank_on_the_cpu_that_fails_is_named_within_seconds(tmp_path: Path) -> None:
    require_named("cpu", tmp_path, "is killed", True)


@pytest.mark.parametrize("kind", ["gloo"], indirect=True)  # by NCCL, torch ends the process without a name
def test_a_rank_on_a_gpu_that_goes_silent_is_named_after_the_timeout(kind: str, tmp_path: Path) -> None:
    """A timeout names silent ranks."""

    def kill_the_stopped(rank: int, pids: list[int]) -> None:
        if rank == 0:
            os.kill(pids[1], signal.SIGKILL)

    arguments = (kind, "is stopped", True, TIMEOUT)
    ranks = Nursery(kind).run_watched(
        failures.train_until, 2, tmp_path, *arguments, on_end=kill_the_stopped, deadline=120.0
    )
    failures.assert_named(ranks, "is stopped", TIMEOUT + 3 * WITHIN)


def test_processes_with_models_on_the_cpu_use_shared_memory_and_no_gpu(tmp_path: Path) -> None:
    """Beside a GPU, processes on CPUs use shared memory alone."""
    ranks = Nursery("cpu").run(failures.train_on_cpus, 2, tmp_path, deadline=90.0)
    assert [(rank.code, rank.notes) for rank in ranks] == [(0, {"uses a GPU": False})] * 2, ranks
    assert "summing CPU tensors using shared memory" in ranks[0].stderr


def test_two_processes_on_one_gpu_are_named_before_they_train(tmp_path: Path) -> None:
    first, second = Nursery("cpu").run(failures.share_a_gpu, 2, tmp_path, environ=ONE_GPU, deadline=90.0)
    says = f"the models of rank 0 (host {HOSTNAME}, pid {first.pid}) and rank 1 (host {HOSTNAME}, pid {second.pid})"
    for rank in (first, second):
        kind, text = rank.notes["error"]
        assert kind == "ConfigurationError" and says in text and "every rank needs a separate GPU" in text, text
