"""Let the processes meet in a store: on rank 0's host, or in a file."""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from ddp_callbacks.cluster.environment import WorkerEnv
from ddp_callbacks.cluster.network import address_for_others, address_towards, addresses_of, is_loopback, own_addresses
from ddp_callbacks.cluster.schedulers import hosts_of_job
from ddp_callbacks.errors import ConfigurationError, RendezvousError, say
from ddp_callbacks.process_group.control_channel import end_when_silent
from ddp_callbacks.process_group.coordinator import FOREVER
from ddp_callbacks.process_group.members_file import Members
from ddp_callbacks.process_group.presence import Presence, join
from ddp_callbacks.process_group.server import own_address

_PATIENCE = 10.0  # seconds after which rank 0 prints the ranks it waits for, and others that they wait for rank 0
_NAMED = 16  # the most ranks that an error lists
_LOOK = 0.5  # seconds between two checks for missing ranks
_PAUSE = 0.02  # seconds between two looks for a store
_ATTEMPT = 4.0  # seconds for a connection: TCP sends a lost packet again after 1 and 3 seconds
_ANSWERS = timedelta(seconds=15)  # such a store is there already


def meet(members: Members, env: WorkerEnv, timeout: timedelta) -> tuple[WorkerEnv, dist.Store]:
    """Meet the other members. Return ``env`` with the address in use, and a store for their group.

    Blocks until all have come. Calls :func:`choose_interface`.

    Args:
        members: The members, whose :attr:`~.members.Members.generation` has this process as rank ``env.rank``.

    Raises:
        ConfigurationError: Processes on other hosts cannot reach the address.
        RendezvousError: Nothing answers at the address; a rank died or exited before it came, or did not come within
            ``timeout``; or the members have changed.
    """
    env, store = _open_store(members, env, timeout)
    here = join(store, env.rank, env.world_size, uuid.uuid4().hex, math.inf)
    try:
        _await_all(here, members, env, timeout)
    except BaseException:
        here.close()
        raise
    return env, here.store


def _open_store(members: Members, env: WorkerEnv, timeout: timedelta) -> tuple[WorkerEnv, dist.Store]:
    """Open the store in which the members meet. Return ``env`` with the address in use, and the store."""
    end = time.monotonic() + timeout.total_seconds()
    try:
        if members.generation:
            env, store = _open_anew(members, env, timeout)
        else:
            env = at_reachable_address(env, timeout)
            store = _open_first(members, env, timedelta(seconds=max(end - time.monotonic(), 1)))
        store.set_timeout(timeout)
        choose_interface(env.host)  # rank 0 serves the control channel there, too
    except (dist.DistError, OSError) as error:
        raise RendezvousError(
            f"rank {env.rank} on host {socket.gethostname()} could not meet the other {env.world_size - 1} at "
            f"{_where(env)} within {timeout.total_seconds():g} s. Check that rank 0 runs on that address, that "
            f"the port is free there and open in the firewall. Cause: {str(error).splitlines()[0]}"
        ) from error
    return env, store


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
        address = address_towards(host)
        if (interface := own_addresses().get(address)) and not is_loopback(address):
            os.environ["GLOO_SOCKET_IFNAME"] = interface


def _where(env: WorkerEnv) -> str:
    return env.file or f"{env.host}:{env.port}"


def _open_first(members: Members, env: WorkerEnv, timeout: timedelta) -> dist.Store:
    if env.file is not None:
        return dist.FileStore(env.file, env.world_size)
    assert env.host is not None and env.port is not None
    is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's agent hosts the store
    if env.rank == 0 and not is_hosted:
        return _listen(env.host, env.port, timeout)
    return _connect(members, env, timeout)


def _open_anew(members: Members, env: WorkerEnv, timeout: timedelta) -> tuple[WorkerEnv, dist.Store]:
    """Open a store that rank 0 hosts: the first one may be lost."""
    if env.rank == 0:
        store = _listen(own_address(env.host or socket.gethostname()), 0, timeout)
        members.announce_store(store.host, store.port)
        return replace(env, host=store.host, port=store.port), store
    patience = _Patience(members, env, timeout)
    while (found := members.announced_store()) is None:
        patience.look({0})
        time.sleep(_PAUSE)
    env = replace(env, host=found[0], port=found[1])
    return env, _connect(members, env, min(timeout, _ANSWERS))


def _listen(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Start a store that listens only on ``host``; torch's binds all interfaces (issue 173909). 0: a free port."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        listener = socket.create_server(address, family=family, backlog=128)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        text = f"{address[0]} is not an address of this machine; set MASTER_ADDR to one that is"
        raise OSError(error.errno, text) from error
    port = listener.getsockname()[1]
    fd = listener.detach()
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=fd)


def _connect(members: Members, env: WorkerEnv, timeout: timedelta) -> dist.TCPStore:
    """Open a client of a store, in a thread: torch may wait forever for a machine that was lost in the meantime."""
    host, port, opened = env.host, env.port, Future[dist.TCPStore]()
    assert host is not None and port is not None
    patience, end = _Patience(members, env, 9 * timeout), time.monotonic() + timeout.total_seconds()
    _await_answer((host, port), end, patience)

    def connect() -> None:
        try:
            store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
            opened.set_result(store)
        except Exception as error:
            opened.set_exception(error)

    threading.Thread(target=connect, daemon=True).start()
    while not wait([opened], _LOOK).done:
        patience.look({0})
        if time.monotonic() > end + _ANSWERS.total_seconds():
            raise TimeoutError("nothing answers")
    if members.may_change:
        end_when_silent(port)
    return opened.result()


def _await_answer(address: tuple[str, int], end: float, patience: _Patience) -> None:
    """Wait until something listens at the address: torch prints a stack of C++ for each attempt that fails."""
    while True:
        try:
            socket.create_connection(address, min(_ATTEMPT, max(end - time.monotonic(), _PAUSE))).close()
            return
        except OSError:
            if time.monotonic() >= end:
                raise
        patience.look({0})
        time.sleep(_PAUSE)


def _await_all(here: Presence, members: Members, env: WorkerEnv, timeout: timedelta) -> None:
    """Wait until every rank has come; the error names the missing ranks.

    A store can still hold the address of rank 0 from an earlier attempt: torchrun's agent keeps its store when it
    restarts the workers, and a file can be left over. Nothing answers at that address, so each rank reads it again
    until rank 0 has answered.
    """
    heard, patience = here.heard, _Patience(members, env, timeout)
    others = {"ranks": [0] if env.rank else range(1, env.world_size)}
    while not heard.wait_for_news(lambda: heard.get("names"), _LOOK):
        missing = set((heard.get("missing") or others)["ranks"])
        if gone := heard.get("end", run=FOREVER):
            raise _never_came(missing, env, f": {_ranks(set(gone['ranks']))} gave up or died")
        patience.look(missing, here.client.problem)


class _Patience:
    """Limits how long this rank waits for others, and prints once for whom."""

    def __init__(self, members: Members, env: WorkerEnv, timeout: timedelta) -> None:
        self._members, self._env, self._seconds = members, env, timeout.total_seconds()
        self._end, self._say_at = time.monotonic() + self._seconds, time.monotonic() + _PATIENCE

    def look(self, missing: set[int], problem: str = "") -> None:
        """Raise RendezvousError if these ranks will never come, or their time is over.

        Args:
            problem: Why rank 0 could not be reached.
        """
        env = self._env
        if ended := missing & self._members.ended():
            raise _never_came(ended, env, ", but exited with code 0")
        if self._members.is_outdated():
            raise _never_came(missing, env, ", and the members have changed")
        now = time.monotonic()
        if now > self._end:
            raise _never_came(missing, env, f" within {self._seconds:g} s", problem)
        if now > self._say_at and (env.rank == 0 or 0 in missing):  # otherwise rank 0 prints it
            why = f": {problem}" if problem else ""
            say(f"rank {env.rank} is waiting at {_where(env)} for {_ranks(missing)} of {env.world_size}{why}")
            self._say_at = self._end


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
