"""Who takes part in a job, as the launcher notes it in the store in which the processes meet.

With ``ddprun --keep-going``, a job continues without processes that died. The launcher alone writes who is left, so
there is one authority: a part of the job that it cannot reach never continues by itself. Each list is a *generation*.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import replace
from typing import TypeAlias

import torch.distributed as dist

from ddp_callbacks.environment import ENDED, KEEP_GOING, MEMBERS, SUCCESSOR, WorkerEnv
from ddp_callbacks.errors import PeerError

_LOOK = 0.02  # seconds between two looks at the store
_PATIENCE = 30.0  # seconds within which the launcher notices a death

Process: TypeAlias = tuple[int, int]  # the rank that it was started with, and how often that had been replaced before


class Members:
    """The members of a job, and this process among them.

    A process that the launcher has started in place of a lost one becomes a member once it is ready. The others let it
    into their group when they form the next one.

    Args:
        store: The store in which the processes meet.
        env: The place that this process was started with.

    Attributes:
        may_change: Whether the launcher may write another list.
        generation: The number of the list that this process follows; 0 is all that were started.
        admits: Whether this process forms groups with new members. The same on all members of a group.
        is_new: Whether this process takes the place of a lost one, and has not been in a group yet.
    """

    def __init__(self, store: dist.Store, env: WorkerEnv) -> None:
        self._store, self._started = store, env
        self.may_change = bool(os.environ.get(KEEP_GOING))
        self.is_new = self.may_change and bool(os.environ.get(SUCCESSOR))
        self.generation, self.admits = 0, True
        self._ranks: list[Process] = [(rank, 0) for rank in range(env.world_size)]

    @property
    def store(self) -> dist.Store:
        """A part of the store that no other group uses."""
        return dist.PrefixStore(f"{self.generation} {self._ranks}", self._store) if self.generation else self._store

    def follow(self) -> WorkerEnv:
        """Follow the launcher's newest list, and return this process's place in it.

        Local; but a process that the launcher has just started in place of a lost one blocks until it is a member.

        Raises:
            PeerError: The launcher has given this process up.
        """
        if self.is_new and not self._is_listed():
            self._become_member()
        self.generation, self._ranks = self._newest()
        ranks = [rank for rank, _ in self._ranks]
        if self._started.rank not in ranks:
            raise PeerError(
                f"the launcher has given up this process, which was started as rank {self._started.rank}, and the "
                "others continue without it. Its machine did not answer for too long: check the network."
            )
        return replace(self._started, rank=ranks.index(self._started.rank), world_size=len(ranks))

    def _become_member(self) -> None:
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "a") as launcher:
            launcher.write('{"ready": true}\n')
        while not self._is_listed():  # the launcher ends this process at the end of the job
            time.sleep(_LOOK)

    def _is_listed(self) -> bool:
        return any(rank == self._started.rank for rank, _ in self._newest()[1])

    def is_outdated(self) -> bool:
        """Whether the launcher has written another list than the one that this process follows. Local."""
        return self._newest()[0] > self.generation

    def have_changed(self) -> bool:
        """Whether this process would form a group of other members now. Local."""
        return self._newest()[1] != self._ranks

    def await_change(self) -> bool:
        """Wait until :meth:`have_changed`; return whether it is so. Blocks for 30 seconds at most."""
        end = time.monotonic() + _PATIENCE
        while self.may_change and time.monotonic() < end:
            if self.have_changed():
                return True
            time.sleep(_LOOK)
        return False

    def ended(self) -> set[int]:
        """Return the ranks that have exited with code 0."""
        started = {int(rank) for rank in self._read(ENDED).split()}
        return {rank for rank, (number, _) in enumerate(self._ranks) if number in started}

    def _newest(self) -> tuple[int, list[Process]]:
        if not self.may_change or not (noted := self._read(MEMBERS)):
            return self.generation, self._ranks
        found = json.loads(noted)
        replaced = found.get("replaced", {})
        listed = [(rank, replaced.get(str(rank), 0)) for rank in found["ranks"]]
        return found["generation"], [each for each in listed if self.admits or each in self._ranks]

    def _read(self, key: str) -> str:
        with contextlib.suppress(dist.DistError):  # the store's host has died, which the control channel reports
            return self._store.get(key).decode() if self._store.check([key]) else ""
        return ""
