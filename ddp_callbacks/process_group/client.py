"""The thread of each rank at its end of the control channel."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections import deque
from typing import Protocol

from ddp_callbacks.environment import SECRET
from ddp_callbacks.process_group.connection import Connection, Message
from ddp_callbacks.process_group.server import THREAD

TICK = 0.5  # seconds between two calls of ``tick``
_PATIENCE = 30.0  # seconds in which rank 0 must be reached once its address is known
_LEAVES = 2.0  # seconds that we wait for the thread to end


class Owner(Protocol):
    """Whom the thread serves."""

    def find_server(self) -> Message | None:
        """The address of rank 0, see :class:`.server.Server`, once it is there."""

    def hear(self, message: Message) -> None:
        """Called with each message that comes."""

    def lose_server(self, why: str) -> None:
        """Called when the connection has ended, by rank 0's death or the loss of a machine."""

    def tick(self) -> bool:
        """Called each :data:`TICK` seconds; whether to go on."""


class Client:
    """This rank's connection. Its thread ends with :meth:`close`, with the connection, or if its owner says so.

    Args:
        owner: Whom it serves.
        hello: The first message.
    """

    def __init__(self, owner: Owner, hello: Message) -> None:
        self._owner, self._hello = owner, hello
        self._unsent: deque[Message] = deque()  # without a connection, or while this thread sends another one
        self._is_sending = False
        self._connection: Connection | None = None
        self._lock = threading.RLock()  # a signal's handler may send
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send it. Blocks for two seconds at most; any thread, and a signal's handler, may call it."""
        self._unsent.append(message)
        with self._lock:
            if self._connection is not None:
                self._send_all(self._connection)

    def _send_all(self, connection: Connection) -> None:
        """A signal's handler may come in the middle of a message: what it sends follows."""
        while self._unsent and not self._is_sending:
            self._is_sending = True
            try:
                with contextlib.suppress(OSError):  # the thread hears of the end of the connection
                    connection.send(self._unsent.popleft())
            finally:
                self._is_sending = False

    def close(self) -> None:
        """End the connection and the thread. Blocks for two seconds at most."""
        self._is_closing.set()
        if self._connection is not None:
            self._connection.end()
        if self._thread is not threading.current_thread():
            self._thread.join(_LEAVES)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store's host has died
            if connection := self._connect():
                with contextlib.closing(connection):
                    self._listen(connection)
                while not self._is_closing.wait(TICK) and self._owner.tick():
                    pass  # rank 0 has gone; this rank may still wait for its GPU

    def _connect(self) -> Connection | None:
        """Connect as soon as rank 0 listens; ``None`` if this end closes before."""
        until = float("inf")
        while not self._is_closing.wait(0.02) and self._owner.tick():
            if (address := self._owner.find_server()) is None:
                continue
            until = min(until, time.monotonic() + _PATIENCE)
            try:
                sock = socket.create_connection((address["host"], address["port"]), timeout=5)
            except OSError as error:
                if time.monotonic() > until:
                    self._owner.lose_server(f"{address['host']} port {address['port']} cannot be reached: {error}")
                    return None
            else:
                return self._greet(Connection(sock, 0), os.environ.get(SECRET) or address["secret"])
        return None

    def _greet(self, connection: Connection, secret: str) -> Connection:
        with self._lock:
            self._unsent.appendleft({**self._hello, "secret": secret})
            self._send_all(connection)
            self._connection = connection
        return connection

    def _listen(self, connection: Connection) -> None:
        """Pass on what comes, until one end closes."""
        selector = selectors.PollSelector()
        selector.register(connection, selectors.EVENT_READ)
        try:
            while not self._is_closing.is_set() and self._owner.tick():
                end = time.monotonic() + TICK
                while selector.select(max(0.0, end - time.monotonic())):
                    for message in connection.receive():
                        self._owner.hear(message)
                        if message["event"] == "closing":
                            return
                connection.check_silence()
        except (OSError, ValueError) as error:
            if not self._is_closing.is_set():
                self._owner.lose_server(str(error))
