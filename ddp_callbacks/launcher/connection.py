"""One node as the launcher sees it: a process that speaks to it, what it answers, and how its end is explained."""

from __future__ import annotations

import ipaddress
import json
import os
import queue
import random
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from ddp_callbacks.launcher.node import GREETING, HEADER
from ddp_callbacks.launcher.plan import NodePlan
from ddp_callbacks.launcher.remote import FIRST_LINE, READY, message, opening
from ddp_callbacks.launcher.ways import TURNED_AWAY, command_to, explain_command, explain_ssh

_ANSWER_TIMEOUT = 30.0  # seconds, for an answer
_BEAT = 0.5  # seconds between two signs of life
_LOGINS = 8  # by ssh, at the same time; sshd refuses some when ten are not done yet
_PAUSES = (0.5, 1.0)  # seconds before a login is tried again, and up to twice as long
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


def connections(
    plans: Sequence[NodePlan], events: queue.Queue[Event], patience: float, answer_timeout: float = _ANSWER_TIMEOUT
) -> list[Connection]:
    """One for each node; few log in at the same time, since an sshd refuses others (MaxStartups)."""
    logins = threading.Semaphore(_LOGINS)
    return [Connection(plan, events, patience, answer_timeout, logins) for plan in plans]


class Connection:
    """Speaks to one node; what comes from it, other than answers, goes to ``events``.

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
        self.hello: dict[str, Any] = {}  # what the node says of itself
        self._patience = patience
        self._events = events
        self._logins = nullcontext() if logins is None or plan.host is None else logins
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._heard: float | None = None  # when something came last; None while the terminal is waited for
        self._asks = False
        self._silent = False
        self._lock = threading.RLock()  # a signal's handler may write while its thread does
        self._held: bytes | None = None  # what is sent once the shell there is ready
        self._noise = b""
        self._errors = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._given_up = False
        self._closed = threading.Event()

    def _open(self) -> None:
        self._noise = self._errors = b""
        self._answers = queue.Queue()
        # A session of its own: Ctrl-C and the end of the terminal are for the launcher to act on.
        self._process = process = subprocess.Popen(
            command_to(self.plan, self._patience),
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
            process.terminate()

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
            raise NodeProblem(f"no answer within {self._answer_timeout:g} s{remedy}") from None
        finally:
            self._asks = False
        if answer is None:
            raise NodeProblem(self.explain_end())
        if "problem" in answer:
            raise NodeProblem(answer["problem"])
        return answer

    def greet(self) -> None:
        """Reach the node, and take what it says of itself. A login that the sshd there has no time for is tried again.

        Raises:
            NodeProblem: It cannot be reached.
        """
        for pause in (*_PAUSES, None):
            try:
                with self._logins:
                    if self._given_up:
                        raise NodeProblem("ended before it was reached")
                    self._open()
                    self.hello = self.ask("hello", silence=self._patience)
            except NodeProblem:
                if pause is None or self._given_up or not self._was_turned_away():
                    raise
                time.sleep(pause * (1 + random.random()))
            else:
                threading.Thread(target=self._beat, daemon=True).start()
                return

    def _was_turned_away(self) -> bool:
        """Whether an sshd, of the node or on the way there, had too many logins at once."""
        is_ssh = self.plan.host is not None and self.plan.rsh is None
        return is_ssh and not self.greeted and any(words in self._errors for words in TURNED_AWAY)

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
            return
        self._given_up = True
        if self._process is not None:
            self._process.terminate()

    def close(self, timeout: float) -> None:
        """Let go: the node ends what still runs there. Returns once this end is gone, killed after ``timeout``."""
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
        """Why the connection ended, from what ssh or the shell there said."""
        assert self._process is not None
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
            where = "Set its path with --python, or with python= in the host file"
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
                pass  # the reader tells of the end

    def _beat(self) -> None:
        """Say that the launcher lives, also while its terminal takes no output; and listen for the answers.

        ssh's own signs of life do not exist on a connection that it shares (ControlPath).
        """
        while not self._closed.wait(_BEAT):
            self.tell("beat")
            if self._is_silent() and self._process is not None:
                self._silent = True
                self._process.kill()

    def _is_silent(self) -> bool:
        """A node that is asked for something is busy with that, and :meth:`ask` has a limit of its own."""
        heard = self._heard
        return self.greeted and not self._asks and heard is not None and time.monotonic() - heard > self._patience

    def _read_errors(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        with process.stderr as stream:
            while data := stream.read(1 << 16):
                self._errors = (self._errors + data)[-_NOISE:]

    def _read(self, process: subprocess.Popen[bytes], answers: queue.Queue[dict[str, Any] | None]) -> None:
        """Sort what comes into answers and events, until the end."""
        assert process.stdout is not None
        buffer = b""
        with process.stdout as stream:  # which nobody else may close while it is read
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
        """What comes behind the greeting, if it is there; before it a login shell may have printed something."""
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
            data, start = buffer[begin:end], end + 1  # behind the newline
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


def addresses_of(node: Connection, others: Sequence[Connection]) -> list[str]:
    """The addresses of a node on which the others may reach it, the likeliest first.

    Where ssh leads to the nodes there is one, on the network over which they are reached: that to which ssh has
    connected; for this machine, the one on the way to another node.
    """
    own = _address_reached(node)
    if own is not None:
        return [own]
    elsewhere = next(filter(None, map(_address_reached, others)), None)
    if elsewhere is not None:
        return [str(node.ask("route", address=elsewhere)["address"])]
    if all(each.plan.host is None for each in (node, *others)):
        return ["127.0.0.1"]  # all are this machine
    return [str(address) for address in node.ask("addresses")["addresses"]]


def _address_reached(node: Connection) -> str | None:
    """``None`` where nothing says it. For this machine: where its user has logged in says nothing."""
    address = node.hello.get("address")
    if node.plan.host is None or node.plan.rsh is not None or not address:
        return None
    return None if ipaddress.ip_address(address.partition("%")[0]).is_loopback else str(address)
