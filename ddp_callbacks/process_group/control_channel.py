"""Connections of the control channel: each message is one line of JSON.

The kernel answers for a process that computes, holds the GIL or is stopped. So only a lost machine or link is silent,
and TCP sends lost packets again after an outage.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import weakref
from typing import Any, TypeAlias

from ddp_callbacks.cluster.environment import HEARTBEAT_TIMEOUT
from ddp_callbacks.errors import ConfigurationError, say

Message: TypeAlias = dict[str, Any]

WARNING = "DDP_CALLBACKS_HEARTBEAT_WARNING"
"""Environment variable: seconds of silence of a machine after which a warning is printed; default 5."""

_SENDS = 2.0  # seconds in which the kernel takes a message, unless the other process has long read nothing
_LIMIT = 1 << 22  # bytes of a message; at the begin of a run, it has about 60 per rank
_OPTIONS = ("TCP_NODELAY", 1), ("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 127)  # a probe each second
_LAST_ACK = 56  # offset of tcpi_last_ack_recv, milliseconds, in Linux's tcp_info

CLOSED_IN_CHILDREN: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Sockets that forked children close: a loader worker that outlives its process would hide that process's end."""


def _close_copies() -> None:
    for sock in list(CLOSED_IN_CHILDREN):
        sock.close()


os.register_at_fork(after_in_child=_close_copies)


def _seconds(name: str, default: str) -> float:
    text = os.environ.get(name) or default
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) > 0:
            return seconds
    raise ConfigurationError(f"{name} must be a positive number of seconds, got {text!r}.")


def limits() -> tuple[float, float]:
    """Return the seconds of a machine's silence after which to warn, and to give it up.

    Raises:
        ConfigurationError: :data:`WARNING` or :data:`.HEARTBEAT_TIMEOUT` holds no positive number.
    """
    return _seconds(WARNING, "5"), _seconds(HEARTBEAT_TIMEOUT, "10")


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _OPTIONS:
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def encode(message: Message) -> bytes:
    """Return a message as it travels, for many receivers."""
    return json.dumps(message).encode() + b"\n"


class Connection:
    """A connection of the control channel. It takes over a connected socket.

    Args:
        sock: The connected socket.
        rank: The rank at the other end; -1 if it has not said who it is.

    Attributes:
        rank: The rank at the other end.
    """

    def __init__(self, sock: socket.socket, rank: int) -> None:
        self.rank = rank
        self._socket, self._received = sock, b""
        CLOSED_IN_CHILDREN.add(sock)
        self._warning, self._timeout = limits()
        self._is_silent = False
        sock.settimeout(_SENDS)
        _keep_alive(sock)

    def fileno(self) -> int:
        """Return the socket's descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send a message. Raises OSError if the connection has ended, or the other end reads nothing for 2 seconds."""
        self.send_encoded(encode(message))

    def send_encoded(self, message: bytes) -> None:
        """Send what :func:`encode` has returned. Raises as :meth:`send`."""
        self._socket.sendall(message)

    def receive(self) -> list[Message]:
        """Return the messages that have come. Raises OSError at the end, ValueError if the data are no messages."""
        data = self._socket.recv(1 << 16)
        if not data:
            raise ConnectionResetError("the other end has closed the connection")
        *lines, self._received = (self._received + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except RecursionError as error:
            raise ValueError("this is no message") from error
        if len(self._received) > _LIMIT or not all(isinstance(message, dict) for message in messages):
            raise ValueError("this is no message")
        return messages

    def check_silence(self) -> None:
        """Warn once if the other machine is silent for long. Raises OSError if it is silent until the timeout."""
        seconds = self._silence()
        if seconds > self._warning and not self._is_silent:
            limit = f"it is given up after {self._timeout:g} s"
            say(f"the machine of rank {self.rank} has not answered for {seconds:.0f} s; {limit}", logging.WARNING)
        self._is_silent = seconds > self._warning
        if seconds > self._timeout:
            raise TimeoutError(f"its machine has not answered for {seconds:.0f} s")

    def _silence(self) -> float:
        """Return the seconds since the other machine's last answer (usually one per second); 0 if unknown."""
        with contextlib.suppress(AttributeError, OSError):
            state = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK + 4)
            return float(struct.unpack_from("I", state, _LAST_ACK)[0] / 1000)
        return 0.0

    def end(self) -> None:
        """End the connection for both sides; messages already sent still arrive. Any thread may call it."""
        with contextlib.suppress(OSError):  # the connection has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; the other end notices."""
        self._socket.close()


def end_when_silent(port: int) -> None:
    """Let this process's connections to a port of other machines fail once these have been silent for the timeout.

    For the connections of torch's stores, which have no limit of their own.
    """
    limit = round(1000 * limits()[1])
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was closed by now, or is not connected
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(descriptor))) as sock:
                    if sock.family != socket.AF_UNIX and sock.getpeername()[1] == port:
                        _keep_alive(sock)
                        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
