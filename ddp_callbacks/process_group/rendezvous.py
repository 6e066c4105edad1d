"""Let the processes meet in a store: on rank 0's host, or in a file."""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from ddp_callbacks.environment import WorkerEnv
from ddp_callbacks.errors import ConfigurationError, RendezvousError, say
from ddp_callbacks.network import address_for_others, addresses_of, is_loopback, route_to
from ddp_callbacks.process_group.coordinator import FOREVER
from ddp_callbacks.process_group.members import Members
from ddp_callbacks.process_group.presence import Presence, join
from ddp_callbacks.schedulers import hosts_of_job

_PATIENCE = 10.0  # seconds after which rank 0 prints the ranks it waits for, and others that they wait for rank 0
_NAMED = 16  # the most ranks that an error lists
_LOOK = 0.5  # seconds between two checks for missing ranks


def open_store(env: WorkerEnv, timeout: timedelta) -> tuple[WorkerEnv, dist.Store]:
    """Open the store in which the processes meet. Return ``env`` with the address in use, and the store.

    Blocks until rank 0 has come. Calls :func:`choose_interface`.

    Raises:
        ConfigurationError: Processes on other hosts cannot reach the address.
        RendezvousError: Nothing answers at the address within ``timeout``.
    """
    end = time.monotonic() + timeout.total_seconds()
    try:
        env = at_reachable_address(env, timeout)
        store = _open_store(env, timedelta(seconds=max(end - time.monotonic(), 1)))
        store.set_timeout(timeout)
        choose_interface(env.host)  # rank 0 serves the control channel there, too
    except (dist.DistError, OSError) as error:
        raise RendezvousError(
            f"rank {env.rank} on host {socket.gethostname()} could not meet the other {env.world_size - 1} at "
            f"{_where(env)} within {timeout.total_seconds():g} s. Check that rank 0 runs on that address, that "
            f"the port is free there and open in the firewall. Cause: {str(error).splitlines()[0]}"
        ) from error
    return env, store


def meet(members: Members, env: WorkerEnv, timeout: timedelta) -> dist.Store:
    """Meet the other members, and return a store for their group. Blocks until all have come.

    Args:
        members: The members, whose :attr:`~.members.Members.generation` has this process as rank ``env.rank``.

    Raises:
        RendezvousError: A rank died or exited before it came, or did not come within ``timeout``; or the members have
            changed.
    """
    here = join(members.store, env.rank, env.world_size, uuid.uuid4().hex, math.inf)
    try:
        _await_all(here, members, env, timeout)
    except BaseException:
        here.close()
        raise
    return here.store


def at_reachable_address(env: WorkerEnv, timeout: timedelta, environ: Mapping[str, str] = os.environ) -> WorkerEnv:
    """Return ``env`` with an address of rank 0 that the other hosts can reach.

    A machine may resolve its own name to 127.0.1.1 (Debian), while other machines get its real address.

    Raises:
        ConfigurationError: There is no such address.
        OSError: The name does not resolve within ``timeout``.
    """
    if env.host is None or env.several_hosts is False:
        return env
    if is_loopback(env.host):
        if env.several_hosts:
            raise ConfigurationError(_unreachable(env, "is a different machine on each of them"))
        return env
    if not all(map(is_loopback, addresses_of(env.host, timeout.total_seconds()))):
        return env
    found = address_for_others(_other_hosts(env.host, environ))
    if found is None and env.several_hosts:
        raise ConfigurationError(_unreachable(env, "resolves to this machine only (127.0.1.1 in /etc/hosts, perhaps)"))
    if found is None:
        return env  # a machine without a network
    if env.rank == 0:
        say(f"{env.host} resolves to this machine only; the processes meet at {found}", logging.WARNING)
    return replace(env, host=found)


def _other_hosts(own: str, environ: Mapping[str, str]) -> list[str]:
    try:
        return [name for name, _ in hosts_of_job(environ) if name != own]
    except ConfigurationError:
        return []  # for example PBS's file of hosts, which only the first host can read


def _unreachable(env: WorkerEnv, why: str) -> str:
    return (
        f"the {env.world_size} processes are on several hosts, but the address of rank 0, {env.host}, {why}. Set "
        "MASTER_ADDR to an address of rank 0's host that the others can reach (ip -br address lists them)."
    )


def choose_interface(host: str | None) -> None:
    """Make gloo listen on the network on which the processes meet, unless GLOO_SOCKET_IFNAME is set.

    By default, gloo takes the address that the host's name resolves to. On Debian that is 127.0.1.1, which other hosts
    cannot reach.
    """
    if host is not None and not os.environ.get("GLOO_SOCKET_IFNAME"):
        route = route_to(host)
        if route.interface and not is_loopback(route.address):
            os.environ["GLOO_SOCKET_IFNAME"] = route.interface


def _where(env: WorkerEnv) -> str:
    return env.file or f"{env.host}:{env.port}"


def _open_store(env: WorkerEnv, timeout: timedelta) -> dist.Store:
    if env.file is not None:
        store = dist.FileStore(env.file, env.world_size)
        store.set_timeout(timeout)
        return store
    assert env.host is not None and env.port is not None
    is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's agent hosts the store
    if env.rank == 0 and not is_hosted:
        return _listen(env.host, env.port, timeout)
    return dist.TCPStore(env.host, env.port, is_master=False, wait_for_workers=False, timeout=timeout)


def _listen(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Start a store that listens only on ``host``; torch's binds all interfaces (issue 173909)."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        listener = socket.create_server(address, family=family, backlog=128)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        text = f"{address[0]} is not an address of this machine; set MASTER_ADDR to one that is"
        raise OSError(error.errno, text) from error
    fd = listener.detach()
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=fd)


def _await_all(here: Presence, members: Members, env: WorkerEnv, timeout: timedelta) -> None:
    """Wait until every rank has come; the error names the missing ranks.

    A store can still hold the address of rank 0 from an earlier attempt: torchrun's agent keeps its store when it
    restarts the workers, and a file can be left over. Nothing answers at that address, so each rank reads it again
    until rank 0 has answered.
    """
    heard, end, say_at = here.heard, time.monotonic() + timeout.total_seconds(), time.monotonic() + _PATIENCE
    others = {"ranks": [0] if env.rank else range(1, env.world_size)}
    while not heard.wait_for_news(lambda: heard.get("names"), _LOOK):
        missing = set((heard.get("missing") or others)["ranks"])
        if gone := heard.get("end", run=FOREVER):
            raise _never_came(missing, env, f": {_ranks(set(gone['ranks']))} gave up or died")
        if ended := missing & members.ended():
            raise _never_came(ended, env, ", but exited with code 0")
        if members.is_outdated():
            raise _never_came(missing, env, ", and the members have changed")
        now = time.monotonic()
        if now > end:
            raise _never_came(missing, env, f" within {timeout.total_seconds():g} s", here.client.problem)
        if now > say_at and (env.rank == 0 or 0 in missing):  # otherwise rank 0 prints it
            problem = f": {here.client.problem}" if here.client.problem else ""
            say(f"rank {env.rank} is waiting at {_where(env)} for {_ranks(missing)} of {env.world_size}{problem}")
            say_at = end


def _ranks(ranks: set[int]) -> str:
    """Return ``rank 3`` or ``ranks 1, 2, 4``; if there are many, only the first ones."""
    first = [str(rank) for rank in sorted(ranks)[:_NAMED]]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(first)}{', ...' * (len(ranks) > _NAMED)}"


def _never_came(missing: set[int], env: WorkerEnv, why: str, problem: str = "") -> RendezvousError:
    cause = f" {problem}." if problem else ""
    return RendezvousError(
        f"{_ranks(missing)} of {env.world_size} did not join at {_where(env)}{why}; rank {env.rank} on "
        f"host {socket.gethostname()} waited.{cause} Start every rank, each with a different number, and let each "
        "join, or lower world_size."
    )
