"""Rendezvous through MPI, so that ``mpiexec -n 8 python train.py`` needs no further settings."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ddp_callbacks.comm.mpi.progress import pause
from ddp_callbacks.comm.mpi.runtime import MPI, check_world, initialize
from ddp_callbacks.environment import WorkerEnv
from ddp_callbacks.errors import ConfigurationError, RendezvousError
from ddp_callbacks.network import route_to
from ddp_callbacks.schedulers import unknown_launcher

_TAG = 29500  # tag of these messages on MPI_COMM_WORLD
_MESSAGE = 1024  # bytes; a host name has at most 64, an address 45
_DEFAULT_TIMEOUT = timedelta(minutes=30)


def place(timeout: timedelta, environ: Mapping[str, str] = os.environ) -> WorkerEnv:
    """This process's place in MPI_COMM_WORLD, with the address to meet at: MASTER_ADDR, or one that rank 0 chooses.

    Blocks until all processes of ``MPI_COMM_WORLD`` have called it, unless MASTER_ADDR is set.

    Args:
        timeout: How long to wait for the others.
        environ: The variables; default: those of this process.

    Raises:
        ConfigurationError: The launcher's variables and MPI disagree, or rank 0 has no address for the others.
        RendezvousError: A process did not come within ``timeout``.
    """
    initialize(environ)
    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    if size > 1 and not environ.get("MASTER_ADDR"):
        host, port = _exchange(rank, size, timeout)
        environ = {**environ, "MASTER_ADDR": host, "MASTER_PORT": port}
    env = WorkerEnv() if unknown_launcher(environ) else WorkerEnv.from_environ(environ)
    if env.world_size == 1 < size:  # its variables are unknown to us
        env = WorkerEnv(rank, size, _local_rank(), environ["MASTER_ADDR"], int(environ.get("MASTER_PORT") or 29500))
    check_world(env)
    return env


def rendezvous(url: str, timeout: timedelta = _DEFAULT_TIMEOUT, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """torch's handler for ``init_method="mpi://"``."""
    env = place(timeout)
    if env.host is None or env.port is None:
        yield dist.HashStore(), 0, 1
        return
    yield (
        dist.TCPStore(env.host, env.port, env.world_size, env.rank == 0, timeout, wait_for_workers=False),
        env.rank,
        env.world_size,
    )


def _exchange(rank: int, size: int, timeout: timedelta) -> tuple[str, str]:
    """Send every rank's host name to rank 0, which answers with its address and a free port."""
    if rank > 0:
        _await({0: MPI.COMM_WORLD.Isend(_message(socket.gethostname()), 0, _TAG)}, timeout)
        answer = _message(None)
        _await({0: MPI.COMM_WORLD.Irecv(answer, 0, _TAG)}, timeout)
    else:
        names = {other: _message(None) for other in range(1, size)}
        _await({other: MPI.COMM_WORLD.Irecv(name, other, _TAG) for other, name in names.items()}, timeout)
        answer = _message(_free_address([json.loads(name) for name in names.values()]))
        _await({other: MPI.COMM_WORLD.Isend(answer, other, _TAG) for other in names}, timeout)
    host, port, refusal = json.loads(answer)
    if refusal:
        raise ConfigurationError(
            f"the processes are on several hosts, and rank 0 knows no address at which they can reach it: {refusal}. "
            "Set MASTER_ADDR to that address: mpirun -x MASTER_ADDR=ADDRESS (Open MPI), mpiexec -genv MASTER_ADDR "
            "ADDRESS (MPICH, Intel MPI)."
        )
    return host, str(port)


def _message(value: Any) -> bytearray:
    return bytearray(json.dumps(value).encode().ljust(_MESSAGE))


def _await(requests: dict[int, MPI.Request], timeout: timedelta) -> None:
    """Wait until these ranks' messages are sent or received."""
    begin = time.monotonic()
    while requests:
        requests = {rank: request for rank, request in requests.items() if not request.Test()}
        waited = time.monotonic() - begin
        if waited > timeout.total_seconds():
            missing = ", ".join(map(str, requests))
            raise RendezvousError(
                f"rank {missing} of the {MPI.COMM_WORLD.Get_size()} in MPI's world did not come within "
                f"{timeout.total_seconds():g} s; rank {MPI.COMM_WORLD.Get_rank()} on host {socket.gethostname()} "
                "waited. Every process must join."
            )
        if requests:
            pause(waited)


def _free_address(names: list[str]) -> tuple[str, int, str]:
    """Rank 0's address on the route to the first other host, and a free port there; or the reason why there is none."""
    others = [name for name in names if name != socket.gethostname()]
    try:
        host = route_to(others[0]).address if others else "127.0.0.1"
        with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            return host, probe.getsockname()[1], ""
    except OSError as error:
        return "", 0, f"there is no route to {others[0]} ({error})" if others else str(error)


def _local_rank() -> int:
    local = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        return local.Get_rank()
    finally:
        local.Free()
