"""One node as the launcher sees it: a process that speaks to it, what it answers, and why it cannot be reached."""

from __future__ import annotations

import ipaddress
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddp_callbacks.launcher.node import GREETING, HEADER
from ddp_callbacks.launcher.plan import NodePlan
from ddp_callbacks.launcher.remote import BOOTSTRAP, message, opening

CONNECT_TIMEOUT = 10  # seconds, for ssh to connect
_ANSWER_TIMEOUT = 30.0  # seconds, for an answer
_BEAT = 0.5  # seconds between two signs of life
_NOISE = 1 << 16  # bytes that a login shell may print before the greeting


class NodeProblem(Exception):
    """A node cannot do what it was asked for, or cannot be reached; says what to mend."""


@dataclass(frozen=True)
class Event:
    """Something that came from a node: a frame (see :mod:`ddp_callbacks.launcher.node`), or ``closed`` at its end."""

    node: Connection
    kind: str
    rank: int
    data: bytes


def ssh_command(host: str, patience: float = 3.5) -> list[str]:
    """The user's own ssh: the configuration, agent, jump hosts and known hosts apply, and host keys are checked.

    Nothing is ever asked on the terminal. A connection that is silent for ``patience`` seconds ends. A shared
    connection (ControlPath) is used if there is one, and none is left behind.
    """
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(CONNECT_TIMEOUT),
        "ServerAliveInterval": "1",
        "ServerAliveCountMax": str(max(1, round(patience) - 1)),
        "ControlMaster": "no",
        "ClearAllForwardings": "yes",
        "RemoteCommand": "none",
    }
    flags = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return ["ssh", "-T", "-x", *flags, "--", host, BOOTSTRAP]


class Connection:
    """Speaks to one node; what comes from it, other than answers, goes to ``events``.

    :meth:`tell` may be called from any thread; :meth:`ask` from one at a time.
    """

    def __init__(
        self, plan: NodePlan, events: queue.Queue[Event], patience: float, answer_timeout: float = _ANSWER_TIMEOUT
    ) -> None:
        self._answer_timeout = answer_timeout
        self.plan = plan
        self.greeted = False
        self.hello: dict[str, Any] = {}  # what the node says of itself
        self._patience = patience
        self._events = events
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._heard: float | None = None  # when something came last; None while the terminal is waited for
        self._asks = False
        self._silent = False
        self._lock = threading.RLock()  # a signal's handler may write while its thread does
        self._noise = b""
        self._errors = b""
        command = ["/bin/sh", "-c", BOOTSTRAP] if plan.host is None else ssh_command(plan.host, patience)
        # A session of its own: Ctrl-C and the end of the terminal are for the launcher to act on.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self._stderr_reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._stderr_reader.start()
        self._reader.start()
        self._write(opening(plan.python))
        self._closed = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def ask(self, do: str, **values: Any) -> dict[str, Any]:
        """The node's answer.

        Raises:
            NodeProblem: It could not, or the connection ended, or no answer came.
        """
        self._asks = True
        self.tell(do, **values)
        try:
            answer = self._answers.get(timeout=self._answer_timeout)
        except queue.Empty:
            remedy = f". Does its login shell wait for something? Try: {self.plan.shell}true"
            raise NodeProblem(f"no answer came within {self._answer_timeout:g} s{remedy}") from None
        finally:
            self._asks = False
        if answer is None:
            raise NodeProblem(self.explain_end())
        if "problem" in answer:
            raise NodeProblem(answer["problem"])
        return answer

    def greet(self) -> None:
        """Wait until the node answers, and take what it says of itself.

        Raises:
            NodeProblem: It cannot be reached.
        """
        self.hello = self.ask("hello", silence=self._patience)

    def reach(self, addresses: list[tuple[str, int]], seconds: float) -> None:
        """Let the node connect to what others hold.

        Raises:
            NodeProblem: It cannot.
        """
        problems = self.ask("reach", addresses=addresses, seconds=seconds)["problems"]
        if any(problems):
            raise NodeProblem("; ".join(filter(None, problems)))

    def tell(self, do: str, **values: Any) -> None:
        """Send a message to which there is no answer."""
        self._write(message(do, **values))

    def end(self, at_once: bool = False) -> None:
        """End the job there; whoever is not connected yet is given up."""
        if self.greeted:
            self.tell("end", at_once=at_once)
        else:
            self._process.terminate()

    def close(self, timeout: float) -> None:
        """Let go: the node ends what still runs there. Returns once this end is gone, killed after ``timeout``."""
        self._closed.set()
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def explain_end(self) -> str:
        """Why the connection ended, from what ssh or the shell there said."""
        self._process.wait()
        self._stderr_reader.join(1)
        said = [line for line in self._errors.decode(errors="replace").splitlines() if line.strip()]
        if self._silent:
            return f"the connection was lost (nothing came for {self._patience:g} s)"
        if self.greeted:
            return f"the connection was lost{f' ({said[-1].strip()})' if said else ''}"
        if self._process.returncode == 255 and self.plan.host is not None:
            return explain_ssh(self.plan.host, said)
        if self._process.returncode in (126, 127):
            where = "Name the one there by --python, or python= in the host file"
            return f"cannot start the interpreter {self.plan.python}. {where}"
        noise = self._noise.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed([*noise, *said]) if line.strip()), "nothing was printed")
        return f"the start of the interpreter {self.plan.python} failed with code {self._process.returncode}: {last}"

    def _write(self, data: bytes) -> None:
        with self._lock:
            stdin = self._process.stdin
            try:
                while data and stdin is not None and not stdin.closed:
                    data = data[os.write(stdin.fileno(), data) :]
            except OSError:
                pass  # the reader tells of the end

    def _beat(self) -> None:
        """Say that the launcher lives, also while its terminal takes no output; and listen for the answers.

        ssh's own signs of life do not exist on a connection that it shares (ControlPath).
        """
        while not self._closed.wait(_BEAT):
            self.tell("beat")
            if self._is_silent():
                self._silent = True
                self._process.kill()

    def _is_silent(self) -> bool:
        """A node that is asked for something is busy with that, and :meth:`ask` has a limit of its own."""
        heard = self._heard
        return self.greeted and not self._asks and heard is not None and time.monotonic() - heard > self._patience

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            while data := stream.read(1 << 16):
                self._errors = (self._errors + data)[-_NOISE:]

    def _read(self) -> None:
        """Sort what comes into answers and events, until the end."""
        assert self._process.stdout is not None
        buffer = b""
        with self._process.stdout as stream:  # which nobody else may close while it is read
            while data := stream.read(1 << 16):
                buffer += data
                self._heard = time.monotonic()
                if not self.greeted:
                    self._noise, greeting, rest = buffer.partition(GREETING)
                    if not greeting:
                        buffer = buffer[-_NOISE:]
                        continue
                    self.greeted, buffer = True, rest
                buffer = self._take_frames(buffer)
        self._answers.put(None)
        self._put(Event(self, "closed", -1, b""))

    def _take_frames(self, buffer: bytes) -> bytes:
        start = 0
        while len(buffer) - start >= HEADER.size:
            kind, rank, length = HEADER.unpack_from(buffer, start)
            if len(buffer) - start < HEADER.size + length:
                break
            start += HEADER.size + length
            data = buffer[start - length : start]
            if kind == b"r":
                self._answers.put(json.loads(data))
            elif kind != b"b":
                self._put(Event(self, kind.decode(), rank, data))
        return buffer[start:]

    def _put(self, event: Event) -> None:
        """May wait for the terminal, while what the node says is not read."""
        self._heard = None
        self._events.put(event)
        self._heard = time.monotonic()


def address_of(node: Connection, others: Sequence[Connection]) -> str:
    """The address of a node on the network over which the nodes are reached.

    That is the one to which ssh has connected; for this machine, the one on the way to another node.
    """
    own = _address_reached(node)
    if own is not None:
        return own
    elsewhere = next(filter(None, map(_address_reached, others)), None)
    if elsewhere is None:
        return "127.0.0.1"  # all are this machine
    return str(node.ask("route", address=elsewhere)["address"])


def _address_reached(node: Connection) -> str | None:
    """``None`` for this machine: where its user has logged in says nothing."""
    address = node.hello.get("address")
    if node.plan.host is None or not address or ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return None
    return str(address)


# The first that is found counts.
_SSH_SAYS = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "its host key is not the known one. If it should have changed, forget "
    "the old one (ssh-keygen -R {host}) and accept the new one (ssh {host} true)",
    "Host key verification failed": "its host key is not among the known hosts. Check and accept it: ssh {host} true",
    "Permission denied": "the login is refused ({said}). This must work without a password: ssh {host} true. "
    "Try ssh-copy-id {host}, or ssh-add",
    "Could not resolve hostname": "the host is unknown ({said}). Check the name, or add it to ~/.ssh/config",
}


def explain_ssh(host: str, said: list[str]) -> str:
    """What ssh's own words mean, and what to type."""
    text = "\n".join(said)
    for words, meaning in _SSH_SAYS.items():
        if words in text:
            line = next(line.strip() for line in said if words in line)
            return meaning.format(host=host, said=line)
    last = said[-1].strip() if said else "it said nothing"
    return f"ssh cannot reach it: {last}. Try: ssh {host} true"
