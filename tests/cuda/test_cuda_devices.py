"""Which device a process takes on a machine with one GPU; its CPU is as good as any other."""

from __future__ import annotations

from pathlib import Path

import device_failures as failures
import pytest
from kit.ranks import Nursery

WITHIN = 10.0  # seconds


@pytest.fixture
def cpu() -> Nursery:
    """Ranks that nothing keeps from the GPU."""
    return Nursery("cpu")


def test_processes_with_models_on_the_cpu_use_shared_memory_and_no_gpu(cpu: Nursery, tmp_path: Path) -> None:
    """Beside a GPU, processes on CPUs use shared memory alone."""
    ranks = cpu.run_watched(failures.train_on_cpus, 3, tmp_path, deadline=90.0)
    failures.assert_trained_on_cpus(ranks, has_gpu=True)


@pytest.mark.parametrize("misfortune", ["raises", "is killed"])
def test_beside_a_gpu_a_rank_on_the_cpu_that_fails_is_named_within_seconds(
    cpu: Nursery, tmp_path: Path, misfortune: str
) -> None:
    ranks = cpu.run_watched(failures.train_until, 2, tmp_path, "cpu", misfortune, 1, True, deadline=90.0)
    failures.assert_named(ranks, misfortune, WITHIN)


def test_beside_a_gpu_gradients_of_cpus_are_compressed_by_power_sgd(cpu: Nursery, tmp_path: Path) -> None:
    failures.assert_compressed(cpu.run_watched(failures.compress_between_made_up_hosts, 2, tmp_path, deadline=90.0))


def test_a_process_that_sees_one_gpu_takes_it(fresh: Nursery, tmp_path: Path) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "0"}
    ranks = fresh.run_watched(failures.take_the_only_gpu, 2, tmp_path, fresh.kind, environ=environ, deadline=90.0)
    assert [rank.code for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    assert [rank.notes["found"] for rank in ranks] == [[1, 0, ["cuda:0"]]] * 2


def test_more_processes_than_gpus_are_refused_with_the_number_of_both(tmp_path: Path) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "0"}
    ranks = Nursery("cpu").run_watched(
        failures.ask_for_more_processes_than_gpus, 2, tmp_path, environ=environ, deadline=90.0
    )
    failures.assert_both_are_counted(ranks)
