"""A failure belongs to a run: what ended one is forgotten where the next begins.

An exception that every rank has caught (a pruned trial, memory that ran out, a sweep that goes on) leaves the processes
able to train again. Where it has left them at different places, so that what one sends next is not what another expects
next, they form a new process group.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from ddp_callbacks._torch import abort_accelerators, known_groups, timeout_of
from ddp_callbacks.process_group.failures import BEGIN, announce_join, enter, wait
from ddp_callbacks.process_group.presence import await_key, presence, store

_CONNECT = "the connections between all processes"


def begin_run(group: dist.ProcessGroup | None = None) -> None:
    """Begin a run of training, evaluation or prediction: what failed in the one before is forgotten. A collective.

    Blocks until all ranks are here. Where a failure has left them at different places, they get a new default group,
    and groups that were made beside the old one are gone.

    Args:
        group: The one that is to train. Nothing happens in a world of one, or for a part of the world.

    Raises:
        PeerError: Another rank failed, died or went silent.
        MismatchError: Another rank waits for this one somewhere else.
    """
    world = dist.group.WORLD
    if world is None or world.size() == 1 or group not in (None, world):
        return
    here = presence()
    here.listen()
    enter(BEGIN)
    beginning = _Gathering(f"{here.run}/begin", world)
    mine = f"{here.run}/position/{dist.get_rank()}"
    if not store().check([mine]):  # once in a run, whatever happens while this rank waits for the others
        store().set(mine, json.dumps([*here.position(), int(here.failed)]))
        beginning.arrive(_is_out_of_step)
    wait(beginning, BEGIN, world)
    run = here.run + 1
    if beginning.conclusion():
        here.failed = True  # on some rank at least, and something of it may be under way here
        _form_anew(run)
    presence().begin(run)


def _is_out_of_step() -> bool:
    """Whether a failure has left the ranks at different places; all have come to the end of the run."""
    run, size = presence().run, dist.get_world_size()
    positions = [json.loads(place) for place in store().multi_get([f"{run}/position/{rank}" for rank in range(size)])]
    differ = any(position[:-1] != positions[0][:-1] for position in positions)
    return differ and any(position[-1] for position in positions)


class _Gathering:
    """That all ranks have come to a place, as something to wait for."""

    def __init__(self, name: str, world: dist.ProcessGroup) -> None:
        self._count, self._complete = name, f"{name}/complete"
        self._size = world.size()
        self._timeout = timeout_of(world)
        self._since = time.monotonic()

    def arrive(self, conclude: Callable[[], bool]) -> None:
        """Say that this rank is here. The last one to come concludes something for all."""
        if store().add(self._count, 1) == self._size:
            store().set(self._complete, json.dumps(conclude()))

    def conclusion(self) -> bool:
        """What the last one has concluded, once all have come."""
        return bool(json.loads(store().get(self._complete)))

    def wait_slice(self, seconds: float) -> bool:
        """Whether the last one came within ``seconds``. Raises RuntimeError after the timeout of the group."""
        if await_key(self._complete, seconds):
            return True
        if time.monotonic() - self._since > self._timeout.total_seconds():
            raise RuntimeError(f"not every rank came within {self._timeout}")
        return False


def destroy_groups() -> None:
    """As ``dist.destroy_process_group``, which after a failure would wait for collectives that never end.

    gloo waits for them when its group is freed, so then it is not: the end of the process, or their timeout, ends them.
    What GPUs are at is aborted.
    """
    if presence().failed:
        for group in known_groups():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            abort_accelerators(group)
    dist.destroy_process_group()


def form_group(backend: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
    """Form the default group, in a store that is for it alone.

    Blocks until every rank has its connections: one that left before would break those that others still make.

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
    """Leave the default group, and form one of the same ranks; what was under way is dropped."""
    world = dist.group.WORLD
    assert world is not None
    root, backend, timeout = store(), _backend_of(world), timeout_of(world)
    rank, size = dist.get_rank(), dist.get_world_size()
    presence().close()
    destroy_groups()
    form_group(backend, dist.PrefixStore(f"{run}/group", root), rank, size, timeout)


def _backend_of(group: dist.ProcessGroup) -> str:
    """As it is asked for: torch takes ``cpu:gloo,cuda:gloo`` for something else than ``gloo``."""
    config = dist.get_backend_config(group)
    kinds = {part.split(":")[-1] for part in config.split(",")}
    return config if len(kinds) > 1 else kinds.pop()
