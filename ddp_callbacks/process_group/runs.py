"""Runs: a failure ends one run, and the next run starts without it.

After an exception that every rank has caught (a pruned trial, out of memory, a sweep that continues), the processes can
train again. If the failure has left them at different positions, so that a rank's next message is not the one that
another expects, or with aborted communicators, they form a new process group.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist

from ddp_callbacks._torch import Backend, accelerators_of, backends_of, known_groups, sequence_number, timeout_of
from ddp_callbacks.process_group.control_channel import Message
from ddp_callbacks.process_group.failures import BEGIN, enter, wait
from ddp_callbacks.process_group.presence import OWN_THREADS, presence

_CONNECT = "the connections between all processes"
_FREES = f"{OWN_THREADS} frees groups"  # name of a thread
_HELD = 1  # failed groups that may stay: the latest exception, which is being handled, holds one
_PATIENCE = 1.0  # seconds for which the interpreter's end waits for such a thread, which needs the GIL: .torch_threads

Failed: TypeAlias = list[tuple[weakref.ref[dist.ProcessGroup], list[Backend]]]
_failed: Failed = []  # destroyed groups with pending collectives
_stuck: Failed = []  # those whose ranks wait for each other, and those of GPUs, whose operations are aborted
for _kept in (_failed, _stuck):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_kept))  # the interpreter's end does not free them


def begin_run(group: dist.ProcessGroup | None = None) -> None:
    """Begin a run of training, evaluation or prediction, and forget failures of the previous one. A collective.

    Blocks until all ranks have called it. If a failure has left them at different positions, or pending operations on
    GPUs were aborted, they form a new default group, and groups made from the old one are gone.

    Args:
        group: The process group for training; ``None`` is the default group. With a single process, or for a subgroup,
            nothing happens.

    Raises:
        PeerError: Another rank failed, died or went silent.
        MismatchError: Another rank waits for this one in another exchange.
    """
    world = dist.group.WORLD
    if world is None or world.size() == 1 or group not in (None, world):
        return
    here = presence()
    enter(BEGIN)
    if here.beginning is None:  # once per run, even if waiting for the others is interrupted
        position = [here.exchanges.checksum(), sequence_number(world)]  # equal on all ranks if they are in step
        mine = {"at": position, "failed": here.failed, "aborted": here.end_run()}
        here.beginning = here.gathering("begin", here.run)
        here.beginning.put(mine)
    positions = here.beginning
    wait(positions, BEGIN, world)
    if _need_new_group(positions.values):
        _form_anew(world, here.run + 1)
    else:
        here.begin(here.run + 1)


def _need_new_group(positions: Sequence[Message]) -> bool:
    """Whether a failure has left the ranks at different positions, or with aborted groups."""
    differ = any(position["at"] != positions[0]["at"] for position in positions)
    failed = any(position["failed"] for position in positions)
    return any(position["aborted"] for position in positions) or (differ and failed)


def destroy_groups() -> None:
    """Destroy all groups, without the wait of ``dist.destroy_process_group`` for collectives that never end.

    After a failure, gloo would wait for them when its backend is freed, so the backend stays until this process has
    formed another group; after a mismatch, or if it is for GPUs, until the process ends. It then also aborts operations
    on GPUs. This library's objects for a group are freed.
    """
    here = presence()
    if here.failed:
        end = here.end_of_run()
        is_mismatch = end is not None and end["kind"] == "mismatch"
        for group in known_groups():
            kept = _stuck if is_mismatch or accelerators_of(group) else _failed
            kept.append((weakref.ref(group), backends_of(group)))
        here.abort()
    dist.destroy_process_group()


def _free_failed_groups() -> None:
    """Free the backends of failed groups, except those of groups that somebody still holds.

    In a thread, without the GIL: gloo waits until the pending collectives have failed, for lack of a rank that has died
    or has freed its backend, or by their timeout.
    """
    if sum(group() is not None for group, _ in _failed) > _HELD:  # by frames of exceptions, in cycles
        gc.collect()
    held = [each for each in _failed if each[0]() is not None]
    unused = [each[1] for each in _failed if each not in held]
    _failed[:] = held
    if unused:
        threading.Thread(target=unused.clear, name=_FREES, daemon=True).start()


@atexit.register
def _await_threads() -> None:
    end = time.monotonic() + _PATIENCE
    for thread in threading.enumerate():
        if thread.name == _FREES:
            thread.join(max(0.0, end - time.monotonic()))


def form_group(
    backend: str, store: dist.Store, rank: int, size: int, timeout: timedelta, note: Any = None
) -> list[Any]:
    """Form the default group, in a store that no other group uses, and return each rank's ``note``. A collective.

    Blocks until every rank has its connections: a rank that left earlier would break connections that others still
    make.

    Raises:
        PeerError: Another rank failed or died meanwhile.
    """
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    here, world = presence(), dist.group.WORLD
    assert world is not None
    enter(_CONNECT)
    connected = here.gathering("connections", here.run)
    connected.put(note)
    wait(connected, _CONNECT, world)
    _free_failed_groups()
    return connected.values


def _form_anew(world: dist.ProcessGroup, run: int) -> None:
    """Leave the default group, and form a new one of the same ranks. Drops pending operations. A collective."""
    here, backend, size, timeout = presence(), backend_of(world), world.size(), timeout_of(world)
    here.failed = True  # the run has failed on at least one rank, and collectives may be pending here
    here.moves = True
    destroy_groups()
    here.begin(run)
    form_group(backend, dist.PrefixStore(f"{run}/group", here.store), here.rank, size, timeout)


def backend_of(group: dist.ProcessGroup) -> str:
    """Return the backend as a user requests it: torch treats ``cpu:gloo,cuda:gloo`` differently from ``gloo``."""
    config = dist.get_backend_config(group)
    kinds = {part.split(":")[-1] for part in config.split(",")}
    return config if len(kinds) > 1 else kinds.pop()
