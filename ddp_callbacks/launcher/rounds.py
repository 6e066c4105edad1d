"""How the agents of a job meet, meet again when workers restart, and report to ``ddprun``."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from ddp_callbacks.launcher.meeting import open_store

_LOOK = 0.05  # seconds between two checks
BACKEND = "ddprun"  # the name of the rendezvous below, for --rdzv-backend


class Reports:
    """Sends reports to the node's program."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    @property
    def are_read(self) -> bool:
        """Whether the node's program is there."""
        return not (select.select([self._control], [], [], 0)[0] and not self._control.recv(1, socket.MSG_PEEK))

    def send(self, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], descriptors or [])
        except OSError:
            os.kill(os.getpid(), signal.SIGTERM)  # the node's program is gone


class Rounds:
    """The number of the current round of workers, and the nodes that take part; ``ddprun`` decides both.

    Attributes:
        number: ``None`` if torchrun's count is right.
    """

    def __init__(self, control: socket.socket, members: list[int] | None) -> None:
        self._control = control
        self._members = members or []
        self.number = None if members is None else 0

    def newest(self) -> tuple[int, list[int]]:
        """The latest number and node ranks from ``ddprun``."""
        assert self.number is not None
        while select.select([self._control], [], [], 0)[0] and (told := self._control.recv(1 << 18)):
            self.number, self._members = json.loads(told)
        return self.number, self._members


class Rendezvous(RendezvousHandler):
    """The nodes of one job, in the launcher's order; each store listens on one address.

    (torchrun's stores listen on all interfaces: pytorch issue 173909.) If workers may restart, they do so in rounds,
    each with a new store: torch expects it to be empty. A node whose workers have failed asks ``ddprun`` for another
    round, and ``ddprun`` tells all remaining nodes; it does the same when it has lost a node.
    """

    def __init__(self, parameters: RendezvousParameters, job: dict[str, Any], rounds: Rounds, reports: Reports) -> None:
        self._run_id = parameters.run_id
        self._rounds = rounds
        self._reports = reports
        self._round: int | None = None  # the round of the running workers
        self._node_rank: int = job["node_rank"]
        self._nodes = parameters.max_nodes
        self._meeting = RendezvousStoreInfo(job["address"], job["port"])
        # torchrun's defaults: how long its static rendezvous waits for a node, and its dynamic one reads the store
        self._join_timeout = int(parameters.get("join_timeout", 600))
        is_elastic = rounds.number is not None
        timeout = int(parameters.get("read_timeout", 60) if is_elastic else parameters.get("timeout", 900))
        self._timeout = timedelta(seconds=timeout)
        self._store = open_store(job["address"], job["port"], job["listener"], self._timeout)
        self._workers_store: dist.TCPStore | None = None

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        if self._rounds.number is None:
            store: dist.Store = dist.PrefixStore(self._run_id, self._store)
            return RendezvousInfo(store, self._node_rank, self._nodes, self._meeting)
        if self._round is not None and not self.num_nodes_waiting():
            self._reports.send({"again": self._round})
        store, members = self._meet(time.monotonic() + self._join_timeout)
        rank = members.index(self._node_rank)
        if rank == 0:
            store.set("workers", str(self._open_workers_store()))
        meeting = RendezvousStoreInfo(self._meeting.master_addr, int(store.get("workers")))
        return RendezvousInfo(store, rank, len(members), meeting)

    def _open_workers_store(self) -> int:
        """Open a new store; return its port."""
        address = self._meeting.master_addr
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        port = int(listener.getsockname()[1])
        self._workers_store = open_store(address, port, listener.detach(), self._timeout)
        return port

    def _meet(self, end: float) -> tuple[dist.Store, list[int]]:
        """The round's part of the store, and its nodes, once all of them have come."""
        while time.monotonic() < end:
            number, members = self._rounds.newest()
            store: dist.Store = dist.PrefixStore(f"{self._run_id}/{number}", self._store)
            if number != self._round:
                store.set(f"here/{self._node_rank}", "1")
                if store.check([f"here/{member}" for member in members]):
                    self._round = number
                    return store, members
            time.sleep(_LOOK)
        raise RendezvousTimeoutError(f"the nodes did not meet within {self._join_timeout} s (join_timeout)")

    def num_nodes_waiting(self) -> int:
        return int(self._rounds.number is not None and self._rounds.newest()[0] != self._round)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True
