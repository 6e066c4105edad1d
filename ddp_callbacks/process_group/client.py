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
_PAUSE = 0.02  # seconds between two attempts to connect
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
        patience: Seconds within which rank 0 must be reached once its address is known.

    Attributes:
        problem: Why it could not be reached.
    """

    def __init__(self, owner: Owner, hello: Message, patience: float) -> None:
        self._owner, self._hello, self._patience = owner, hello, patience
        self.problem = ""
        self._since = 0.0  # when its address became known
        self._is_over = False  # whether there is no further attempt to connect
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
        try:
            while not self._is_over and not self._is_closing.wait(_PAUSE) and self._owner.tick():
                self._serve()
        except RuntimeError as error:  # the store's host has died
            self._owner.lose_server(str(error))
        while not self._is_closing.wait(TICK) and self._owner.tick():
            pass  # rank 0 has gone; this rank may still wait for its GPU

    def _serve(self) -> None:
        """Connect if rank 0 listens, and pass on what comes, until one end closes."""
        if (address := self._owner.find_server()) is None:
            return
        self._since = self._since or time.monotonic()
        try:
            sock = socket.create_connection((address["host"], address["port"]), timeout=5)
            with contextlib.closing(Connection(sock, 0)) as connection:
                self._greet(connection, os.environ.get(SECRET) or address["secret"])
                self._listen(connection)
        except (OSError, ValueError) as error:
            self.problem = str(error)
            if not self._is_over:  # the address can be that of an earlier attempt, which the store still holds
                self.problem = f"{address['host']} port {address['port']} cannot be reached: {error}"
                self._connection, self._is_over = None, time.monotonic() - self._since > self._patience
            if self._is_over and not self._is_closing.is_set():
                self._owner.lose_server(self.problem)

    def _greet(self, connection: Connection, secret: str) -> None:
        with self._lock:
            self._unsent.appendleft({**self._hello, "secret": secret})
            self._send_all(connection)
            self._connection = connection

    def _listen(self, connection: Connection) -> None:
        selector = selectors.PollSelector()
        selector.register(connection, selectors.EVENT_READ)
        while not self._is_closing.is_set() and self._owner.tick():
            end = time.monotonic() + TICK
            while selector.select(max(0.0, end - time.monotonic())):
                for message in connection.receive():
                    self._is_over = True  # rank 0 knows this rank, and does so once
                    self._owner.hear(message)
                    if message["event"] == "closing":
                        return
            connection.check_silence()
