"""Carry out a plan: reach all nodes, check that the job can run there, start it on all, and end it on all."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec

from ddp_callbacks.cluster.environment import HEARTBEAT_TIMEOUT, SECRET, SUCCESSOR
from ddp_callbacks.launcher.connection import ANSWER_TIMEOUT, Connection, Event, NodeProblem, Shared
from ddp_callbacks.launcher.hosts import NodePlan
from ddp_callbacks.launcher.job import Job
from ddp_callbacks.launcher.node.processes import StartRanks
from ddp_callbacks.launcher.node.program import Node
from ddp_callbacks.launcher.node.reports import Request, Says, Stacks
from ddp_callbacks.launcher.plan import starts
from ddp_callbacks.launcher.same import differences
from ddp_callbacks.launcher.streams import next_input, terminal_size
from ddp_callbacks.reporting.stacks import WRITING
from ddp_callbacks.versions import how_to_install_this

P = ParamSpec("P")
_FIRST = 2.0  # seconds by which a node gives up earlier than the launcher would
_REACH_TIMEOUT = 3.5  # seconds for a node to connect to others: time for three attempts of TCP
_LONG = 10.0  # seconds of waiting for nodes until a line says so; again after twice the time
_MANY, _PER_CORE = 256, 8  # processes that a node may have in any case, and for each core
_LOOK = 0.25  # seconds between two checks of the time while nothing comes
_LATER = 2.0  # seconds by which ranks give up a silent machine later than the launcher, which can go on without it
_READY = 30.0  # seconds for killed processes to end
_CUT = 2.0  # seconds from the last force on the nodes until the last connection is cut
_SAME = 3.0  # seconds within which further signals mean the same: a scheduler may send several, and to a script, too
_ANYWAY = "Or start all the same: --unchecked"
_CTRL_Z = "Ctrl-Z stops no job: its nodes would miss ddprun, and end it. It continues; Ctrl-C ends it"
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class CannotStart(Exception):
    """Nothing was started; the text has a line for each problem."""


class Launch:
    """One job on its nodes; use it in an ``async with`` block, which disconnects from all nodes at its end.

    A signal stops the job on every node, and a second one ends it at once. Before the ranks are started, both cancel
    the task that entered the block.

    Args:
        job: The job.
        seconds: Seconds from now to the job's end; it is asked to stop ``job.force`` seconds earlier.
        limit: The name of this end, for messages.
        answer_timeout: Seconds in which a node must answer; some questions have more.

    Attributes:
        has_begun: Whether a rank was started.
        is_forced: Whether a second signal has ended the job at once.
        has_enough: Whether a job that only measures was ended because it has measured.
        stopped_by: The signal or limit that ended the job; empty if neither did.
        signal: The signal to ddprun itself that ended the job; ``None`` if none did.
        restarts: How often the ranks have been restarted.
        one_stream: Whether each rank's standard output and standard error are one stream, whose lines keep their order.
        nodes: The nodes in rank order; after :meth:`connect`, those that were reached.
    """

    def __init__(
        self, job: Job, seconds: float = math.inf, limit: str = "", answer_timeout: float = ANSWER_TIMEOUT
    ) -> None:
        self.job, self.limit = job, limit
        self.has_begun = self.is_forced = self.has_enough = False
        self.stopped_by = ""
        self.signal: int | None = None
        self.restarts = 0
        self.one_stream = False
        self._seconds = seconds
        self._shared = Shared(job.heartbeat_timeout, answer_timeout)
        self.nodes = [Connection(plan, self._shared) for plan in job.nodes]
        self._secret = secrets.token_hex(16)  # secret of the ranks' control channel
        self._where = ("", 0)  # address and port of the ranks' store
        self._news: dict[str, dict[str, Any]] = {}  # all that the ranks were let know
        self._asked_at = 0.0  # when the job was asked to stop, by a signal here or on a node
        self._ending: float | None = None  # the deadline for all to end
        self._preparing: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> Launch:
        self._preparing = asyncio.current_task()
        self._take_signals()
        if self._seconds < math.inf:
            asyncio.get_running_loop().call_later(self._seconds - self.job.force, self.stop, signal.SIGTERM, self.limit)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(node.close(self.job.force + _CUT) for node in self.nodes))

    def _take_signals(self) -> None:
        """Take signals until the end of the event loop.

        Signals that are already ignored stay ignored (nohup). Ctrl-Z has no effect, as a stopped launcher could not
        send heartbeats. SIGQUIT, which Ctrl-\\ sends, asks for the stacks, also in the background of a shell, which
        ignores it.
        """
        loop = asyncio.get_running_loop()
        for number in _STOPS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._take_signal, number)
        loop.add_signal_handler(signal.SIGQUIT, self.take_request)
        loop.add_signal_handler(signal.SIGWINCH, self._resize)
        loop.add_signal_handler(signal.SIGTSTP, self.nodes[0].put, Says(_CTRL_Z))

    def _take_signal(self, number: signal.Signals) -> None:
        if self._ending is None:
            self.signal = number
            self.stop(number, number.name)
        elif number == signal.SIGINT or time.monotonic() - self._asked_at >= _SAME:
            self.is_forced = True
            self.end(at_once=True)

    def _resize(self) -> None:
        if self.has_begun and (size := terminal_size(self.job)):
            self._tell_all(Node.resize, size)

    def take_request(self, hosts: str = "") -> None:
        """Take a request for the stacks, or to add nodes."""
        if self.has_begun:
            self.nodes[0].put(Request(hosts))

    def ask_for_stacks(self) -> None:
        """Ask all ranks for their stacks. An event tells when they have come."""
        self._tell_all(Node.stacks)
        asyncio.get_running_loop().call_later(WRITING, self.nodes[0].put, Stacks())

    def _tell_all(self, call: Callable[Concatenate[Node, P], None], *values: P.args, **named: P.kwargs) -> None:
        for node in self.nodes:
            node.tell(call, *values, **named)

    # --- the start ----------------------------------------------------------------------------------------------------

    async def connect(self, say: Callable[[str], None]) -> None:
        """Reach every node and check that the job can start there.

        Raises:
            CannotStart: The job cannot start on a node; nothing was started anywhere.
        """
        waiting = asyncio.create_task(self._say_what_takes_long(say))
        try:
            problems = await self._find_problems(self.nodes)
        finally:
            waiting.cancel()
        reached = [node for node in self.nodes if node not in problems]
        if problems and (len(reached) < self.job.min_nodes or self.nodes[0] in problems):
            raise CannotStart(_lines(problems))
        for node, problem in problems.items():
            say(f"continuing without {node.plan.name}: {problem}.")
            await node.close(0)
        self.nodes = reached
        refuse_machines_named_twice(reached)
        self._refuse_ranks_that_are_not_there(sum(node.place["processes"] for node in reached))

    def _refuse_ranks_that_are_not_there(self, count: int) -> None:
        missing = sorted(rank for rank in self.job.show_ranks or () if rank >= count)
        if missing and not self.job.keep_going:  # nodes that join bring more
            which = "rank 0 alone" if count == 1 else f"ranks 0-{count - 1}"
            raise CannotStart(f"--show-ranks {missing[0]}: this job has {which}.")

    async def _say_what_takes_long(self, say: Callable[[str], None]) -> None:
        for number in itertools.count():
            await asyncio.sleep(_LONG * 2**number)
            late = [node.plan.name for node in self.nodes if not node.place]
            what = f"--setup {self.job.setup!r}" if self.job.setup else "an answer"
            if late:
                say(f"waiting for {what} on {', '.join(late)}; Ctrl-C ends the wait")

    async def add(self, plans: Sequence[NodePlan]) -> list[Connection]:
        """Reach more nodes while the job runs, and check that new processes can take part there.

        :meth:`start_more` then starts these; or close the connections.

        Raises:
            CannotStart: They cannot on one of the nodes; nothing was started.
        """
        nodes = [Connection(plan, self._shared) for plan in plans]
        try:
            first, *others = [node for node in self.nodes if node.is_open]
            if problems := await self._find_problems(nodes, first):
                raise CannotStart(_lines(problems))
            refuse_machines_named_twice([first, *others, *nodes])
            if first.place["interface"] == "lo":
                here = f"the processes of this job meet at an address that only {first.plan.name} has"
                raise CannotStart(f"{here}. Start it with --master-addr, an address that the other nodes can reach.")
            await self.meet([first, *others, *nodes], port=0)
        except BaseException:
            await close(nodes)
            raise
        return nodes

    async def _find_problems(
        self, nodes: list[Connection], like: Connection | None = None
    ) -> dict[Connection, NodeProblem]:
        """Check these nodes, also that they have the same program as the first of them, or as ``like``."""
        problems = await ask_all(self._check, nodes)
        known = {node.plan: node for node in [like, *nodes] if node is not None and node not in problems}
        if len(known) > 1 and not self.job.unchecked:
            for plan, _, says in differences({plan: node.place for plan, node in known.items()}):
                problems.setdefault(known[plan], NodeProblem(f"{says}. {_ANYWAY}"))
        return problems

    async def reach(self, node: Connection, facts: str) -> None:
        """Log in to a node, enter its folder, and get its facts, ``all`` or those for a ``start``."""
        patience = f"{self.job.heartbeat_timeout + _LATER:g}"
        given = {SECRET: self._secret, HEARTBEAT_TIMEOUT: patience}
        await node.greet(given | self.job.forwarded | self.job.environ, self.job.grace)
        await node.enter(self.job.script)
        is_alone = len(self.job.nodes) == 1 and not self.job.keep_going and facts != "all"
        program = ("", "") if is_alone else self.job.program
        await node.look(facts, node.patience - _FIRST, program)

    async def _check(self, node: Connection) -> None:
        await self.reach(node, "start")
        if node.place["package"] is None:
            command = how_to_install_this(f"{node.plan.shell}{node.plan.python}")
            raise NodeProblem(f"ddp_callbacks is not installed there for Python 3.11 or newer. Run: {command}")
        refuse_number_of_processes(node)
        refuse_interface(self.job, node)

    async def meet(self, nodes: list[Connection], port: int | None = None) -> None:
        """Let the first of these nodes listen where the others can reach it, and each node reach each other one.

        Args:
            nodes: The nodes.
            port: Its port; 0 finds a free one, and ``None`` is that of ``--master-port``.

        Raises:
            CannotStart: The first node has no address for others, cannot listen, or a node cannot reach another one.
        """
        if problems := await self.try_to_meet(nodes, port):
            raise CannotStart(_lines(problems))

    async def try_to_meet(self, nodes: list[Connection], port: int | None = None) -> dict[Connection, NodeProblem]:
        """Do what :meth:`meet` does, but return the problems by node."""
        first, *others = nodes
        addresses = first.addresses(others) if others else ["127.0.0.1"]
        found: list[dict[Connection, NodeProblem]] = []
        for address in [self.job.master_addr] if self.job.master_addr and first is self.nodes[0] else addresses:
            found.append(await self._meet_at(address, self.job.master_port if port is None else port, nodes))
            if not found[-1]:
                self._where, found = first.held, found[-1:]
                break
        problems = found[0] if found else {first: NodeProblem("it has no address for others")}  # of the likeliest one
        if others and first not in problems and not self.job.unchecked:
            problems = await _connect_pairs(nodes) | problems
        return problems

    async def _meet_at(self, address: str, port: int, nodes: list[Connection]) -> dict[Connection, NodeProblem]:
        """Let the first of these nodes listen at ``address``, and the others reach it; return the problems by node."""
        first, *others = nodes

        async def reach(node: Connection) -> None:
            node.use(await node.reach([first], _REACH_TIMEOUT))

        try:
            await first.listen(address, port)
        except NodeProblem as problem:
            return {first: NodeProblem(f"{problem}. Choose another with --master-port or --master-addr")}
        problems = await ask_all(reach, others)
        other = "Or choose another address with --master-addr"
        return {node: NodeProblem(f"{problem}. {other}") for node, problem in problems.items()}

    def start(self, nodes: list[Connection]) -> None:
        """Start the ranks on these nodes, after :meth:`meet`. Returns at once; the nodes report the start."""
        self._preparing, self._news = None, {}
        for node, how in zip(nodes, self._starts(nodes), strict=True):
            node.tell(Node.start, how)

    def start_more(self, nodes: list[Connection]) -> None:
        """Start new processes that join the others, on nodes from :meth:`add`. Returns at once."""
        self.nodes += nodes
        for node, how in list(zip(self.nodes, self._starts(self.nodes), strict=True))[-len(nodes) :]:
            node.tell(Node.news, self._news)
            node.tell(Node.start, how._replace(environ=how.environ | {SUCCESSOR: "1"}))

    def _starts(self, nodes: list[Connection]) -> Iterator[StartRanks]:
        shown = None if self.job.show_ranks is None else sorted(self.job.show_ranks)
        known = [(node.plan, node.place) for node in nodes]
        for node, how in zip(nodes, starts(self.job, known, self._where, self.restarts), strict=True):
            size = terminal_size(self.job)
            yield how._replace(stdin=node.stdin, size=size, shown=shown, one_stream=self.one_stream)

    async def halt(self, nodes: list[Connection]) -> dict[Connection, NodeProblem]:
        """End the ranks of these nodes, so that others can be started there; return the problems by node."""
        seconds = self.job.shutdown_timeout
        return await ask_all(lambda node: node.ask(seconds + _READY, Node.halt, seconds), nodes)

    # --- while it runs ------------------------------------------------------------------------------------------------

    def tell_ranks(self, **news: dict[str, Any]) -> None:
        """Let all ranks know something, see :data:`ddp_callbacks.cluster.environment.NEWS`."""
        for kind, values in news.items():
            self._news[kind] = self._news.get(kind, {}) | values
        self._tell_all(Node.news, news)

    async def pass_on_input(self, note_line: Callable[[], None]) -> None:
        """Send what is typed at a terminal to rank 0, so that ``input()`` and a breakpoint work there.

        Calls ``note_line`` when a line is typed.

        Any other input may hold the next lines of a shell's loop around ``ddprun``, so nothing is read ahead: rank 0
        inherits it on this machine, and finds it empty on another.
        """
        data = b"-"
        while data:
            data = b"" if self.job.show_ranks == frozenset() else await next_input()  # nobody sees what a rank asks
            if data.endswith(b"\n"):
                note_line()
            self.nodes[0].tell(Node.input, os.fsdecode(data))

    async def next_event(self) -> Event | None:
        """Return the next event; ``None`` if none comes within a quarter of a second."""
        try:
            event = await asyncio.wait_for(self._shared.events.get(), _LOOK)
        except TimeoutError:
            return None
        event.node.note_taken()
        return event

    @property
    def is_ending(self) -> bool:
        """Whether the job was ended or asked to stop."""
        return self._ending is not None

    @property
    def is_overdue(self) -> bool:
        """Whether the time for an orderly end has passed."""
        return self._ending is not None and time.monotonic() >= self._ending

    def ask(self) -> None:
        """Ask the ranks of all nodes to stop; they may be started again afterwards."""
        self._tell_all(Node.ask, signal.SIGTERM)

    def stop(self, number: int, reason: str = "") -> None:
        """Ask the ranks of all nodes to stop, and end the job when the time for that is over.

        Args:
            number: The signal that a process of the job got. The ranks get SIGUSR1, too, and SIGINT if they handle no
                SIGTERM; else they get SIGTERM.
            reason: The signal or limit that stops the job; empty if it ends by itself.
        """
        if self._ending is not None:
            return
        self.stopped_by, self._asked_at = reason, time.monotonic()
        self._ending = self._asked_at + self.job.force + self.job.shutdown_timeout + _CUT
        if self._preparing is not None:
            self._preparing.cancel()
        else:
            self._tell_all(Node.stop, number if number in (signal.SIGUSR1, signal.SIGINT) else signal.SIGTERM)
            if reason and self.job.grace is not None:
                self.nodes[0].put(Says(f"{reason}: asking all processes to stop within {self.job.grace:g} s"))

    def end(self, at_once: bool = False) -> None:
        """End the job on every node. After a request to stop, the ranks that still run keep the rest of their time."""
        seconds = 0.0 if at_once else self.job.shutdown_timeout
        end = time.monotonic() + seconds + _CUT
        self._ending = end if self._ending is None else min(self._ending, end)
        self._tell_all(Node.end, seconds)


async def close(nodes: list[Connection]) -> None:
    """Disconnect from nodes on which nothing was started."""
    await asyncio.gather(*(node.close(0) for node in nodes))


def _lines(problems: Mapping[Connection, NodeProblem]) -> str:
    return "\n".join(f"{node.plan.name}: {problem}." for node, problem in problems.items())


async def _connect_pairs(nodes: list[Connection]) -> dict[Connection, NodeProblem]:
    """Let each node connect to each other one, as its ranks will; return the problems by node."""
    first, *others = nodes
    problems = await ask_all(lambda node: node.listen(node.address, 0), others)
    held = [first, *(node for node in others if node not in problems)]
    others_of = {node: [other for other in held if other is not node] for node in nodes}
    problems |= await ask_all(lambda node: node.reach(others_of[node], _REACH_TIMEOUT), nodes)
    for node in others:
        node.tell(Node.release)
    return {node: NodeProblem(f"{problem}. {_ANYWAY}") for node, problem in problems.items()}


def refuse_number_of_processes(node: Connection) -> None:
    """Raise NodeProblem if a node cannot have as many processes as the job has there."""
    count, cores = node.place["processes"], node.place["cores"]
    if not count:
        raise NodeProblem(f"torch finds no device for --nproc-per-node {node.plan.processes} there")
    if count > (most := max(_MANY, cores * _PER_CORE)):
        raise NodeProblem(f"{count} processes are too many for its {cores} cores: more than {most}")


def refuse_interface(job: Job, node: Connection) -> None:
    """Raise NodeProblem if a node lacks the interface that the user wants for gloo, or reaches no other node on it."""
    wanted = (job.forwarded | job.environ).get("GLOO_SOCKET_IFNAME", "")
    there = {*node.place["interfaces"].values()} - ({"lo"} if len(job.nodes) > 1 else set())
    if wanted and not there & {*wanted.split(",")}:
        remedy = f"Unset it, or name one that it has: {', '.join(sorted(there))}"
        raise NodeProblem(f"GLOO_SOCKET_IFNAME={wanted} does not lead to the others there. {remedy}")


def refuse_machines_named_twice(nodes: list[Connection]) -> None:
    """Raise CannotStart if two of these nodes are the same machine."""
    first: dict[str, Connection] = {}
    for node in nodes:
        other = first.setdefault(str(node.hello["machine"]), node)
        names = other.plan.name, node.plan.name
        if other is not node and names[0] == names[1]:  # named for a running job
            raise CannotStart(f"{names[0]} takes part already. Its killed processes are replaced without a join.")
        if other is not node:
            raise CannotStart(f"{names[0]} and {names[1]} are the same machine. Name it once, with all its slots.")


async def ask_all(
    ask: Callable[[Connection], Awaitable[Any]], nodes: list[Connection]
) -> dict[Connection, NodeProblem]:
    """Ask all nodes at the same time; return the problems by node."""
    found = await asyncio.gather(*map(ask, nodes), return_exceptions=True)
    for problem in found:
        if isinstance(problem, BaseException) and not isinstance(problem, NodeProblem):
            raise problem
    return {node: problem for node, problem in zip(nodes, found, strict=True) if isinstance(problem, NodeProblem)}
