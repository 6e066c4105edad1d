"""The connection to one node: a process that talks to it, its answers, and why it ended."""

from __future__ import annotations

import ipaddress
import json
import os
import queue
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from ddp_callbacks.launcher.node.link import GREETING, HEADER
from ddp_callbacks.launcher.plan import NodePlan
from ddp_callbacks.launcher.remote import FIRST_LINE, READY, message, opening
from ddp_callbacks.launcher.ways import TURNED_AWAY, command_to, explain_command, explain_ssh

_ANSWER_TIMEOUT = 30.0  # seconds to wait for an answer
_BEAT = 0.5  # seconds between two heartbeats
_LEAVES = 2.0  # seconds for the command that reached a node to end after its output
_LOGINS = 8  # simultaneous ssh logins; sshd refuses some if ten are in progress
_PAUSES = (0.5, 1.0)  # minimum seconds before a login is repeated; up to twice as long
# A scheduler signals each process of its job, and without ssh there would be no orderly end elsewhere.
_DEAF = ("/bin/sh", "-c", "trap '' TERM USR1 USR2; exec \"$@\"", "sh")
_NOISE = 1 << 16  # bytes that a login shell may print before the greeting


class NodeProblem(Exception):
    """A node cannot do what was asked, or cannot be reached; the text has the remedy."""


@dataclass(frozen=True)
class Event:
    """News from a node: a frame (see :mod:`ddp_callbacks.launcher.node`), or ``closed`` at its end."""

    node: Connection
    kind: str
    rank: int
    data: bytes


def connections(
    plans: Sequence[NodePlan], events: queue.Queue[Event], patience: float, answer_timeout: float = _ANSWER_TIMEOUT
) -> list[Connection]:
    """One connection for each node; few log in at a time, as sshd refuses more (MaxStartups)."""
    logins = threading.Semaphore(_LOGINS)
    return [Connection(plan, events, patience, answer_timeout, logins) for plan in plans]


class Connection:
    """Talks to one node; everything from it other than answers goes to ``events``.

    :meth:`tell` may be called from any thread; :meth:`ask` from one at a time.
    """

    def __init__(
        self,
        plan: NodePlan,
        events: queue.Queue[Event],
        patience: float,
        answer_timeout: float = _ANSWER_TIMEOUT,
        logins: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._answer_timeout = answer_timeout
        self.plan = plan
        self.greeted = False
        self.hello: dict[str, Any] = {}  # the node's description of itself
        self.place: dict[str, Any] = {}  # see :func:`ddp_callbacks.launcher.facts.place`
        self._patience = patience
        self._events = events
        self._logins = nullcontext() if logins is None or plan.host is None else logins
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._heard: float | None = None  # time of the last data; None while waiting for the terminal
        self._asks = False
        self._silent = False
        self._lock = threading.RLock()  # a signal handler may write while its thread does
        self._held: bytes | None = None  # data to send once the shell there is ready
        self._noise = b""
        self._errors = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._given_up = False
        self._closed = threading.Event()

    def _open(self) -> None:
        self._noise = self._errors = b""
        self._answers = queue.Queue()
        # A separate session: the launcher itself handles Ctrl-C and the end of the terminal.
        self._process = process = subprocess.Popen(
            [*_DEAF, *command_to(self.plan, self._patience)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self._stderr_reader = threading.Thread(target=self._read_errors, args=(process,), daemon=True)
        self._stderr_reader.start()
        if self.plan.host is not None and self.plan.rsh is not None:
            self._write(FIRST_LINE)
            self._held = b""
        threading.Thread(target=self._read, args=(process, self._answers), daemon=True).start()
        self._write(opening(self.plan.python))
        if self._given_up:
            process.kill()

    def ask(self, do: str, **values: Any) -> dict[str, Any]:
        """Send a message; return the node's answer.

        Raises:
            NodeProblem: The node could not do it, the connection ended, or no answer came.
        """
        self._asks = True
        self.tell(do, **values)
        try:
            answer = self._answers.get(timeout=self._answer_timeout)
        except queue.Empty:
            remedy = f". Does its login shell wait for something? Try: {self.plan.shell}true"
            raise NodeProblem(f"no answer within {self._answer_timeout:g} s{remedy}") from None
        finally:
            self._asks = False
        if answer is None:
            raise NodeProblem(self.explain_end())
        if "problem" in answer:
            raise NodeProblem(answer["problem"])
        return answer

    def greet(self, grace: float | None = None) -> None:
        """Connect to the node and read its description. If its sshd refuses the login for lack of slots, try again.

        Args:
            grace: Seconds from a request to stop to force, also once the connection is lost; ``None``: the default.

        Raises:
            NodeProblem: It cannot be reached.
        """
        try:
            self._greet(grace)
        except NodeProblem:
            if self.plan.instead is None or self.greeted or self.plan.host is None or self._given_up:
                raise
            self.plan = replace(self.plan, rsh=self.plan.instead, instead=None)
            self._greet(grace)

    def _greet(self, grace: float | None) -> None:
        if shutil.which(program := command_to(self.plan)[0]) is None:
            raise NodeProblem(
                f"there is no {program} on this machine to reach it by. Install it, or name another: --rsh"
            )
        for pause in (*_PAUSES, None):
            try:
                with self._logins:
                    if self._given_up:
                        raise NodeProblem("ended before it was reached")
                    self._open()
                    self.hello = self.ask("hello", silence=self._patience, grace=grace)
            except NodeProblem:
                if pause is None or self._given_up or not self._was_turned_away():
                    raise
                time.sleep(pause * (1 + random.random()))
            else:
                threading.Thread(target=self._beat, daemon=True).start()
                return

    def _was_turned_away(self) -> bool:
        """Whether an sshd, on the node or on the route, had too many logins."""
        is_ssh = self.plan.host is not None and self.plan.rsh is None
        return is_ssh and not self.greeted and any(words in self._errors for words in TURNED_AWAY)

    def reach(self, addresses: list[tuple[str, int]], seconds: float) -> None:
        """Make the node connect to ports that other nodes hold.

        Raises:
            NodeProblem: It cannot connect.
        """
        problems = self.ask("reach", addresses=addresses, seconds=seconds)["problems"]
        if any(problems):
            raise NodeProblem("; ".join(filter(None, problems)))

    def tell(self, do: str, **values: Any) -> None:
        """Send a message that has no answer."""
        self._write(message(do, **values))

    def stop(self, number: int) -> None:
        """Ask the ranks there to stop, with a signal, and end the job after its grace."""
        self._tell_or_give_up("stop", number=number)

    def end(self, seconds: float) -> None:
        """End the job there: SIGTERM, and SIGKILL after these seconds."""
        self._tell_or_give_up("end", seconds=seconds)

    def _tell_or_give_up(self, do: str, **values: Any) -> None:
        """Send a message; if the node is not connected yet, give up connecting."""
        if self.greeted:
            self.tell(do, **values)
            return
        self._given_up = True
        if self._process is not None:
            self._process.kill()

    def close(self, timeout: float) -> None:
        """Disconnect, so that the node ends the job. Wait for the local process; kill it after ``timeout``."""
        self._closed.set()
        if self._process is None:
            return
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def explain_end(self) -> str:
        """Why the connection ended, from the messages of ssh or the shell there."""
        assert self._process is not None
        try:
            self._process.wait(_LEAVES)
        except subprocess.TimeoutExpired:  # a command in ssh's place that outlives what it has started
            self._process.kill()
            self._process.wait()
        self._stderr_reader.join(1)
        said = [line for line in self._errors.decode(errors="replace").splitlines() if line.strip()]
        if self._silent:
            return f"the connection was lost (silent for {self._patience:g} s)"
        if self.greeted:
            return f"the connection was lost{f' ({said[-1].strip()})' if said else ''}"
        if self._held is not None:
            return explain_command(self.plan, self._process.returncode, said)
        if self._process.returncode == 255 and self.plan.host is not None:
            return explain_ssh(self.plan.host, said)
        if self._process.returncode in (126, 127):
            where = "Install it there by the same path, or set its path with --python or python= in the host file"
            return f"cannot start the interpreter {self.plan.python}. {where}"
        noise = self._noise.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed([*noise, *said]) if line.strip()), "no output")
        return f"the interpreter {self.plan.python} failed to start (exit code {self._process.returncode}): {last}"

    def _write(self, data: bytes) -> None:
        with self._lock:
            if self._held is not None:
                self._held += data
                return
            assert self._process is not None
            stdin = self._process.stdin
            try:
                while data and stdin is not None and not stdin.closed:
                    data = data[os.write(stdin.fileno(), data) :]
            except OSError:
                pass  # the reader reports the end

    def _beat(self) -> None:
        """Send heartbeats, even while the terminal takes no output, and check that the node answers.

        ssh's keep-alive does not work on a shared connection (ControlPath).
        """
        while not self._closed.wait(_BEAT):
            self.tell("beat")
            if self._is_silent() and self._process is not None:
                self._silent = True
                self._process.kill()

    def _is_silent(self) -> bool:
        """Whether the node has been silent too long, unless it works on an answer: :meth:`ask` has a timeout."""
        heard = self._heard
        return self.greeted and not self._asks and heard is not None and time.monotonic() - heard > self._patience

    def _read_errors(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        with process.stderr as stream:
            while data := stream.read(1 << 16):
                self._errors = (self._errors + data)[-_NOISE:]

    def _read(self, process: subprocess.Popen[bytes], answers: queue.Queue[dict[str, Any] | None]) -> None:
        """Sort received data into answers and events, until the end."""
        assert process.stdout is not None
        buffer = b""
        with process.stdout as stream:  # no other thread may close it during a read
            while data := stream.read(1 << 16):
                buffer += data
                self._heard = time.monotonic()
                if not self.greeted:
                    buffer = self._await_greeting(buffer)
                if self.greeted:
                    buffer = self._take_frames(buffer)
        answers.put(None)
        if self.greeted:
            self._put(Event(self, "closed", -1, b""))

    def _await_greeting(self, buffer: bytes) -> bytes:
        """The data after the greeting, if it has come; a login shell may print something before it."""
        if self._held is not None and READY in buffer:
            buffer = buffer.partition(READY)[2]
            with self._lock:
                held, self._held = self._held, None
                self._write(held)
        self._noise, greeting, rest = buffer.partition(GREETING)
        self.greeted = bool(greeting)
        return rest if greeting else buffer[-_NOISE:]

    def _take_frames(self, buffer: bytes) -> bytes:
        start = 0
        while len(buffer) - start >= HEADER.size:
            kind, rank, length = HEADER.unpack_from(buffer, start)
            begin, end = start + HEADER.size, start + HEADER.size + length
            if len(buffer) <= end:
                break
            data, start = buffer[begin:end], end + 1  # skip the newline
            if kind == b"r":
                self._answers.put(json.loads(data))
            elif kind != b"b":
                self._put(Event(self, kind.decode(), rank, data))
        return buffer[start:]

    def _put(self, event: Event) -> None:
        """Queue an event. May wait for the terminal; data from the node is not read meanwhile."""
        self._heard = None
        self._events.put(event)
        self._heard = time.monotonic()


def addresses_of(node: Connection, others: Sequence[Connection]) -> list[str]:
    """The addresses at which the other nodes may reach this one, the most likely first.

    If we use ssh, there is one, on the network over which we reach the nodes: the address that ssh has connected to;
    for this machine, the one on the route to another node.
    """
    own = _address_reached(node)
    if own is not None:
        return [own]
    elsewhere = next(filter(None, map(_address_reached, others)), None)
    if elsewhere is not None:
        return [str(node.ask("route", address=elsewhere)["address"])]
    if all(each.plan.host is None for each in (node, *others)):
        return ["127.0.0.1"]  # all of them are this machine
    return list(node.place["addresses"]) or ["127.0.0.1"]


def _address_reached(node: Connection) -> str | None:
    """The address that ssh has connected to; ``None`` if unknown, and for this machine."""
    address = node.hello.get("address")
    if node.plan.host is None or node.plan.rsh is not None or not address:
        return None
    return None if ipaddress.ip_address(address.partition("%")[0]).is_loopback else str(address)
