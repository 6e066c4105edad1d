"""The connection to one node: a process that talks to it, its answers, and why it ended."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
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
_LAST_WORDS = 0.1  # seconds for what it said at its end to be read
_MANY = 100  # events of a node that wait; beyond that, its writes wait
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


class Connection(asyncio.SubprocessProtocol):
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
        self._asks = self._silent = False
        self._waiting = 0  # events that nobody has taken
        self._process: Any = None  # the transport of the process that talks to the node
        self._beats: asyncio.Task[None] | None = None

    async def _open(self) -> None:
        self._buffer = self._noise = self._errors = b""
        self._answers: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._held: bytes | None = None  # data to send once the shell there is ready
        loop = asyncio.get_running_loop()
        words = [*_DEAF, *command_to(self.plan, self._patience)]
        # A separate session: the launcher itself handles Ctrl-C and the end of the terminal.
        self._process, _ = await loop.subprocess_exec(lambda: self, *words, start_new_session=True)
        self._heard = loop.time()
        if not self.plan.is_here and self.plan.rsh is not None:
            self._write(FIRST_LINE)
            self._held = b""
        self._write(opening(self.plan.python))

    async def ask(self, do: str, timeout: float | None = None, **values: Any) -> dict[str, Any]:
        """Send a message; return the node's answer. With ``timeout``, the node answers heartbeats until then.

        Raises:
            NodeProblem: The node could not do it, the connection ended, or no answer came.
        """
        self._asks, seconds = timeout is None, timeout or self._answer_timeout
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
        if shutil.which(program := command_to(self.plan)[0]) is None:
            raise NodeProblem(
                f"there is no {program} on this machine to reach it by. Install it, or name another: --rsh"
            )
        for pause in (*_PAUSES, None):
            try:
                async with self._logins:
                    await self._open()
                    self.hello = await self.ask("hello", silence=self._patience, grace=grace)
                break
            except NodeProblem:
                if pause is None or not self._was_turned_away():
                    raise
                await asyncio.sleep(pause * (1 + random.random()))
        self._beats = asyncio.create_task(self._beat())

    def _was_turned_away(self) -> bool:
        """Whether an sshd, on the node or on the route, had too many logins."""
        is_ssh = not self.plan.is_here and self.plan.rsh is None
        return is_ssh and not self.greeted and any(words in self._errors for words in TURNED_AWAY)

    @property
    def addresses(self) -> list[str]:
        """Where others may reach it, the most likely first: where ssh has, or on the route to the outside."""
        by_ssh = self.hello["address"] if not self.plan.is_here and self.plan.rsh is None else None
        return [*dict.fromkeys(filter(None, (by_ssh, *self.place["addresses"])))]

    # --- what is asked, each of which raises NodeProblem if the node cannot do it -------------------------------------

    async def enter(self, environ: dict[str, str], script: str | None) -> None:
        """Change to the working directory, set variables for all that is started, and check that the script exists."""
        found = {as_hex(name): as_hex(value) for name, value in environ.items()}
        await self.ask(
            "enter", cwd=as_hex(self.plan.cwd), environ=found, script=None if script is None else as_hex(script)
        )

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
        if self._process is None:
            return
        if self._beats is not None:
            self._beats.cancel()
        self._process.get_pipe_transport(0).close()
        await self._end_process(timeout if self.greeted else 0)
        self._process.close()  # a shared connection of ssh may still hold the pipes

    async def _end_process(self, timeout: float) -> None:
        """Wait for the local process; kill it after ``timeout``."""
        for seconds in (timeout, _LEAVES):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), seconds)
                return
            self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    async def explain_end(self) -> str:
        """Why the connection ended, from the messages of ssh or the shell there."""
        await self._end_process(_LEAVES)  # a command in ssh's place may outlive what it has started
        await asyncio.sleep(_LAST_WORDS)
        code, errors = self._process.get_returncode(), self._errors.decode(errors="replace").splitlines()
        said = [line.strip() for line in errors if line.strip()]
        if self._silent:
            return f"the connection was lost (silent for {self._patience:g} s)"
        if self.greeted:
            return f"the connection was lost{f' ({said[-1]})' if said else ''}"
        if self._held is not None or (code == 255 and not self.plan.is_here):
            return explain(self.plan, code, said)
        if code in (126, 127):
            where = "Install it there by the same path, or set its path with --python or python= in the host file"
            return f"cannot start the interpreter {self.plan.python}. {where}"
        noise = self._noise.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed([*noise, *said]) if line.strip()), "no output")
        return f"the interpreter {self.plan.python} failed to start (exit code {code}): {last}"

    def _write(self, data: bytes) -> None:
        if self._process is None:
            return
        if self._held is not None:
            self._held += data
        elif not (pipe := self._process.get_pipe_transport(0)).is_closing():
            pipe.write(data)

    async def _beat(self) -> None:
        """Send heartbeats, even while the terminal takes no output, and check that the node answers.

        ssh's keep-alive does not work on a shared connection (ControlPath).
        """
        while True:
            await asyncio.sleep(_BEAT)
            self.tell("beat")
            silence = asyncio.get_running_loop().time() - self._heard
            # While it works on an answer, :meth:`ask` has a timeout; while its events wait, nothing is read.
            if silence > self._patience and not self._asks and self._waiting < _MANY:
                self._silent = True
                self._kill()

    # --- what comes ---------------------------------------------------------------------------------------------------

    def process_exited(self) -> None:
        self._ended.set()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self.is_open = False
            self._answers.put_nowait(None)
            if self.greeted:
                self._put(Event(self, "closed", -1, b""))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Sort received data into answers and events."""
        if fd == 2:
            self._errors = (self._errors + data)[-_NOISE:]
            return
        self._buffer += data
        self._heard = asyncio.get_running_loop().time()
        if not self.greeted:
            self._await_greeting()
        if self.greeted:
            self._take_frames()

    def _await_greeting(self) -> None:
        """Drop the data up to the greeting, if it has come; a login shell may print something before it."""
        if self._held is not None and READY in self._buffer:
            self._buffer = self._buffer.partition(READY)[2]
            held, self._held = self._held, None
            self._write(held)
        self._noise, greeting, rest = self._buffer.partition(GREETING)
        self.greeted = self.is_open = bool(greeting)
        self._buffer = rest if greeting else self._buffer[-_NOISE:]

    def _take_frames(self) -> None:
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            kind, rank, length = HEADER.unpack_from(self._buffer, start)
            begin, end = start + HEADER.size, start + HEADER.size + length
            if len(self._buffer) <= end:
                break
            data, start = self._buffer[begin:end], end + 1  # skip the newline
            if kind == b"r":
                self._answers.put_nowait(json.loads(data))
            elif kind != b"b":
                self._put(Event(self, kind.decode(), rank, data))
        self._buffer = self._buffer[start:]

    def _put(self, event: Event) -> None:
        """Queue an event. If many of this node wait, as for the terminal, its data is not read meanwhile."""
        self._events.put_nowait(event)
        self._waiting += 1
        if self._waiting >= _MANY:
            self._process.get_pipe_transport(1).pause_reading()

    def note_taken(self) -> None:
        """One of its events was taken."""
        self._waiting -= 1
        if self._waiting == 0:
            self._heard = asyncio.get_running_loop().time()
            self._process.get_pipe_transport(1).resume_reading()
