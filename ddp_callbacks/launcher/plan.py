"""What runs where: worked out before anything is contacted."""

from __future__ import annotations

import re
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ddp_callbacks.launcher.hosts import Host
from ddp_callbacks.network import is_loopback, own_addresses

_LOOKUP = 5.0  # seconds for resolving the names of all nodes


@dataclass(frozen=True)
class NodePlan:
    """One node.

    Attributes:
        name: Its name in the output.
        host: Its name for ssh; ``None`` for this machine, which needs no ssh.
        rank: Its node rank.
        processes: As in ``--nproc-per-node``; empty if the node decides.
        python: The interpreter.
        cwd: The working directory.
        rsh: The command that reaches it instead of ssh.
        instead: The same, for the case that ssh cannot reach it.
        cores: How many the job has there; ``None`` for all that the node lets it use.
        setup: A command of bash that goes before all that is started there.
    """

    name: str
    host: str | None
    rank: int
    processes: str
    python: str
    cwd: str
    rsh: tuple[str, ...] | None = None
    instead: tuple[str, ...] | None = None
    cores: int | None = None
    setup: str = ""

    def words(self, *words: str) -> list[str]:
        """A command, after what sets up the node; a login shell knows ``module``."""
        return ["bash", "-lc", f'{self.setup} && exec "$@"', "bash", *words] if self.setup else list(words)

    @property
    def shell(self) -> str:
        """The prefix of a command to type for this node; empty for this machine."""
        if self.host is None:
            return ""
        return f"ssh {self.host} " if self.rsh is None else f"{shlex.join(self.rsh)} "


@dataclass(frozen=True)
class Job:
    """All that a command line says of a job.

    Attributes:
        nodes: In rank order.
        command: The script, or ``-m`` and the module, and its arguments.
        min_nodes: How many of them are enough; the job is elastic if that is less than all.
        max_restarts: How often the job may start again after a failure.
        address, port: Where the first node listens; ``None`` and 0 if still to be found.
        script: The file that must exist on each node; ``None`` if there is none to check.
        has_python: Whether the nodes' interpreter runs the command.
        bind: Which cores a rank gets, see :mod:`ddp_callbacks.launcher.node.binding`.
        role, run_id: For the processes' variables.
        environ: Variables that the user has named for the nodes.
        forwarded: Variables that each node gets in any case.
        shown: The ranks whose output goes to the terminal; ``None`` for all.
        prefix: Whether lines begin with ``[node:rank]``.
        log_dir: The folder for the output.
        heartbeat_timeout: Seconds of silence after which a node, or the launcher, counts as lost.
        kill_after: Seconds from SIGTERM to SIGKILL when the processes are ended.
        grace: Seconds from a request to stop to force; ``None`` for the default.
        time_limit: Seconds from now to the job's end; ``None`` if there is no limit.
        requeue: Whether the job is to be started again after a preemption.
        dry_run: Print what would run, and start nothing.
    """

    nodes: tuple[NodePlan, ...]
    command: tuple[str, ...]
    min_nodes: int = 1
    max_restarts: int = 0
    address: str | None = None
    port: int = 0
    script: str | None = None
    has_python: bool = True
    bind: str = "none"
    role: str = "default"
    run_id: str = "none"
    environ: dict[str, str] = field(default_factory=dict)
    forwarded: dict[str, str] = field(default_factory=dict)
    shown: frozenset[int] | None = None
    prefix: bool = True
    log_dir: str = "ddprun-logs"
    heartbeat_timeout: float = 10.0
    kill_after: float = 2.5
    grace: float | None = None
    time_limit: float | None = None
    requeue: bool = False
    dry_run: bool = False

    def words(self, node: NodePlan) -> list[str]:
        """The command of a rank on a node."""
        return node.words(*([node.python, "-u"] if self.has_python else []), *self.command)


@dataclass(frozen=True)
class Here:
    """This machine: the interpreter, the working directory, and which hosts mean it."""

    python: str
    cwd: str
    is_here: Callable[[str], bool]


def plan_nodes(hosts: Sequence[Host], usual: NodePlan, here: Here) -> tuple[NodePlan, ...]:
    """The nodes in rank order, like the usual one but for what their host says; its processes override their slots."""
    local = _local([host.name for host in hosts], here.is_here)
    return tuple(
        replace(
            usual,
            name=host.name.rpartition("@")[2],
            host=None if host.name in local else host.name,
            rank=rank,
            processes=usual.processes or ("" if host.slots is None else str(host.slots)),
            python=host.python or usual.python,
            cwd=host.chdir or usual.cwd,
            cores=host.cores,
            rsh=_named(usual.rsh, host.name),
            instead=_named(usual.instead, host.name),
        )
        for rank, host in enumerate(hosts)
    )


def _named(words: tuple[str, ...] | None, host: str) -> tuple[str, ...] | None:
    return None if words is None else tuple(word.replace("{host}", host) for word in words)


def _local(names: Sequence[str], is_here: Callable[[str], bool]) -> set[str]:
    """The hosts that are this machine. A name that takes long to resolve is another machine's."""
    found: set[str] = set()

    def look(name: str) -> None:
        if is_here(name):
            found.add(name)

    threads = [threading.Thread(target=look, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    end = time.monotonic() + _LOOKUP
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return set(found)


def is_this_machine(name: str) -> bool:
    """Whether a host, as the user has named it, needs no ssh: its name or address belongs to this machine."""
    if name in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        return True
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)}
    except OSError:
        return False  # an alias of the ssh configuration, or user@host
    own = own_addresses()
    return any(is_loopback(address) or address in own for address in addresses)


_BINDINGS = {
    "core": "each process on cores of its own, an equal part of those it may use there",
    "numa": "each process on the cores of a NUMA node, or a part of them",
}
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)


def describe(job: Job, command_to: Callable[[NodePlan], list[str]]) -> str:
    """The job as text; ``command_to`` returns the command line that reaches a node."""
    return "\n".join(_describe_node(job, node, command_to) for node in job.nodes)


def _describe_node(job: Job, node: NodePlan, command_to: Callable[[NodePlan], list[str]]) -> str:
    lines = {
        "reached by": "a local process" if node.host is None else shlex.join(command_to(node)),
        "directory": node.cwd,
        "processes": node.processes or "one per GPU, or one per CPU socket if there is no GPU",
        "command": shlex.join(job.words(node)),
        "binding": _BINDINGS.get(job.bind, ""),
        "variables": " ".join(_variables(job, node)),
        "forwarded": " ".join(sorted(job.forwarded.keys() - job.environ.keys())),
        "rendezvous": _where_they_meet(job),
    }
    text = "".join(f"  {name:<11} {value}\n" for name, value in lines.items() if value)
    return f"node {node.rank}: {node.name}\n{text}"


def _variables(job: Job, node: NodePlan) -> Iterator[str]:
    for name, value in job.environ.items():
        yield shlex.quote(f"{name}={'...' if _SECRET.search(name) else value}")
    if "OMP_NUM_THREADS" not in {*job.environ, *job.forwarded}:
        processes = node.processes if node.processes.isdigit() else "processes"
        yield f"OMP_NUM_THREADS=cores // {processes} (if not set there)"


def _where_they_meet(job: Job) -> str:
    usual = "127.0.0.1" if len(job.nodes) == 1 else f"the address of {job.nodes[0].name}"
    where = f"{job.address or usual}, {job.port or 'a free port'}"
    return where if job.min_nodes == len(job.nodes) else f"{where}, elastic: {job.min_nodes}:{len(job.nodes)} nodes"
