"""Lightning's view of this process's rank and world size: those of its process group, before that the launcher's."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddp_callbacks.cluster.environment import WorkerEnv, stated_env
from ddp_callbacks.process_group import current_env, get_rank, get_world_size, join_process_group, require_place

_LIGHTNINGS = ("lightning.", "lightning_fabric.", "pytorch_lightning.")


class JobEnvironment:
    """Lightning's cluster environment for processes whose group or launcher only this package knows."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return current_env().world_size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the group or the launcher decides."""

    def global_rank(self) -> int:
        return current_env().rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the group or the launcher decides."""

    def local_rank(self) -> int:
        return current_env().local_rank

    def node_rank(self) -> int:
        """Return 0 on the first node, 1 on any other: ``prepare_data`` asks whether it is the first."""
        env = current_env()
        return int(env.rank != env.local_rank)

    def teardown(self) -> None:
        """Do nothing: there is nothing to restore."""


def environment_of_job(chosen: Any) -> Any:
    """Return the cluster environment to use: the one that Lightning has ``chosen``, or a better one.

    If there is a process group, or under a launcher that Lightning does not know (mpirun without mpi4py, for example),
    its choice would make each process rank 0 of a world of its own.
    """
    is_default = type(chosen).__name__ == "LightningEnvironment"  # which takes rank and size from ``devices``
    if dist.is_initialized():
        is_right = (chosen.global_rank(), chosen.world_size()) == (get_rank(), get_world_size()) and not is_default
        is_lightnings = type(chosen).__module__.startswith(_LIGHTNINGS)
        return JobEnvironment() if is_lightnings and not is_right else chosen
    by_lightning = "LOCAL_RANK" in os.environ and "RANK" not in os.environ and "WORLD_SIZE" in os.environ
    if by_lightning or not is_default:
        return chosen
    return JobEnvironment() if WorkerEnv.from_environ().world_size > 1 else chosen


def join(environment: Any, device: torch.device, backend: str | None, timeout: timedelta) -> None:
    """Join the other processes of ``environment``, to compute on ``device``. Blocks until all are there."""
    rank, size = environment.global_rank(), environment.world_size()
    meet = functools.partial(join_process_group, backend=backend, device=device, timeout=timeout)
    stated = stated_env()
    if dist.is_initialized():
        require_place(rank, size, f"global_rank() and world_size() of {type(environment).__name__}")
    elif (rank, size) != (stated.rank, stated.world_size):
        place = (environment.main_address, environment.main_port) if size > 1 else (None, None)
        meet = functools.partial(meet, rank, size, *place)
    meet()
