"""Lightning's view of this process's rank and world size, taken from the launcher that started the process."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

import torch

from ddp_callbacks.environment import WorkerEnv
from ddp_callbacks.process_group import join_process_group
from ddp_callbacks.schedulers import unknown_launcher


class LauncherEnvironment:
    """Lightning's cluster environment for processes whose launcher only this package knows."""

    @property
    def _env(self) -> WorkerEnv:
        return WorkerEnv.from_environ()

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return self._env.world_size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the launcher decides."""

    def global_rank(self) -> int:
        return self._env.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher decides."""

    def local_rank(self) -> int:
        return self._env.local_rank

    def node_rank(self) -> int:
        for name in ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID"):
            if os.environ.get(name, "").isdigit():
                return int(os.environ[name])
        return 0 if self._env.rank == self._env.local_rank else 1  # prepare_data asks whether it is the first node

    def teardown(self) -> None:
        """Do nothing: there is nothing to restore."""


def environment_of_job(chosen: Any) -> Any:
    """Return the cluster environment to use: the one that Lightning has ``chosen``, or a better one.

    Under a launcher that Lightning does not know (mpirun without mpi4py, for example), its choice would make each
    process rank 0 of a world of its own.
    """
    by_lightning = "LOCAL_RANK" in os.environ and "RANK" not in os.environ and "WORLD_SIZE" in os.environ
    if type(chosen).__name__ != "LightningEnvironment" or by_lightning:
        return chosen
    return LauncherEnvironment() if WorkerEnv.from_environ().world_size > 1 else chosen


def join(environment: Any, device: torch.device, backend: str | None, timeout: timedelta) -> None:
    """Join the other processes of ``environment``, to compute on ``device``. Blocks until all are there."""
    rank, size = environment.global_rank(), environment.world_size()
    meet = functools.partial(join_process_group, backend=backend, device=device, timeout=timeout)
    if type(environment).__name__ != "LightningEnvironment" and not unknown_launcher(os.environ):
        env = WorkerEnv.from_environ()
        if (env.rank, env.world_size) == (rank, size):
            meet()
            return
    meet(rank, size, *((environment.main_address, environment.main_port) if size > 1 else (None, None)))
