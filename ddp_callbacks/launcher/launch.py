"""Carry out a plan: reach all nodes, check that the job can run there, start it on all, and end it on all."""

from __future__ import annotations

import math
import queue
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ddp_callbacks.launcher.connection import Connection, Event, NodeProblem, addresses_of, connections
from ddp_callbacks.launcher.node import GRACE
from ddp_callbacks.launcher.plan import Plan
from ddp_callbacks.launcher.remote import as_hex
from ddp_callbacks.versions import how_to_install_this

AGENT = ("-P", "-m", "ddp_callbacks.launcher.agent")  # the command for the node's interpreter
_IS_INSTALLED = "import importlib.util, sys; sys.exit(importlib.util.find_spec('ddp_callbacks') is None)"
_LOOK_TIMEOUT = 20.0  # seconds for this check on a slow disk
_REACH_TIMEOUT = 5.0  # seconds for a node to connect to the first one
_LOOK = 0.25  # seconds between two checks of the time while nothing comes
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
    """A signal came before the job had started on all nodes."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
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

    Args:
        plan: What runs where.
        heartbeat_timeout: Seconds of silence after which a node, or the launcher, counts as lost.
        limits: How long the job runs, and how long it takes to stop.
    """

    def __init__(self, plan: Plan, heartbeat_timeout: float, limits: Limits = _NO_LIMITS) -> None:
        self.plan = plan
        self._patience = heartbeat_timeout
        self.limits = limits
        self._stop_at = time.monotonic() + limits.seconds - limits.force
        self._events: queue.Queue[Event] = queue.Queue(maxsize=1000)
        self._nodes: list[Connection] = []
        self._round = 0  # how often the workers of all nodes have been restarted
        self._signal: int | None = None
        self.is_forced = False  # a second signal has ended it at once
        self._stopped_by = ""
        self.has_begun = False  # whether a rank was started
        self._signalled = 0.0  # when it came
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
        self._nodes = connections(self.plan.nodes, self._events, self._patience)
        problems = self._ask_all(self._check)
        reached = [node for node in self._nodes if node not in problems]
        if problems and (len(reached) < self.plan.min_nodes or self._nodes[0] in problems):
            raise CannotStart([f"{node.plan.name}: {problem}." for node, problem in problems.items()])
        for node, problem in problems.items():
            say(f"continuing without {node.plan.name}: {problem}.")
            node.close(0)
        self._nodes = reached
        self._refuse_machines_named_twice()

    def meet(self) -> tuple[str | None, int]:
        """Make the first node listen where the others can reach it; return the address and port.

        Raises:
            CannotStart: There is no address, or a node cannot reach it.
        """
        if self.plan.rendezvous is None:
            return None, 0
        first, *others = self._nodes
        try:
            given = self.plan.address
            addresses = [given] if given else addresses_of(first, others) if others else ["127.0.0.1"]
        except NodeProblem as problem:
            raise CannotStart([f"{first.plan.name}: {problem}."]) from None
        problems: list[CannotStart] = []
        for address in addresses:
            try:
                return address, self._listen(first, others, address)
            except CannotStart as problem:
                problems.append(problem)
        raise problems[0]

    def _listen(self, first: Connection, others: list[Connection], address: str) -> int:
        """Listen at ``address``; return the port once all others have reached it."""
        try:
            port = int(first.ask("listen", address=address, port=self.plan.port)["port"])
        except NodeProblem as problem:
            remedy = "Choose another with --master-port or --master-addr"
            raise CannotStart([f"{first.plan.name}: {problem}. {remedy}."]) from None
        problems = self._ask_all(lambda node: node.reach([(address, port)], _REACH_TIMEOUT), others)
        if problems:
            remedy = f"Open the firewall of {first.plan.name} for it, or choose another address with --master-addr"
            raise CannotStart([f"{node.plan.name}: {problem}. {remedy}." for node, problem in problems.items()])
        return port

    def start(self, address: str | None, port: int) -> None:
        """Start the agents.

        Raises:
            CannotStart: An agent could not be started; those already started are ended.
        """
        problems = self._ask_all(lambda node: self._start_agent(node, address, port))
        if problems:
            raise CannotStart([f"{node.plan.name}: {problem}." for node, problem in problems.items()])

    def start_again(self, after: int | None, nodes: list[Connection]) -> None:
        """Restart the workers on these nodes, unless that has already happened since round ``after``."""
        if after is None or after == self._round:
            self._round += 1
            for node in nodes:
                node.tell("round", number=self._round, members=[member.plan.rank for member in nodes])

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
            self._stopped_by = self.limits.reason
            self.stop(signal.SIGTERM)
        try:
            return self._events.get(timeout=_LOOK)
        except queue.Empty:
            return None

    @property
    def nodes(self) -> list[Connection]:
        """The nodes that were reached, in rank order."""
        return list(self._nodes)

    @property
    def signal(self) -> int | None:
        """The signal of ddprun itself that ended the job."""
        return self._signal

    @property
    def stopped_by(self) -> str:
        """The signal or limit that ended the job; empty if it was neither."""
        return signal.Signals(self._signal).name if self._signal is not None else self._stopped_by

    def ask(self, number: int) -> None:
        """Pass a request to stop on to the ranks of all nodes; they may be started again afterwards."""
        for node in self._nodes:
            node.tell("ask", number=number)

    def stop(self, number: int) -> None:
        """Ask the ranks of all nodes to stop, and end the job when the time for that is over."""
        if self._ending is None:
            self._ending = time.monotonic() + self.limits.force + _CUT
            for node in self._nodes:
                node.stop(number)

    def end(self, at_once: bool = False) -> None:
        """End the job on every node."""
        if self._ending is None or at_once:
            self._ending = time.monotonic() + GRACE + _CUT
            for node in self._nodes:
                node.end(at_once)

    @contextmanager
    def ends_with_signals(self) -> Iterator[None]:
        """Let a signal stop the job on every node; a second one ends it at once. Ctrl-Z has no effect.

        Signals that are already ignored stay ignored (nohup). A stopped launcher could not send heartbeats.
        """

        def end(number: int, _: object) -> None:
            if self._signal is None:
                self._signal, self._signalled = number, time.monotonic()
                self.stop(_ASKS.get(signal.Signals(number), signal.SIGTERM))
            elif number == signal.SIGINT or time.monotonic() - self._signalled >= SAME:
                self._signal, self.is_forced = number, True
                self.end(at_once=True)

        handlers: dict[int, Any] = dict.fromkeys(_STOPS, end)
        handlers[signal.SIGTSTP] = signal.SIG_IGN
        previous = {number: signal.getsignal(number) for number in handlers}
        for number in handlers:
            if previous[number] is not signal.SIG_IGN:
                signal.signal(number, handlers[number])
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

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
        if self._signal is not None:
            raise Interrupted(self._signal)
        return {node: problem for node, problem in problems.items() if problem is not None}

    def _refuse_machines_named_twice(self) -> None:
        first: dict[str, Connection] = {}
        for node in self._nodes:
            other = first.setdefault(str(node.hello["machine"]), node)
            if other is not node:
                once = "Name it once, with all its slots"
                raise CannotStart([f"{other.plan.name} and {node.plan.name} are the same machine. {once}."])

    def _check(self, node: Connection) -> None:
        node.greet()
        node.ask("enter", cwd=as_hex(node.plan.cwd))
        if self.plan.script is not None:
            node.ask("find", path=as_hex(self.plan.script))
        argv = [as_hex(word) for word in (node.plan.python, "-P", "-c", _IS_INSTALLED)]
        if node.ask("output", argv=argv, seconds=_LOOK_TIMEOUT)["code"]:
            command = how_to_install_this(f"{node.plan.shell}{node.plan.python}")
            raise NodeProblem(f"ddp_callbacks is not installed there for Python 3.11 or newer. Run: {command}")

    def _numbers(self, node: Connection) -> dict[str, Any]:
        """Number and ranks of the nodes that were reached; with one node, the user's flags (ddprun by hand on each)."""
        if len(self.plan.nodes) == 1:
            return {}
        return {"nnodes": f"{self.plan.min_nodes}:{len(self._nodes)}", "node_rank": self._nodes.index(node)}

    def _start_agent(self, node: Connection, address: str | None, port: int) -> None:
        plan = node.plan
        job = {
            "torchrun": {**self.plan.torchrun, "nproc_per_node": plan.processes, **self._numbers(node)},
            "command": [as_hex(word) for word in self.plan.command],
            "rendezvous": self.plan.rendezvous,
            "node_rank": plan.rank,
            "grace": self.limits.grace,
            "members": [member.plan.rank for member in self._nodes],
            "address": address,
            "port": port,
        }
        argv = [plan.python, *AGENT]
        variables = {**self.plan.forwarded, **self.plan.environ}
        environ = {as_hex(name): as_hex(value) for name, value in variables.items()}
        node.ask("run", argv=[as_hex(word) for word in argv], environ=environ, job=job)
