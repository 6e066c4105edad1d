"""Where the processes meet: a store on rank 0's host, or a file."""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ddp_callbacks.environment import WorkerEnv
from ddp_callbacks.errors import ConfigurationError, RendezvousError, say
from ddp_callbacks.network import address_for_others, addresses_of, is_loopback, route_to
from ddp_callbacks.schedulers import hosts_of_job

BIND = "DDP_CALLBACKS_BIND"
"""Environment variable: the address on which rank 0's store listens, if not MASTER_ADDR. 0.0.0.0: all interfaces."""

_PATIENCE = 10.0  # seconds after which rank 0 prints the ranks it waits for


def meet(env: WorkerEnv, timeout: timedelta) -> tuple[WorkerEnv, dist.Store]:
    """Meet the other processes; return this process's place with the address, and the store.

    Blocks until all have come.

    Raises:
        ConfigurationError: Processes on other hosts cannot reach the address.
        RendezvousError: Nothing answers there, or a rank did not come within ``timeout``.
    """
    end = time.monotonic() + timeout.total_seconds()
    try:
        env = at_reachable_address(env, timeout)
        store = _open_store(env, timedelta(seconds=max(end - time.monotonic(), 1)))
        store.set_timeout(timeout)
        return env, _await_all(dist.PrefixStore("ddp_callbacks", store), env, timeout, end)
    except (dist.DistError, OSError) as error:
        raise RendezvousError(
            f"rank {env.rank} on host {socket.gethostname()} could not meet the other {env.world_size - 1} at "
            f"{_where(env)} within {timeout.total_seconds():g} s. Check that rank 0 runs on that address, that "
            f"the port is free there and open in the firewall. Cause: {str(error).splitlines()[0]}"
        ) from error


def at_reachable_address(env: WorkerEnv, timeout: timedelta, environ: Mapping[str, str] = os.environ) -> WorkerEnv:
    """``env`` with an address of rank 0 that the other hosts reach.

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
        return []  # a list that only the first host can read


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
    if env.rank == 0 and not agent_hosts_store():
        return _listen(env.host, env.port, timeout)
    return dist.TCPStore(env.host, env.port, is_master=False, wait_for_workers=False, timeout=timeout)


def agent_hosts_store() -> bool:
    """Whether torchrun's agent hosts the store; it sets this variable if so."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _listen(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """A store that listens only on ``host``; torch's binds every interface (pytorch issue 173909)."""
    chosen = os.environ.get(BIND) or host
    family, kind, proto, _, address = socket.getaddrinfo(chosen, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(listener, address)
        listener.listen(128)
        own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(chosen, chosen)
        return dist.TCPStore(
            own, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
        )
    finally:
        listener.close()


def _bind(listener: socket.socket, address: tuple[Any, ...]) -> None:
    try:
        listener.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        raise OSError(
            error.errno,
            f"{address[0]} is not an address of this machine. If it belongs to a Kubernetes Service or a router that "
            f"leads here, let rank 0 listen on another address: {BIND}=0.0.0.0 for all interfaces",
        ) from error


def _await_all(store: dist.Store, env: WorkerEnv, timeout: timedelta, end: float) -> dist.Store:
    """Wait until every rank has come; return their part of the store. If ranks are missing, the error names them.

    A store can hold keys of an earlier attempt: an agent keeps it when it restarts its workers, and a file can be left
    over. So rank 0 opens a new part and admits the processes that it has seen there; each knows itself by its ticket.
    (TORCHELASTIC_RESTART_COUNT does not help: torchrun counts separately on each node.)
    """
    ticket = uuid.uuid4().hex
    if env.rank == 0:
        store.set("part", ticket)
    part, missing, say_at = None, set[int](), time.monotonic() + _PATIENCE
    try:
        while time.monotonic() < end:
            opened = _read(store, "part")
            if opened is not None and (part is None or part.name != opened):
                part = _Part(opened, store, env.world_size)
                part.store.set(f"present/{env.rank}", ticket)
            if env.rank == 0 and time.monotonic() > say_at:
                say(f"rank 0 is waiting at {_where(env)} for {_ranks(missing)} of {env.world_size}")
                say_at = end
            if part is not None:
                missing = part.admit() if env.rank == 0 else part.missing()
                if ticket in (_read(part.store, "admitted") or "").split(","):
                    return part.store
            time.sleep(0.05)
    except dist.DistError as error:
        if part is None:
            raise  # the first check failed, so nothing is known
        raise _never_came(missing or {0}, env, "before rank 0, which hosts the store, gave up or died") from error
    raise _never_came(missing or {0}, env, f"within {timeout.total_seconds():g} s")


class _Part:
    """The part of a store that one rank 0 has opened."""

    def __init__(self, name: str, store: dist.Store, world_size: int) -> None:
        self.name = name
        self.store = dist.PrefixStore(name, store)
        self._tickets: dict[int, str | None] = dict.fromkeys(range(world_size))

    def admit(self) -> set[int]:
        """On rank 0: the missing ranks; admit all once none is missing."""
        for rank, found in self._tickets.items():
            if found is None:
                self._tickets[rank] = _read(self.store, f"present/{rank}")
        missing = {rank for rank, found in self._tickets.items() if found is None}
        self.store.set("missing", ",".join(map(str, sorted(missing))))
        if not missing:
            self.store.set("admitted", ",".join(map(str, self._tickets.values())))
        return missing

    def missing(self) -> set[int]:
        """On the other ranks: the ranks that rank 0 still misses."""
        return {int(rank) for rank in (_read(self.store, "missing") or "").split(",") if rank}


def _read(store: dist.Store, key: str) -> str | None:
    """Read a key without blocking."""
    return store.get(key).decode() if store.check([key]) else None


def _ranks(ranks: set[int]) -> str:
    """``rank 3``, or ``ranks 1, 4-7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' * (len(ranks) > 1)} {text}"


def _never_came(missing: set[int], env: WorkerEnv, when: str) -> RendezvousError:
    return RendezvousError(
        f"{_ranks(missing)} of {env.world_size} did not join at {_where(env)} {when}; rank {env.rank} on "
        f"host {socket.gethostname()} waited. Start every rank, each with a different number, or lower world_size."
    )
