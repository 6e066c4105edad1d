"""The thread of rank 0 that all ranks connect to. :class:`.coordinator.Coordinator` decides on the messages to them."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any

import torch.distributed as dist

from ddp_callbacks.cluster.environment import SECRET
from ddp_callbacks.cluster.network import address_towards, is_loopback, own_addresses
from ddp_callbacks.process_group.control_channel import CLOSED_IN_CHILDREN, Connection, Message, encode
from ddp_callbacks.process_group.coordinator import LINGER, Coordinator, Sent

THREAD = "ddp_callbacks control"
_TICK = 0.25  # seconds
_STRANGER = 5.0  # seconds within which a new connection must say who it is


class Server(threading.Thread):
    """A thread that listens on one address of this host only: the one that the other processes reach.

    Args:
        size: The number of ranks.
        store: The store of the process group, through which they have met.

    Attributes:
        address: Host, port and secret, with which a rank connects; no secret if the environment has it.
    """

    def __init__(self, size: int, store: dist.Store) -> None:
        super().__init__(name=THREAD, daemon=True)
        host, own = own_address(_host_of(store)), os.environ.get(SECRET)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        CLOSED_IN_CHILDREN.add(self._listener)
        self._secret = own or secrets.token_hex(16)
        port = self._listener.getsockname()[1]
        self.address: Message = {"host": host, "port": port, "secret": "" if own else self._secret}
        self._coordinator, self._size = Coordinator(size), size
        self._selector = selectors.PollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._ranks: dict[int, Connection] = {}
        self._strangers: dict[Connection, float] = {}  # when each must have said who it is
        self._tick_at = 0.0
        self._is_closing = threading.Event()
        self.start()

    def close(self) -> None:
        """Let the thread tell the others that rank 0 has left, and end, within :data:`.coordinator.LINGER`."""
        self._is_closing.set()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve the ranks."""
        while not self._is_closing.is_set():
            self._work()
        end = time.monotonic() + LINGER
        while 0 in self._ranks and time.monotonic() < end:  # rank 0's last messages are on the way
            self._work()
        self._send(self._coordinator.close())
        while self._ranks and time.monotonic() < end:  # the other ranks close their ends
            self._work()
        for connection in [*self._strangers, *self._ranks.values()]:
            connection.close()
        self._listener.close()

    def _work(self) -> None:
        for key, _ in self._selector.select(_TICK):
            ready: Any = key.fileobj
            if ready is self._listener:
                self._accept()
            elif ready in self._strangers or self._ranks.get(ready.rank) is ready:  # and has not been dropped just now
                self._try(ready, self._receive)
        now = time.monotonic()
        if now >= self._tick_at:
            self._tick_at = now + _TICK
            for connection in list(self._ranks.values()):
                self._try(connection, Connection.check_silence)
            for stranger in [stranger for stranger, deadline in self._strangers.items() if now > deadline]:
                self._drop(stranger)
            self._send(self._coordinator.tick(now))

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the other end has gone again
            stranger = Connection(self._listener.accept()[0], -1)
            self._strangers[stranger] = time.monotonic() + _STRANGER
            self._selector.register(stranger, selectors.EVENT_READ)

    def _try(self, connection: Connection, action: Callable[[Connection], None]) -> None:
        try:
            action(connection)
        except TimeoutError as error:
            self._drop(connection, str(error))
        except OSError:  # it has ended
            self._drop(connection)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            self._drop(connection, f"what it sent on the control channel is invalid: {error!r}")

    def _receive(self, connection: Connection) -> None:
        for message in connection.receive():
            if connection in self._strangers:
                self._admit(connection, message)
            self._send(self._coordinator.receive(connection.rank, message, time.monotonic()))

    def _admit(self, stranger: Connection, hello: Message) -> None:
        """Accept a rank by its first message. Raises ValueError unless it is a new rank of this job."""
        rank, secret = hello.get("rank"), str(hello.get("secret"))
        is_known = hmac.compare_digest(secret.encode(), self._secret.encode())
        if not is_known or not isinstance(rank, int) or rank not in range(self._size) or rank in self._ranks:
            raise ValueError("it is no rank of this job")
        del self._strangers[stranger]
        self._ranks[rank], stranger.rank = stranger, rank

    def _drop(self, connection: Connection, why: str = "") -> None:
        self._selector.unregister(connection)
        connection.close()
        self._strangers.pop(connection, None)
        if self._ranks.get(connection.rank) is connection:
            del self._ranks[connection.rank]
            self._send(self._coordinator.lose(connection.rank, time.monotonic(), why))

    def _send(self, sent: Sent) -> None:
        for _, receivers in groupby(sent, lambda each: id(each[1])):
            data = b""
            for rank, message in receivers:
                if rank in self._ranks:
                    data = data or encode(message)
                    self._try(self._ranks[rank], partial(_send_to, data=data))


def _send_to(connection: Connection, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # its last messages, such as a farewell, are still to be received
        connection.send_encoded(data)


def own_address(host: str) -> str:
    """Return the address at which others reach this host: on the route to ``host``, where they meet, or gloo's."""
    found = "127.0.0.1"
    with contextlib.suppress(OSError):
        found = address_towards(host)
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if is_loopback(found) and interface:
        return next((own for own, name in own_addresses().items() if name == interface), found)
    return found


def _host_of(store: dist.Store) -> str:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else socket.gethostname()
