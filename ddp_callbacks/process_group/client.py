"""Each rank's end of the control channel: its thread, and the messages it has heard."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from ddp_callbacks.cluster.environment import SECRET
from ddp_callbacks.process_group.control_channel import Connection, Message
from ddp_callbacks.process_group.coordinator import FOREVER
from ddp_callbacks.process_group.server import THREAD

TICK = 0.5  # seconds between two calls of ``tick``
_PAUSE = 0.02  # seconds between two attempts to connect
_LEAVES = 2.0  # seconds that we wait for the thread to end


class Board:
    """Keeps the last message of each kind that a rank has heard, for threads that wait for it.

    Of requests for a gathering it keeps the first: a rank may ask when others have acted on the first one already.
    """

    def __init__(self) -> None:
        self._messages: dict[tuple[str, str, int | None], Message] = {}
        self._count = 0
        self._news = threading.Condition()

    def note(self, message: Message) -> None:
        """Keep a message, and wake the waiting threads."""
        key = message["event"], message.get("about", ""), message.get("run")
        with self._news:
            if message["event"] != "asked" or key not in self._messages:
                self._messages[key] = message
            self._count += 1
            self._news.notify_all()

    def get(self, event: str, about: str = "", run: int | None = None) -> Message | None:
        """Return the last message with this event, subject and run; ``None`` if there is none."""
        return self._messages.get((event, about, run))

    def pop(self, event: str, about: str = "", run: int | None = None) -> Message | None:
        """Like :meth:`get`, but forget the message. If several threads call it, one gets the message."""
        with self._news:
            return self._messages.pop((event, about, run), None)

    def wait_for(self, condition: Callable[[], Any], seconds: float) -> Any:
        """Wait up to ``seconds`` until a message makes ``condition`` true; return its value."""
        with self._news:
            return self._news.wait_for(condition, seconds)

    def wait_for_news(self, condition: Callable[[], Any], seconds: float) -> Any:
        """Like :meth:`wait_for`, but return after any message."""
        before = self._count
        self.wait_for(lambda: condition() or self._count != before, seconds)
        return condition()

    def forget_before(self, run: int) -> None:
        """Forget the messages of runs before ``run``."""
        with self._news:
            for key in [key for key in self._messages if key[2] is not None and key[2] < run]:
                del self._messages[key]


class Owner(Protocol):
    """The object that a client calls from its thread."""

    def find_server(self) -> Message | None:
        """Return the address of rank 0 (see :class:`.server.Server`); ``None`` while it is unknown."""

    def hear(self, message: Message) -> None:
        """Handle a message. Called for each one."""

    def tick(self) -> bool:
        """Return whether to go on. Called about every :data:`TICK` seconds, or more often."""


class Client(threading.Thread):
    """This rank's connection. Its thread ends with :meth:`close`, with the connection, or if its owner says so.

    Args:
        owner: The object that handles its messages.
        hello: The first message.
        patience: Seconds within which rank 0 must be reached once its address is known.

    Attributes:
        heard: The messages that have come. If rank 0 dies, or a machine is lost, it also has an ``end`` that says so.
        problem: Why rank 0 could not be reached.
    """

    def __init__(self, owner: Owner, hello: Message, patience: float) -> None:
        super().__init__(name=THREAD, daemon=True)
        self._owner, self._hello, self._patience = owner, hello, patience
        self.heard, self.problem = Board(), ""
        self._since = 0.0  # when the address of rank 0 became known
        self._is_over = False  # whether to make no further attempt to connect
        self._unsent: deque[Message] = deque()  # waiting for a connection, or for the end of another message
        self._is_sending = False
        self._connection: Connection | None = None
        self._lock = threading.RLock()  # a signal's handler may send
        self._is_closing = threading.Event()

    def send(self, message: Message) -> None:
        """Send a message. Blocks for two seconds at most; any thread, and a signal's handler, may call it."""
        self._unsent.append(message)
        with self._lock:
            if self._connection is not None:
                self._send_all(self._connection)

    def _send_all(self, connection: Connection) -> None:
        """Send all waiting messages. If a signal's handler interrupts one, the handler's message follows it."""
        while self._unsent and not self._is_sending:
            self._is_sending = True
            try:
                with contextlib.suppress(OSError):  # the thread notices the end of the connection
                    connection.send(self._unsent.popleft())
            finally:
                self._is_sending = False

    def close(self) -> None:
        """End the connection and the thread. Blocks for two seconds at most."""
        self._is_closing.set()
        if self._connection is not None:
            self._connection.end()
        self.join(_LEAVES)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve the owner."""
        try:
            while not self._is_over and not self._is_closing.wait(_PAUSE) and self._owner.tick():
                self._serve()
        except RuntimeError as error:  # the store's host has died
            self._lose(str(error))
        while not self._is_closing.wait(TICK) and self._owner.tick():
            pass  # rank 0 is gone; the owner may still have to free this rank from a wait for its GPU

    def _serve(self) -> None:
        """Connect if rank 0 listens, and pass its messages on, until one end closes."""
        if (address := self._owner.find_server()) is None:
            return
        self._since = self._since or time.monotonic()
        secret = os.environ.get(SECRET) or address["secret"]
        try:
            sock = socket.create_connection((address["host"], address["port"]), timeout=5)
            with contextlib.closing(Connection(sock, 0)) as connection:
                with self._lock:
                    self._unsent.appendleft({**self._hello, "secret": secret})
                    self._send_all(connection)
                    self._connection = connection
                self._listen(connection)
        except (OSError, ValueError) as error:
            self.problem = str(error)
            if not self._is_over:  # the address can be that of an earlier attempt, which the store still holds
                self.problem = f"{address['host']} port {address['port']} cannot be reached: {error}"
                self._connection, self._is_over = None, time.monotonic() - self._since > self._patience
            if self._is_over:
                self._lose(self.problem)

    def _listen(self, connection: Connection) -> None:
        selector = selectors.PollSelector()
        selector.register(connection, selectors.EVENT_READ)
        while not self._is_closing.is_set() and self._owner.tick():
            end = time.monotonic() + TICK
            while selector.select(max(0.0, end - time.monotonic())):
                for message in connection.receive():
                    self._is_over = True  # rank 0 has admitted this rank, which it does only once
                    self.heard.note(message)
                    self._owner.hear(message)
                    if message["event"] == "closing":
                        return
            connection.check_silence()

    def _lose(self, why: str) -> None:
        if not self._is_closing.is_set() and not self.heard.get("end", run=FOREVER):
            self.heard.note({"event": "end", "run": FOREVER, "kind": "gone", "ranks": [0], "why": why})


class Gathering:
    """Gathers one value per rank through rank 0. A :class:`.failures.Waitable`.

    Args:
        client: This rank's connection.
        about: The name of the gathering.
        run: The run that the gathering belongs to, or :data:`.coordinator.FOREVER`.
        members: The global ranks that take part; ``None`` is all.
        timeout: How long to wait for the others.
    """

    def __init__(
        self, client: Client, about: str, run: int | None, members: list[int] | None, timeout: timedelta
    ) -> None:
        self._client, self._about, self._run, self._members = client, about, run, members
        self._timeout, self._since = timeout, 0.0

    def ask(self, note: Any = None) -> None:
        """Ask all ranks for their values; the first ``note`` counts. A signal's handler may call it."""
        self._send("ask", note=note)

    def put(self, value: Any) -> None:
        """Send this rank's value. Call it once."""
        self._since = time.monotonic()
        self._send("put", value=value)

    def _send(self, event: str, **what: Any) -> None:
        self._client.send({"event": event, "about": self._about, "run": self._run, "members": self._members, **what})

    def asked(self) -> Message | None:
        """Return the message with the first ``note``; ``None`` if no rank has asked."""
        return self._client.heard.get("asked", self._about, self._run)

    @property
    def values(self) -> list[Any]:
        """The values of all members, in the order of ``members``; empty until the last one is here."""
        gathered = self._client.heard.get("gathered", self._about, self._run)
        return gathered["values"] * gathered["times"] if gathered else []

    def wait_slice(self, seconds: float) -> bool:
        """Wait until a message comes, up to ``seconds``; return whether all values are here."""
        if self._client.heard.wait_for_news(lambda: self.values, seconds):
            return True
        if self._client.heard.get("closing"):
            raise RuntimeError("rank 0 has left")
        if time.monotonic() - self._since > self._timeout.total_seconds():
            raise RuntimeError(f"not every rank came within {self._timeout}")
        return False
