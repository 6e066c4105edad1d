"""The connection to one node: a process that talks to it, its answers, and why it ended."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec

from ddp_callbacks.launcher import facts, remote
from ddp_callbacks.launcher.hosts import NodePlan
from ddp_callbacks.launcher.node.link import GREETING, encode
from ddp_callbacks.launcher.node.program import Node
from ddp_callbacks.launcher.node.reports import KINDS, Closed, Report
from ddp_callbacks.launcher.same import how_to_copy

P = ParamSpec("P")
ANSWER_TIMEOUT = 30.0  # seconds
_SETUP_TIMEOUT = 1800.0  # seconds more if --setup runs there, as the processes wait for each other
_BEAT = 0.5  # seconds between two heartbeats
_LEAVES = 2.0  # seconds for the command that reached a node to end after its output
_LOGINS = 8  # simultaneous ssh logins; sshd refuses some if ten are in progress
_PAUSES = (0.5, 1.0)  # minimum seconds before a login is repeated; up to twice as long
# A scheduler signals each process of its job, and without ssh there would be no orderly end elsewhere.
_DEAF = ("/bin/sh", "-c", "trap '' TERM USR1 USR2; exec \"$@\"", "sh")
_LAST_WORDS = 0.1  # seconds to read the last messages of that command
_MANY = 100  # waiting events of a node; beyond that, its writes wait
_TAIL = 1 << 16  # bytes to keep of the error output of ssh or the shell


class NodeProblem(Exception):
    """A node cannot do what was asked, or cannot be reached; the text has the remedy."""


class Refused(NodeProblem):
    """The node has answered that it cannot."""


class Event(NamedTuple):
    node: Connection
    report: Report


@dataclass
class Shared:
    """State that the connections of a job share.

    Attributes:
        patience: Seconds of silence after which a connection counts as lost.
        answer_timeout: Seconds to wait for an answer.
        events: A queue for all reports of the nodes other than heartbeats.
        logins: Limits the simultaneous logins, as sshd refuses more (MaxStartups).
    """

    patience: float
    answer_timeout: float = ANSWER_TIMEOUT
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    logins: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_LOGINS))


class Connection(asyncio.SubprocessProtocol):
    """Talks to one node: calls the methods of its :class:`Node`. One :meth:`ask` at a time.

    Attributes:
        greeted: Whether the node's program has answered.
        is_open: Whether the node's program is still there.
        is_in_place: Whether it has entered the working directory.
        hello: The node's description of itself.
        place: Facts about the node, see :func:`ddp_callbacks.launcher.facts.place`.
        address: The node's own address for the others: likely at first, then the one by which it has reached them.
        held: The address and port at which it listens.
        stdin: The descriptor by which the program of this machine has inherited a standard input that is no terminal.
    """

    def __init__(self, plan: NodePlan, shared: Shared) -> None:
        self.plan = plan
        self.greeted = self.is_open = self.is_in_place = False
        self.hello: dict[str, Any] = {}
        self.place: dict[str, Any] = {}
        self.stdin: int | None = None
        self.address, self.held = "", ("", 0)
        self._shared = shared
        self._asks = self._silent = False
        self._question = 0  # the number of the latest question; an answer to an earlier one came too late
        self._waiting = 0  # events that nobody has taken
        self._process: Any = None  # the transport of the process that talks to the node
        self._beats: asyncio.Task[None] | None = None

    async def _open(self) -> None:
        self._buffer = self._noise = self._errors = b""
        self._answers: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._reached = False  # whether the shell there is ready
        loop = asyncio.get_running_loop()
        words = [*_DEAF, *remote.command_to(self.plan, self._shared.patience)]
        # For the program of this machine; a terminal's input is passed on, and a closed one has no descriptor.
        inherited = [] if not self.plan.is_here or sys.stdin is None or os.isatty(0) else [os.dup(0)]
        self.stdin = next(iter(inherited), None)
        # A separate session: the launcher itself handles Ctrl-C and the end of the terminal.
        self._process, _ = await loop.subprocess_exec(
            lambda: self, *words, start_new_session=True, pass_fds=inherited, env=remote.environ_to(self.plan)
        )
        for descriptor in inherited:
            os.close(descriptor)
        self._heard = loop.time()
        self._write(remote.FIRST_LINE)
        await self._answer()
        self._write(remote.opening(self.plan, self._environ))

    async def ask(
        self, timeout: float | None, call: Callable[Concatenate[Node, P], Any], *values: P.args, **named: P.kwargs
    ) -> dict[str, Any]:
        """Call a method of the node's program; return its answer.

        Wait up to ``timeout`` seconds while the node answers heartbeats. ``None``: wait :attr:`patience` seconds, in
        which the node may be silent.

        Raises:
            NodeProblem: The node could not do it, the connection ended, or no answer came.
        """
        self._question += 1
        self._write(encode(call.__name__, self._question, values, named))
        return await self._answer(timeout)

    async def _answer(self, timeout: float | None = None) -> dict[str, Any]:
        self._asks, seconds = timeout is None, timeout or self.patience
        try:
            answer = await asyncio.wait_for(self._answers.get(), seconds)
        except TimeoutError:
            says = (
                f"no answer within {seconds:g} s. Does {'--setup' if self.plan.setup else 'its login shell'} wait for"
            )
            raise NodeProblem(f"{says} something? Try: {self.plan.shell}true") from None
        finally:
            self._asks = False
        if answer is None:
            raise NodeProblem(await self.explain_end())
        if "problem" in answer:
            raise Refused(answer["problem"])
        return answer

    async def greet(self, environ: dict[str, str] | None = None, grace: float | None = None) -> None:
        """Connect to the node and read its description. If its sshd refuses the login for lack of slots, try again.

        Args:
            environ: Variables for its setup and all later processes there.
            grace: Seconds from a request to stop to force, also once the connection is lost; ``None``: the default.

        Raises:
            NodeProblem: The node cannot be reached.
        """
        self._environ = environ or {}
        if shutil.which(program := remote.command_to(self.plan)[0]) is None:
            raise NodeProblem(
                f"there is no {program} on this machine to reach it by. Install it, or name another: --rsh"
            )
        for pause in (*_PAUSES, None):
            try:
                async with self._shared.logins:
                    await self._open()
                    self.hello = await self.ask(None, Node.hello, self._shared.patience, grace)
                break
            except NodeProblem:
                if pause is None or not self._was_turned_away():
                    raise
                await asyncio.sleep(pause * (1 + random.random()))
        self._beats = asyncio.create_task(self._beat())

    def _was_turned_away(self) -> bool:
        """Whether an sshd, on the node or on the route, had too many logins."""
        is_ssh = not self.plan.is_here and self.plan.rsh is None
        return is_ssh and not self.greeted and any(words in self._errors for words in remote.TURNED_AWAY)

    @property
    def patience(self) -> float:
        """Seconds in which it must answer."""
        return self._shared.answer_timeout + (_SETUP_TIMEOUT if self.plan.setup else 0.0)

    @property
    def ends(self) -> list[str | None]:
        """The addresses of the ends of ssh's connection, there and here; ``None`` without ssh."""
        return [None, None] if self.plan.is_here or self.plan.rsh is not None else list(self.hello["ends"])

    def addresses(self, others: Sequence[Connection]) -> list[str]:
        """Its addresses for the other nodes, likeliest first: of the network that ssh uses, then on the route outside.

        On this machine, that is the address from which the logins on the others came.
        """
        used = [other.ends[1] for other in others] if self.plan.is_here else self.ends[:1]
        interfaces = self.place["interfaces"]  # behind a gateway or a jump host, logins come from another machine
        own = [address for address, _ in Counter(used).most_common() if interfaces.get(address or "", "lo") != "lo"]
        return [*dict.fromkeys(filter(None, (*own, *self.place["addresses"])))]

    # --- requests to the node, which raise NodeProblem if it cannot do them -------------------------------------------

    async def enter(self, script: str | None) -> None:
        """Change to the working directory, set variables for all later processes, check that the script exists."""
        environ = {} if self.plan.setup else self._environ  # a setup had them, and may have changed them
        try:
            await self.ask(None, Node.enter, self.plan.cwd, environ, script)
        except Refused as problem:
            other = "" if self.plan.is_here else f". {how_to_copy(self.plan)}. Or choose another folder with --chdir"
            raise Refused(f"{problem}{other}") from None
        self.is_in_place = True

    async def look(self, which: str, seconds: float, program: tuple[str, str]) -> None:
        """Set :attr:`place`; ``which`` and ``program`` are arguments of :mod:`ddp_callbacks.launcher.facts`."""
        plan, text = self.plan, Path(facts.__file__).read_text()
        words = [plan.python, remote.UTF8, "-P", "-c", text, which, plan.processes, str(plan.cores or 0), *program]
        said = await self.ask(None, Node.output, words, seconds)
        if said["code"]:
            lines = os.fsencode(said["err"]).decode(errors="replace").strip().splitlines()
            errors = [line for line in lines if "Error" in line] or lines or [f"exit code {said['code']}"]
            needs = "It must be 3.11 or newer, and find its own modules: PYTHONHOME and PYTHONPATH may name others"
            raise NodeProblem(f"{plan.python} does not start: {errors[-1]}. {needs}")
        self.place = dict(json.loads(said["out"].strip().rpartition("\n")[2]))  # sitecustomize may print
        self.address = next(iter(self.addresses([])), "127.0.0.1")

    async def listen(self, address: str, port: int) -> None:
        """Hold a port; 0 finds a free one. On the first node it is that of the ranks' store."""
        held = await self.ask(None, Node.listen, address, port)
        self.held = address, int(held["port"])
        self.use(held["address"])

    async def reach(self, others: Sequence[Connection], seconds: float) -> str:
        """Connect to the ports that other nodes hold; return its own address on the way to the first of them."""
        held = [other.held for other in others]
        found = (await self.ask(None, Node.reach, held, seconds))["found"]
        failed = [(other, says) for other, (_, says) in zip(others, found, strict=True) if says]
        if not failed:
            return str(found[0][0])
        (other, says), more = failed[0], [other.plan.name for other, _ in failed[1:]]
        also = f", nor to {', '.join(more)}" if more else ""
        raise NodeProblem(
            f"cannot connect to {other.held[0]} port {other.held[1]}: {says}{also}. Open the firewall of "
            f"{', '.join([other.plan.name, *more])} for it, for example: ufw allow from {self.address}"
        )

    def use(self, address: str) -> None:
        """Let gloo and NCCL use the interface with this address of its own, unless the user chose another."""
        self.address, self.place["interface"] = address, self.place["interfaces"].get(address, "")

    # ------------------------------------------------------------------------------------------------------------------

    def tell(self, call: Callable[Concatenate[Node, P], None], *values: P.args, **named: P.kwargs) -> None:
        """Call a method of the node's program that has no answer."""
        self._write(encode(call.__name__, None, values, named))

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
        # Not by the transport, which may collect the exit code before the event loop can.
        if self._process.get_returncode() is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.get_pid(), signal.SIGKILL)

    async def explain_end(self) -> str:
        """Explain why the connection ended, from the messages of ssh or the shell there."""
        await self._end_process(_LEAVES)  # a command in ssh's place may outlive the program that it has started
        await asyncio.sleep(_LAST_WORDS)
        code, noise = self._process.get_returncode(), b"" if self.greeted else self._noise + self._buffer
        words = b"\n".join((noise, self._errors)).decode(errors="replace").splitlines()
        said = [line.strip() for line in words if line.strip()]
        if self._silent:
            return f"the connection was lost (silent for {self._shared.patience:g} s)"
        if self.greeted:
            return f"the connection was lost{f' ({said[-1]})' if said else ''}"
        if not self._reached:
            return remote.explain(self.plan, code, said)
        last = said[-1] if said else "no output"
        if self.plan.setup:
            remedy = ". Begin with: source CONDA/etc/profile.d/conda.sh" if "conda: command not found" in last else ""
            return f"--setup {self.plan.setup!r} or Python failed (exit code {code}): {last}{remedy}"
        if code in (126, 127):
            where = "Install it there by the same path, or set its path with --python or python= in the host file"
            return f"cannot start the interpreter {self.plan.python}. {where}"
        return f"the interpreter {self.plan.python} failed to start (exit code {code}): {last}"

    def _write(self, data: bytes) -> None:
        if self._process is not None and not (pipe := self._process.get_pipe_transport(0)).is_closing():
            pipe.write(data)

    async def _beat(self) -> None:
        """Send heartbeats, even while the terminal takes no output, and check that the node answers.

        ssh's keep-alive does not work on a shared connection (ControlPath).
        """
        while True:
            await asyncio.sleep(_BEAT)
            self.tell(Node.beat)
            silence = asyncio.get_running_loop().time() - self._heard
            # While the node works on an answer, :meth:`ask` has a timeout; while its events wait, nothing is read.
            if silence > self._shared.patience and not self._asks and self._waiting < _MANY:
                self._silent = True
                self._kill()

    # --- data from the node -------------------------------------------------------------------------------------------

    def process_exited(self) -> None:
        self._ended.set()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self.is_open = False
            self._answers.put_nowait(None)
            if self.greeted:
                self.put(Closed())

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self._errors = (self._errors + data)[-_TAIL:]
            return
        self._heard = asyncio.get_running_loop().time()
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            if self.greeted:
                self._take(*json.loads(os.fsdecode(line)))
            else:
                self._await_greeting(line)

    def _await_greeting(self, line: bytes) -> None:
        """Wait for a line that ends with our greeting: a login shell may print something before it."""
        if line.endswith(remote.READY):
            self._reached = True
            self._answers.put_nowait({})
        elif line.endswith(GREETING):
            self.greeted = self.is_open = True
        else:
            self._noise = line or self._noise

    def _take(self, kind: str, *values: Any) -> None:
        if kind == "answer":
            if values[0] == self._question:
                self._answers.put_nowait(values[1])
        elif kind != "Beat":
            self.put(KINDS[kind](*values))

    def put(self, report: Report) -> None:
        """Queue an event. While many events of this node wait, as for a slow terminal, read nothing from it."""
        self._shared.events.put_nowait(Event(self, report))
        self._waiting += 1
        if self._waiting >= _MANY:
            self._process.get_pipe_transport(1).pause_reading()

    def note_taken(self) -> None:
        """Note that one of its events left the queue; when none is left, read from the node again."""
        self._waiting -= 1
        if self._waiting == 0:
            self._heard = asyncio.get_running_loop().time()
            self._process.get_pipe_transport(1).resume_reading()
