"""The connection to one node: a process that talks to it, its answers, and why it ended."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import random
import shutil
from asyncio.subprocess import PIPE, Process, SubprocessStreamProtocol
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddp_callbacks.launcher import facts
from ddp_callbacks.launcher.hosts import NodePlan
from ddp_callbacks.launcher.node.link import GREETING, HEADER
from ddp_callbacks.launcher.remote import (
    FIRST_LINE,
    READY,
    TURNED_AWAY,
    as_hex,
    command_to,
    explain,
    message,
    opening,
)

ANSWER_TIMEOUT = 30.0  # seconds to wait for an answer
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
    plans: Sequence[NodePlan], events: asyncio.Queue[Event], patience: float, answer_timeout: float = ANSWER_TIMEOUT
) -> list[Connection]:
    """One connection for each node; few log in at a time, as sshd refuses more (MaxStartups)."""
    logins = asyncio.Semaphore(_LOGINS)
    return [Connection(plan, events, patience, answer_timeout, logins) for plan in plans]


class Connection:
    """Talks to one node; everything from it other than answers goes to ``events``. One :meth:`ask` at a time.

    Attributes:
        greeted: Whether the node's program has answered.
        is_open: Whether it is still there.
        hello: The node's description of itself.
        place: See :func:`ddp_callbacks.launcher.facts.place`.
    """

    def __init__(
        self,
        plan: NodePlan,
        events: asyncio.Queue[Event],
        patience: float,
        answer_timeout: float,
        logins: asyncio.Semaphore,
    ) -> None:
        self.plan = plan
        self.greeted = self.is_open = False
        self.hello: dict[str, Any] = {}
        self.place: dict[str, Any] = {}
        self._events, self._patience, self._answer_timeout, self._logins = events, patience, answer_timeout, logins
        self._answers: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._heard: float | None = None  # time of the last data; None while waiting for the terminal
        self._asks = self._silent = False
        self._held: bytes | None = None  # data to send once the shell there is ready
        self._noise = self._errors = b""
        self._process: Process | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def _open(self) -> None:
        self._noise = self._errors = b""
        self._answers = asyncio.Queue()
        # A separate session: the launcher itself handles Ctrl-C and the end of the terminal.
        # As create_subprocess_exec does, which keeps the transport for itself.
        words, loop = [*_DEAF, *command_to(self.plan, self._patience)], asyncio.get_running_loop()
        self._transport, protocol = await loop.subprocess_exec(
            lambda: SubprocessStreamProtocol(_NOISE, loop),
            *words,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            start_new_session=True,
        )
        self._process = Process(self._transport, protocol, loop)
        self._tasks = [asyncio.create_task(read(self._process)) for read in (self._read, self._read_errors)]
        if not self.plan.is_here and self.plan.rsh is not None:
            self._write(FIRST_LINE)
            self._held = b""
        self._write(opening(self.plan.python))

    async def ask(self, do: str, timeout: float | None = None, **values: Any) -> dict[str, Any]:
        """Send a message; return the node's answer.

        Raises:
            NodeProblem: The node could not do it, the connection ended, or no answer came.
        """
        self._asks, seconds = True, timeout or self._answer_timeout
        self.tell(do, **values)
        try:
            answer = await asyncio.wait_for(self._answers.get(), seconds)
        except TimeoutError:
            remedy = f". Does its login shell wait for something? Try: {self.plan.shell}true"
            raise NodeProblem(f"no answer within {seconds:g} s{remedy}") from None
        finally:
            self._asks = False
        if answer is None:
            raise NodeProblem(await self.explain_end())
        if "problem" in answer:
            raise NodeProblem(answer["problem"])
        return answer

    async def greet(self, grace: float | None = None) -> None:
        """Connect to the node and read its description. If its sshd refuses the login for lack of slots, try again.

        Args:
            grace: Seconds from a request to stop to force, also once the connection is lost; ``None``: the default.

        Raises:
            NodeProblem: It cannot be reached.
        """
        try:
            await self._log_in(grace)
        except NodeProblem:
            if self.plan.instead is None or self.greeted or self.plan.is_here:
                raise
            self.plan = replace(self.plan, rsh=self.plan.instead, instead=None)
            await self._log_in(grace)
        self._tasks.append(asyncio.create_task(self._beat()))

    async def _log_in(self, grace: float | None) -> None:
        if shutil.which(program := command_to(self.plan)[0]) is None:
            raise NodeProblem(
                f"there is no {program} on this machine to reach it by. Install it, or name another: --rsh"
            )
        for pause in (*_PAUSES, None):
            try:
                async with self._logins:
                    await self._open()
                    self.hello = await self.ask("hello", silence=self._patience, grace=grace)
                return
            except NodeProblem:
                if pause is None or not self._was_turned_away():
                    raise
                await asyncio.sleep(pause * (1 + random.random()))

    def _was_turned_away(self) -> bool:
        """Whether an sshd, on the node or on the route, had too many logins."""
        is_ssh = not self.plan.is_here and self.plan.rsh is None
        return is_ssh and not self.greeted and any(words in self._errors for words in TURNED_AWAY)

    # --- what is asked, each of which raises NodeProblem if the node cannot do it -------------------------------------

    async def enter(self, environ: dict[str, str], script: str | None) -> None:
        """Change to the working directory, set variables for all that is started, and check that the script exists."""
        found = {as_hex(name): as_hex(value) for name, value in environ.items()}
        await self.ask("enter", cwd=as_hex(self.plan.cwd), environ=found)
        if script is not None:
            await self.ask("find", path=as_hex(script))

    async def look(self, which: str, seconds: float) -> None:
        """Find its place; ``which`` is the first argument of :mod:`ddp_callbacks.launcher.facts`."""
        plan = self.plan
        words = plan.words(plan.python, "-P", "-c", Path(facts.__file__).read_text(), which, str(plan.cores or 0))
        said = await self.ask("output", argv=[as_hex(word) for word in words], seconds=seconds)
        if said["code"]:
            needs = f"--setup {plan.setup!r} or Python failed" if plan.setup else "needs Python 3.11 or newer"
            raise NodeProblem(f"{needs}: {said['err'].strip().rpartition(chr(10))[2]}")
        self.place = dict(json.loads(said["out"].strip().rpartition("\n")[2]))  # below what --setup may print

    async def listen(self, address: str, port: int) -> int:
        """Hold a port for the ranks' store; 0 finds a free one."""
        return int((await self.ask("listen", address=address, port=port))["port"])

    async def reach(self, addresses: list[tuple[str, int]], seconds: float) -> None:
        """Connect to ports that other nodes hold."""
        problems = (await self.ask("reach", addresses=addresses, seconds=seconds))["problems"]
        if any(problems):
            raise NodeProblem("; ".join(filter(None, problems)))

    async def find_interface(self, address: str) -> None:
        """Find the interface on the route to ``address``; gloo and NCCL use it, unless the user chose another."""
        own = (await self.ask("route", address=address))["address"]
        self.place["interface"] = self.place["interfaces"].get(own, "")

    # ------------------------------------------------------------------------------------------------------------------

    def tell(self, do: str, **values: Any) -> None:
        """Send a message that has no answer."""
        self._write(message(do, **values))

    async def close(self, timeout: float) -> None:
        """Disconnect, so that the node ends the job. Wait for the local process; kill it after ``timeout``."""
        if self._process is None or self._process.stdin is None:
            return
        for task in self._tasks[2:]:
            task.cancel()
        self._process.stdin.close()
        await self._end_process(timeout if self.greeted else 0)
        self._transport.close()  # a shared connection of ssh may still hold the pipes

    async def _end_process(self, timeout: float) -> None:
        """Wait for the local process; kill it after ``timeout``."""
        assert self._process is not None
        for seconds in (timeout, _LEAVES):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), seconds)
                return
            self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            assert self._process is not None
            self._process.kill()

    async def explain_end(self) -> str:
        """Why the connection ended, from the messages of ssh or the shell there."""
        assert self._process is not None
        await self._end_process(_LEAVES)  # a command in ssh's place may outlive what it has started
        await asyncio.wait(self._tasks[1:2], timeout=1)
        code, said = (
            self._process.returncode,
            [line.strip() for line in self._errors.decode(errors="replace").splitlines() if line.strip()],
        )
        if self._silent:
            return f"the connection was lost (silent for {self._patience:g} s)"
        if self.greeted:
            return f"the connection was lost{f' ({said[-1]})' if said else ''}"
        if self._held is not None or (code == 255 and not self.plan.is_here):
            return explain(self.plan, code, said)
        if code in (126, 127):
            where = "Set its path with --python, or with python= in the host file"
            return f"cannot start the interpreter {self.plan.python}. {where}"
        noise = self._noise.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed([*noise, *said]) if line.strip()), "no output")
        return f"the interpreter {self.plan.python} failed to start (exit code {code}): {last}"

    def _write(self, data: bytes) -> None:
        if self._held is not None:
            self._held += data
        elif self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(data)

    async def _beat(self) -> None:
        """Send heartbeats, even while the terminal takes no output, and check that the node answers.

        ssh's keep-alive does not work on a shared connection (ControlPath).
        """
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(_BEAT)
            self.tell("beat")
            # While it works on an answer, :meth:`ask` has a timeout.
            if not self._asks and self._heard is not None and now() - self._heard > self._patience:
                self._silent = True
                self._kill()

    async def _read_errors(self, process: Process) -> None:
        assert process.stderr is not None
        while data := await process.stderr.read(_NOISE):
            self._errors = (self._errors + data)[-_NOISE:]

    async def _read(self, process: Process) -> None:
        """Sort received data into answers and events, until the end."""
        assert process.stdout is not None
        buffer, answers = b"", self._answers
        while data := await process.stdout.read(_NOISE):
            buffer += data
            self._heard = asyncio.get_running_loop().time()
            if not self.greeted:
                buffer = self._await_greeting(buffer)
            if self.greeted:
                buffer = await self._take_frames(buffer)
        self.is_open = False
        answers.put_nowait(None)
        if self.greeted:
            await self._put(Event(self, "closed", -1, b""))

    def _await_greeting(self, buffer: bytes) -> bytes:
        """The data after the greeting, if it has come; a login shell may print something before it."""
        if self._held is not None and READY in buffer:
            buffer = buffer.partition(READY)[2]
            held, self._held = self._held, None
            self._write(held)
        self._noise, greeting, rest = buffer.partition(GREETING)
        self.greeted = self.is_open = bool(greeting)
        return rest if greeting else buffer[-_NOISE:]

    async def _take_frames(self, buffer: bytes) -> bytes:
        start = 0
        while len(buffer) - start >= HEADER.size:
            kind, rank, length = HEADER.unpack_from(buffer, start)
            begin, end = start + HEADER.size, start + HEADER.size + length
            if len(buffer) <= end:
                break
            data, start = buffer[begin:end], end + 1  # skip the newline
            if kind == b"r":
                self._answers.put_nowait(json.loads(data))
            elif kind != b"b":
                await self._put(Event(self, kind.decode(), rank, data))
        return buffer[start:]

    async def _put(self, event: Event) -> None:
        """Queue an event. May wait for the terminal; data from the node is not read meanwhile."""
        self._heard = None
        await self._events.put(event)
        self._heard = asyncio.get_running_loop().time()


async def addresses_of(node: Connection, others: Sequence[Connection]) -> list[str]:
    """The addresses at which the other nodes may reach this one, the most likely first.

    If we use ssh, there is one, on the network over which we reach the nodes: the address that ssh has connected to;
    for this machine, the one on the route to another node.
    """
    own = _address_reached(node)
    if own is not None:
        return [own]
    elsewhere = next(filter(None, map(_address_reached, others)), None)
    if elsewhere is not None:
        return [str((await node.ask("route", address=elsewhere))["address"])]
    if all(each.plan.is_here for each in (node, *others)):
        return ["127.0.0.1"]  # all of them are this machine
    return list(node.place["addresses"]) or ["127.0.0.1"]


def _address_reached(node: Connection) -> str | None:
    """The address that ssh has connected to; ``None`` if unknown, and for this machine."""
    address = node.hello.get("address")
    if node.plan.is_here or node.plan.rsh is not None or not address:
        return None
    return None if ipaddress.ip_address(address.partition("%")[0]).is_loopback else str(address)
