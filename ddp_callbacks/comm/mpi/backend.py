"""Register the backend with torch, and create communicators for new groups."""

from __future__ import annotations

import socket
import time
import zlib
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler

from ddp_callbacks.comm.mpi.ending import Ending
from ddp_callbacks.comm.mpi.process_group import MPIProcessGroup
from ddp_callbacks.comm.mpi.progress import Progress
from ddp_callbacks.comm.mpi.rendezvous import rendezvous
from ddp_callbacks.comm.mpi.runtime import MPI, check_world, initialize
from ddp_callbacks.environment import WorkerEnv
from ddp_callbacks.errors import ConfigurationError, RendezvousError

NAME = "mpi4py"

_endings: list[Ending] = []  # of this process; MPI is initialized once per process


def register() -> None:
    """Register the backend with torch. Does not initialize MPI."""
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
    register_rendezvous_handler("mpi", rendezvous)


def create(options: Any, _: Any = None) -> MPIProcessGroup:
    """Create a group with a separate communicator. torch calls it on each member; blocks until all have come.

    Raises:
        ConfigurationError: MPI's ranks differ from torch's, or MPI cannot be used.
        RendezvousError: A member did not come within the timeout.
    """
    default = dist.group.WORLD
    if default is not None and not isinstance(default, MPIProcessGroup):
        raise ConfigurationError(
            f"a group of backend mpi4py needs a default group of that backend, got {default.name()}. MPI has to know "
            "all processes."
        )
    initialize()
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    world_size = options.group_size if default is None else default.size()
    check_world(WorkerEnv(members[options.group_rank], world_size, file=""))
    _await_members(options)
    ending = _ending()
    if default is None:
        ending.watch(options.store)
    with ending.progress.lock:
        group = MPI.COMM_WORLD.Get_group().Incl(members)
        comm = MPI.COMM_WORLD.Create_group(group, zlib.crc32(options.group_id.encode()) % 32768)
        group.Free()
    return MPIProcessGroup(comm, ending.progress, options.store, options.timeout)


def _await_members(options: Any) -> None:
    """Wait for all members: creating a communicator blocks without a timeout."""
    store, end = options.store, time.monotonic() + options.timeout.total_seconds()
    store.set(f"came/{options.group_rank}", "1")
    missing = list(range(options.group_size))
    while True:
        missing = [rank for rank in missing if not store.check([f"came/{rank}"])]
        if not missing:
            return
        if time.monotonic() > end:
            raise RendezvousError(
                f"rank {', '.join(map(str, missing))} of a group of {options.group_size} did not create it within "
                f"{options.timeout.total_seconds():g} s; rank {options.group_rank} on host {socket.gethostname()} "
                "waited. Every member must call new_group, in the same order."
            )
        time.sleep(0.01)


def _ending() -> Ending:
    if not _endings:
        _endings.append(Ending(Progress()))
    return _endings[0]
