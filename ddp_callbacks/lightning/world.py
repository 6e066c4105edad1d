"""The place of this process, in Lightning's words: from the launcher that started it, as everywhere in this package."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from ddp_callbacks.environment import WorkerEnv
from ddp_callbacks.process_group import join_process_group


class LauncherEnvironment:
    """Lightning's cluster environment for processes that ddprun, torchrun, srun or mpirun has started.

    The launcher says how many processes there are, so that ``devices`` and ``num_nodes`` of the Trainer need not
    repeat it (Lightning's own environments raise unless they do).
    """

    def __init__(self, env: WorkerEnv) -> None:
        self._env = env

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self._env.host or "127.0.0.1"

    @property
    def main_port(self) -> int:
        return self._env.port or 0

    @staticmethod
    def detect() -> bool:
        return WorkerEnv.from_environ().world_size > 1

    def world_size(self) -> int:
        return self._env.world_size

    def set_world_size(self, size: int) -> None:
        """The launcher has said it."""

    def global_rank(self) -> int:
        return self._env.rank

    def set_global_rank(self, rank: int) -> None:
        """The launcher has said it."""

    def local_rank(self) -> int:
        return self._env.local_rank

    def node_rank(self) -> int:
        for name in ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID"):
            if os.environ.get(name, "").isdigit():
                return int(os.environ[name])
        return 0 if self._env.rank == self._env.local_rank else 1  # prepare_data asks whether it is the first node

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Nothing to compare."""

    def teardown(self) -> None:
        """Nothing was changed."""


def environment_of_job(chosen: Any) -> Any:
    """The cluster environment to use where Lightning has ``chosen`` one.

    A launcher that Lightning does not know (mpirun without mpi4py, say) would leave each process alone in a world of
    its own.
    """
    if type(chosen).__module__.startswith(("lightning.", "lightning_fabric.", "pytorch_lightning.")):
        started_by_lightning = "LOCAL_RANK" in os.environ and "RANK" not in os.environ and "WORLD_SIZE" in os.environ
        if not started_by_lightning and (env := WorkerEnv.from_environ()).world_size > 1:
            return LauncherEnvironment(env)
    return chosen


def join(environment: Any, backend: str | None, timeout: timedelta) -> None:
    """Meet the other processes of ``environment``. Blocks until all are there."""
    if isinstance(environment, LauncherEnvironment):
        join_process_group(backend=backend, timeout=timeout)
        return
    size = environment.world_size()
    at = (environment.main_address, environment.main_port) if size > 1 else (None, None)
    join_process_group(environment.global_rank(), size, *at, backend=backend, timeout=timeout)
