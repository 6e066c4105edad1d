"""Runs: a failure ends one run, and the next run starts without it.

After an exception that every rank has caught (a pruned trial, out of memory, a sweep that continues), the processes can
train again. If it has left them at different positions, so that a rank's next message is not what another expects, or
with aborted communicators, they form a new process group.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from ddp_callbacks._torch import known_groups, timeout_of
from ddp_callbacks.process_group.failures import BEGIN, enter, wait
from ddp_callbacks.process_group.guard import announce_join, start_guard
from ddp_callbacks.process_group.presence import await_key, presence, store

_CONNECT = "the connections between all processes"


def begin_run(group: dist.ProcessGroup | None = None) -> None:
    """Begin a run of training, evaluation or prediction, and forget failures of the previous one. A collective.

    Blocks until all ranks have come. If a failure has left them at different positions, or pending operations on GPUs
    were aborted, they form a new default group, and groups made from the old one are gone.

    Args:
        group: The group for training. With a single process, or for a subgroup, nothing happens.

    Raises:
        PeerError: Another rank failed, died or went silent.
        MismatchError: Another rank waits for this one in another exchange.
    """
    world = dist.group.WORLD
    if world is None or world.size() == 1 or group not in (None, world):
        return
    here = presence()
    start_guard()
    enter(BEGIN)
    beginning = _Gathering(f"{here.run}/begin", world)
    mine = f"{here.run}/position/{dist.get_rank()}"
    if not store().check([mine]):  # once per run, even if waiting for the others is interrupted
        store().set(mine, json.dumps({"at": here.position(), "failed": here.failed, "aborted": here.end_run()}))
        beginning.arrive(_need_new_group)
    wait(beginning, BEGIN, world)
    run = here.run + 1
    if beginning.conclusion():
        here.failed = True  # on at least one rank, and collectives may be pending here
        _form_anew(run)
    presence().begin(run)


def _need_new_group() -> bool:
    """Whether a failure has left the ranks at different positions, or with aborted groups. All ranks have come."""
    run, size = presence().run, dist.get_world_size()
    positions = [json.loads(place) for place in store().multi_get([f"{run}/position/{rank}" for rank in range(size)])]
    differ = any(position["at"] != positions[0]["at"] for position in positions)
    failed = any(position["failed"] for position in positions)
    return any(position["aborted"] for position in positions) or (differ and failed)


class _Gathering:
    """A barrier through the store, as something to wait for."""

    def __init__(self, name: str, world: dist.ProcessGroup) -> None:
        self._count, self._complete = name, f"{name}/complete"
        self._size = world.size()
        self._timeout = timeout_of(world)
        self._since = time.monotonic()

    def arrive(self, conclude: Callable[[], bool]) -> None:
        """Announce this rank. The last rank to arrive calls ``conclude`` for all."""
        if store().add(self._count, 1) == self._size:
            store().set(self._complete, json.dumps(conclude()))

    def conclusion(self) -> bool:
        """The result of ``conclude``, once all have arrived."""
        return bool(json.loads(store().get(self._complete)))

    def wait_slice(self, seconds: float) -> bool:
        """Whether the last rank came within ``seconds``. Raises RuntimeError after the group's timeout."""
        if await_key(self._complete, seconds):
            return True
        if time.monotonic() - self._since > self._timeout.total_seconds():
            raise RuntimeError(f"not every rank came within {self._timeout}")
        return False


def destroy_groups() -> None:
    """Like ``dist.destroy_process_group``, which after a failure would wait for collectives that never end.

    gloo waits for them when its group is freed, so we leak the group; the end of the process, or their timeout, ends
    them. Operations on GPUs are aborted.
    """
    here = presence()
    if here.failed:
        for group in known_groups():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        here.abort()
    dist.destroy_process_group()


def form_group(backend: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
    """Form the default group, in a store that no other group uses.

    Blocks until every rank has its connections: a rank that left earlier would break those that others still make.

    Raises:
        PeerError: Another rank failed or died meanwhile.
    """
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    announce_join()
    world = dist.group.WORLD
    assert world is not None
    enter(_CONNECT)
    connections = _Gathering("connected", world)
    connections.arrive(lambda: True)
    wait(connections, _CONNECT, world)


def _form_anew(run: int) -> None:
    """Leave the default group, and form a new one of the same ranks; pending operations are dropped."""
    world = dist.group.WORLD
    assert world is not None
    root, backend, timeout = store(), _backend_of(world), timeout_of(world)
    rank, size = dist.get_rank(), dist.get_world_size()
    presence().close()
    destroy_groups()
    form_group(backend, dist.PrefixStore(f"{run}/group", root), rank, size, timeout)


def _backend_of(group: dist.ProcessGroup) -> str:
    """The backend as the user would request it: torch treats ``cpu:gloo,cuda:gloo`` differently from ``gloo``."""
    config = dist.get_backend_config(group)
    kinds = {part.split(":")[-1] for part in config.split(",")}
    return config if len(kinds) > 1 else kinds.pop()
