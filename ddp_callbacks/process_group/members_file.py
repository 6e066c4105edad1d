"""Who takes part in a job, as the launcher notes it in a file on each node.

With ``ddprun --keep-going``, a job continues without processes that died. The launcher alone writes who is left, so
there is one authority: a part of the job that it cannot reach never continues by itself. Each list is a *generation*.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any, TypeAlias

from ddp_callbacks.cluster.environment import KEEP_GOING, NEWS, SUCCESSOR, WorkerEnv
from ddp_callbacks.errors import PeerError

_LOOK = 0.02  # seconds between two looks for news
_PATIENCE = 30.0  # seconds within which the launcher notices a death

Process: TypeAlias = tuple[int, int]  # the rank that it was started with, and how often that had been replaced before


class Members:
    """The members of a job, and this process among them.

    A process that the launcher has started in place of a lost one becomes a member once it is ready. The others let it
    into their group when they form the next one.

    Args:
        env: The place that this process was started with.

    Attributes:
        may_change: Whether the launcher may write another list.
        generation: The number of the list that this process follows; 0 is all that were started.
        admits: Whether this process forms groups with new members. The same on all members of a group.
        is_new: Whether this process takes the place of a lost one, and has not been in a group yet.
    """

    def __init__(self, env: WorkerEnv) -> None:
        self._started, self._news = env, _News()
        self.may_change = bool(os.environ.get(KEEP_GOING))
        self.is_new = self.may_change and bool(os.environ.get(SUCCESSOR))
        self.generation, self.admits = 0, True
        self._ranks: list[Process] = [(rank, 0) for rank in range(env.world_size)]

    def follow(self) -> WorkerEnv:
        """Follow the launcher's newest list, and return this process's place in it.

        Local; but a process that the launcher has just started in place of a lost one blocks until it is a member.

        Raises:
            PeerError: The launcher has given this process up.
        """
        if self.is_new and not self._is_listed():
            tell_launcher({"ready": True})
            while not self._is_listed():  # the launcher ends this process at the end of the job
                time.sleep(_LOOK)
        self.generation, self._ranks = self._newest()
        ranks = [rank for rank, _ in self._ranks]
        if self._started.rank not in ranks:
            raise PeerError(
                f"the launcher has given up this process, which was started as rank {self._started.rank}, and the "
                "others continue without it. Its machine did not answer for too long: check the network."
            )
        return replace(self._started, rank=ranks.index(self._started.rank), world_size=len(ranks))

    def _is_listed(self) -> bool:
        return any(rank == self._started.rank for rank, _ in self._newest()[1])

    def are_new(self) -> bool:
        """Whether all members were started in place of lost processes. Local."""
        return all(replaced for _, replaced in self._ranks)

    def is_outdated(self) -> bool:
        """Whether the launcher has written another list than the one that this process follows. Local."""
        return self._newest()[0] > self.generation

    def have_changed(self) -> bool:
        """Whether this process would form a group of other members now. Local."""
        return self._newest()[1] != self._ranks

    def await_change(self) -> bool:
        """Wait until :meth:`have_changed`; return whether it is so. Blocks for 30 seconds at most."""
        end = time.monotonic() + _PATIENCE
        while self.may_change and time.monotonic() < end and not self.have_changed():
            time.sleep(_LOOK)
        return self.have_changed()

    def ended(self) -> set[int]:
        """Return the ranks that have exited with code 0."""
        started = self._news.about("ended")
        return {rank for rank, (number, _) in enumerate(self._ranks) if str(number) in started}

    def announce_store(self, host: str, port: int) -> None:
        """Let those that follow the same list know where they meet."""
        tell_launcher({"stores": {self._name(): (host, port)}})

    def announced_store(self) -> tuple[str, int] | None:
        """Return host and port of the announced store; ``None`` if nobody has announced one yet."""
        found = self._news.about("stores").get(self._name())
        return found and tuple(found)

    def _name(self) -> str:
        return f"{self.generation} {self._ranks}"

    def _newest(self) -> tuple[int, list[Process]]:
        if not self.may_change or not (found := self._news.about("members")):
            return self.generation, self._ranks
        listed = [(rank, found["replaced"].get(str(rank), 0)) for rank in found["ranks"]]
        return found["generation"], [each for each in listed if self.admits or each in self._ranks]


class _News:
    """What the launcher lets this process know; nothing if ddprun has not started it."""

    def __init__(self) -> None:
        self._path, self._read = os.environ.get(NEWS, ""), 0  # so many bytes of it
        self._known: dict[str, dict[str, Any]] = defaultdict(dict)

    def about(self, kind: str) -> dict[str, Any]:
        """Return all that is known, see :data:`ddp_callbacks.cluster.environment.NEWS`. Costs some microseconds."""
        with contextlib.suppress(OSError):  # there is no file, or the node's program has died, as this process will
            if os.stat(self._path).st_size > self._read:
                self._read_on()
        return self._known[kind]

    def _read_on(self) -> None:
        with open(self._path, "rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # the rest is being written
                self._read += len(line)
                for kind, values in json.loads(line).items():
                    self._known[kind] |= values


def tell_launcher(what: dict[str, Any]) -> None:
    """Write a line to ``ddprun``, which must have started this process."""
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "a") as launcher:
        launcher.write(f"{json.dumps(what)}\n")
