"""Carry out a plan: reach all nodes, check that the job can run there, start it on all, and end it on all."""

from __future__ import annotations

import math
import queue
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ddp_callbacks.environment import HEARTBEAT_TIMEOUT, SECRET
from ddp_callbacks.launcher.connection import Connection, Event, NodeProblem, addresses_of, connections
from ddp_callbacks.launcher.node.ending import GRACE
from ddp_callbacks.launcher.plan import Job
from ddp_callbacks.launcher.ranks import ask_for_facts, find_interface, start_ranks
from ddp_callbacks.launcher.remote import as_hex
from ddp_callbacks.launcher.stacks import WRITING
from ddp_callbacks.versions import how_to_install_this

_PLACE_TIMEOUT = 25.0  # seconds for a node's facts, on a slow disk
_REACH_TIMEOUT = 5.0  # seconds for a node to connect to the first one
_LOOK = 0.25  # seconds between two checks of the time while nothing comes
_LATER = 2.0  # seconds after which the ranks give up a machine, too: the launcher comes first, as it can go on without
_CUT = 2.0  # seconds from the last force on the nodes until the last connection is cut
SAME = 3.0  # seconds within which further signals mean the same: a scheduler may send several, and to a script, too
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ASKS = {signal.SIGUSR1: signal.SIGUSR1}  # what the ranks get for a signal of ddprun; SIGTERM for all others


class CannotStart(Exception):
    """Nothing was started; one line for each node with a problem."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Interrupted(Exception):
    """A signal, or the end of its time, came before the job had started."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"stopped by {reason}")
        self.code = 128 + number


@dataclass(frozen=True)
class Limits:
    """How long a job runs, and how long it takes to stop.

    Attributes:
        grace: Seconds from a request to stop to force; ``None`` for the default.
        seconds: Seconds from now to the end; the job is asked to stop ``force`` seconds earlier.
        reason: What this end is.
    """

    grace: float | None = None
    seconds: float = math.inf
    reason: str = ""

    @property
    def force(self) -> float:
        """Seconds from a request to stop to force."""
        return GRACE if self.grace is None else self.grace


_NO_LIMITS = Limits()


class Launch:
    """One job on its nodes; use it in a ``with`` block, which disconnects from all nodes at its end.

    Attributes:
        has_begun: Whether a rank was started.
        is_forced: Whether a second signal has ended it at once.
        stopped_by: The signal or limit that ended the job; empty if it was neither.
        signal: The signal of ddprun itself that did.
        restarts: How often its ranks have been started again, for whatever reason.
        stacks_at: When the stacks that SIGQUIT has asked for have come; infinite if it has not.
    """

    def __init__(self, job: Job, limits: Limits = _NO_LIMITS) -> None:
        self.job = job
        self.limits = limits
        self.has_begun = self.is_forced = False
        self.stopped_by = ""
        self.signal: int | None = None
        self.restarts = 0
        self.stacks_at = math.inf
        self._stop_at = time.monotonic() + limits.seconds - limits.force
        self._events: queue.Queue[Event] = queue.Queue(maxsize=1000)
        self._nodes: list[Connection] = []
        self._secret = secrets.token_hex(16)  # of the ranks' control channel
        self._where = ("", 0)  # address and port of the ranks' store
        self._asked_at = 0.0  # when the job was asked to stop, by a signal here or on a node
        self._ending: float | None = None  # the deadline for all to end

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        self._each(lambda node: node.close(self.limits.force + _CUT))

    def connect(self, say: Callable[[str], None]) -> None:
        """Reach every node and check that the job can start there.

        Raises:
            CannotStart: It cannot start on a node; nothing was started anywhere.
        """
        self._nodes = connections(self.job.nodes, self._events, self.job.heartbeat_timeout)
        problems = self._ask_all(self._check)
        reached = [node for node in self._nodes if node not in problems]
        if problems and (len(reached) < self.job.min_nodes or self._nodes[0] in problems):
            raise CannotStart([f"{node.plan.name}: {problem}." for node, problem in problems.items()])
        for node, problem in problems.items():
            say(f"continuing without {node.plan.name}: {problem}.")
            node.close(0)
        self._nodes = reached
        self._refuse_machines_named_twice()

    def meet(self) -> None:
        """Make the first node listen where the others can reach it.

        Raises:
            CannotStart: There is no address, or a node cannot reach it.
        """
        first, *others = self._nodes
        try:
            given = self.job.address
            addresses = [given] if given else addresses_of(first, others) if others else ["127.0.0.1"]
        except NodeProblem as problem:
            raise CannotStart([f"{first.plan.name}: {problem}."]) from None
        problems: list[CannotStart] = []
        for address in addresses:
            try:
                self._where = address, self._listen(first, others, address)
                return
            except CannotStart as problem:
                problems.append(problem)
        raise problems[0]

    def _listen(self, first: Connection, others: list[Connection], address: str) -> int:
        """Listen at ``address``; return the port once all others have reached it."""
        try:
            port = int(first.ask("listen", address=address, port=self.job.port)["port"])
        except NodeProblem as problem:
            remedy = "Choose another with --master-port or --master-addr"
            raise CannotStart([f"{first.plan.name}: {problem}. {remedy}."]) from None
        problems = self._ask_all(lambda node: node.reach([(address, port)], _REACH_TIMEOUT), others)
        if problems:
            remedy = f"Open the firewall of {first.plan.name} for it, or choose another address with --master-addr"
            raise CannotStart([f"{node.plan.name}: {problem}. {remedy}." for node, problem in problems.items()])
        self._ask_all(lambda node: find_interface(node, address))
        return port

    def start(self) -> None:
        """Start the ranks on the nodes that are left. Returns at once; the nodes report it.

        Raises:
            Interrupted: A signal came, or the time of the job is over.
        """
        if time.monotonic() >= self._stop_at:
            self.stopped_by = self.limits.reason
            raise Interrupted(signal.SIGTERM, self.stopped_by)
        if self.signal is not None:
            raise Interrupted(self.signal, self.stopped_by)
        start_ranks(self.job, self._nodes, self._where, self.restarts)

    def feed(self, data: bytes) -> None:
        """Send data to rank 0's standard input; none at its end."""
        self._nodes[0].tell("input", data=data.hex())

    def halt(self, nodes: list[Connection]) -> None:
        """End the ranks of these nodes, so that others can be started. Each node reports when it is ready."""
        for node in nodes:
            node.tell("halt", port=self.job.port, seconds=self.job.kill_after)

    def start_again(self, nodes: list[Connection], port: int) -> None:
        """Start the ranks on nodes that are ready, the first of which listens on ``port``."""
        self.restarts += 1
        self._where = self._where[0], port
        start_ranks(self.job, nodes, self._where, self.restarts)

    @property
    def is_ending(self) -> bool:
        """Whether the job has been ended."""
        return self._ending is not None

    @property
    def is_overdue(self) -> bool:
        """Whether the time for an orderly end has passed."""
        return self._ending is not None and time.monotonic() >= self._ending

    def next_event(self) -> Event | None:
        """The next event; ``None`` if none comes within a moment."""
        if time.monotonic() >= self._stop_at and not self.is_ending:
            self.stop(signal.SIGTERM, self.limits.reason)
        try:
            return self._events.get(timeout=_LOOK)
        except queue.Empty:
            return None

    @property
    def nodes(self) -> list[Connection]:
        """The nodes that were reached, in rank order."""
        return list(self._nodes)

    def ask(self, number: int) -> None:
        """Pass a request to stop on to the ranks of all nodes; they may be started again afterwards."""
        for node in self._nodes:
            node.tell("ask", number=number)

    def stop(self, number: int, reason: str = "") -> None:
        """Ask the ranks of all nodes to stop, and end the job when the time for that is over.

        Args:
            number: The signal that was sent to some process of the job; the ranks get SIGUSR1, or else SIGTERM.
            reason: Who has stopped it; empty if the job ends by itself.
        """
        if self._ending is None:
            self.stopped_by, self._asked_at = reason, time.monotonic()
            self._ending = self._asked_at + self.limits.force + self.job.kill_after + _CUT
            for node in self._nodes:
                node.stop(_ASKS.get(signal.Signals(number), signal.SIGTERM))

    def end(self, at_once: bool = False) -> None:
        """End the job on every node. After a request to stop, the ranks that still run keep the rest of their time."""
        seconds = 0.0 if at_once else self.job.kill_after
        end = time.monotonic() + seconds + _CUT
        self._ending = end if self._ending is None else min(self._ending, end)
        for node in self._nodes:
            node.end(seconds)

    @contextmanager
    def ends_with_signals(self) -> Iterator[None]:
        """Let a signal stop the job on every node; a second one ends it at once. Ctrl-Z has no effect.

        Signals that are already ignored stay ignored (nohup). A stopped launcher could not send heartbeats. SIGQUIT,
        which Ctrl-\\ sends, asks for the stacks of all ranks, also in the background of a shell, which ignores it.
        """

        def end(number: int, _: object) -> None:
            if self._ending is None:
                self.signal = number
                self.stop(number, signal.Signals(number).name)
            elif number == signal.SIGINT or time.monotonic() - self._asked_at >= SAME:
                self.is_forced = True
                self.end(at_once=True)

        handlers: dict[int, Any] = dict.fromkeys(_STOPS, end)
        handlers[signal.SIGTSTP] = signal.SIG_IGN
        handlers[signal.SIGQUIT] = lambda *_: self._ask_for_stacks()
        previous = {number: signal.getsignal(number) for number in handlers}
        for number in handlers:
            if previous[number] is not signal.SIG_IGN or number == signal.SIGQUIT:
                signal.signal(number, handlers[number])
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _ask_for_stacks(self) -> None:
        if self.has_begun:
            self.stacks_at = time.monotonic() + WRITING
            for node in self._nodes:
                node.tell("stacks")

    def _each(self, do: Callable[[Connection], Any]) -> None:
        if self._nodes:
            with ThreadPoolExecutor(len(self._nodes)) as pool:
                list(pool.map(do, self._nodes))

    def _ask_all(
        self, ask: Callable[[Connection], Any], nodes: list[Connection] | None = None
    ) -> dict[Connection, NodeProblem]:
        """Ask all nodes; return the problems."""
        nodes = self._nodes if nodes is None else nodes

        def attempt(node: Connection) -> NodeProblem | None:
            try:
                ask(node)
            except NodeProblem as problem:
                return problem
            return None

        if not nodes:
            return {}
        with ThreadPoolExecutor(len(nodes)) as pool:
            problems = dict(zip(nodes, pool.map(attempt, nodes), strict=True))
        if self.signal is not None:
            raise Interrupted(self.signal, self.stopped_by)
        return {node: problem for node, problem in problems.items() if problem is not None}

    def _refuse_machines_named_twice(self) -> None:
        first: dict[str, Connection] = {}
        for node in self._nodes:
            other = first.setdefault(str(node.hello["machine"]), node)
            if other is not node:
                once = "Name it once, with all its slots"
                raise CannotStart([f"{other.plan.name} and {node.plan.name} are the same machine. {once}."])

    def _check(self, node: Connection) -> None:
        patience = f"{self.job.heartbeat_timeout + _LATER:g}"
        variables = {SECRET: self._secret, HEARTBEAT_TIMEOUT: patience, **self.job.forwarded, **self.job.environ}
        node.greet(self.limits.grace)
        environ = {as_hex(name): as_hex(value) for name, value in variables.items()}
        node.ask("enter", cwd=as_hex(node.plan.cwd), environ=environ)
        if self.job.script is not None:
            node.ask("find", path=as_hex(self.job.script))
        node.place = ask_for_facts(node, node.plan.processes, _PLACE_TIMEOUT)
        if node.place["package"] is None:
            command = how_to_install_this(f"{node.plan.shell}{node.plan.python}")
            raise NodeProblem(f"ddp_callbacks is not installed there for Python 3.11 or newer. Run: {command}")
        if not node.place["processes"]:
            raise NodeProblem(f"torch finds no device for --nproc-per-node {node.plan.processes} there")
