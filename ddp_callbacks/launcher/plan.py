"""What runs where: worked out before anything is contacted."""

from __future__ import annotations

import shlex
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.launcher.hosts import Host
from ddp_callbacks.launcher.options import NodeOptions, Options
from ddp_callbacks.network import is_loopback

_LOOKUP = 5.0  # seconds for resolving the names of all nodes
_FOR_ONE_NODE = ("node_rank", "local_addr", "standalone")  # flags that torchrun's user sets on each node


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
    """

    name: str
    host: str | None
    rank: int
    processes: str
    python: str
    cwd: str
    rsh: tuple[str, ...] | None = None

    @property
    def shell(self) -> str:
        """The prefix of a command to type for this node; empty for this machine."""
        if self.host is None:
            return ""
        return f"ssh {self.host} " if self.rsh is None else f"{shlex.join(self.rsh)} "


@dataclass(frozen=True)
class Plan:
    """The whole job.

    Attributes:
        nodes: In rank order.
        min_nodes: Minimum number of nodes.
        rendezvous: ``"fixed"``: these nodes in this order; ``"elastic"``: at least ``min_nodes``, in any order;
            ``None``: as in torchrun's flags.
        address, port: Where the first node listens; ``None`` and 0 if still to be found.
        script: The file that must exist on each node; ``None`` if there is none to check.
        torchrun: torchrun's arguments, without those in :class:`NodePlan`.
        command: The script and its arguments.
        environ: Variables that the user has named for the nodes.
        forwarded: Variables that each node gets in any case.
    """

    nodes: tuple[NodePlan, ...]
    min_nodes: int
    rendezvous: str | None
    address: str | None
    port: int
    script: str | None
    torchrun: dict[str, Any]
    command: tuple[str, ...]
    environ: dict[str, str]
    forwarded: dict[str, str]


@dataclass(frozen=True)
class Here:
    """This machine: the interpreter, the working directory, and which hosts mean it."""

    python: str
    cwd: str
    is_here: Callable[[str], bool]


def plan_nodes(options: NodeOptions, processes: str, here: Here) -> tuple[NodePlan, ...]:
    """The nodes in rank order, with ``processes`` each (``--nproc-per-node``), or else with their slots."""
    hosts = options.hosts or [Host("localhost")]
    local = _local([host.name for host in hosts], here.is_here)
    return tuple(
        NodePlan(
            name=host.name.rpartition("@")[2],
            host=None if host.name in local else host.name,
            rank=rank,
            processes=processes or ("" if host.slots is None else str(host.slots)),
            python=host.python or options.python or here.python,
            cwd=host.chdir or options.chdir or here.cwd,
            rsh=None if options.rsh is None else tuple(word.replace("{host}", host.name) for word in options.rsh),
        )
        for rank, host in enumerate(hosts)
    )


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


def make_plan(options: Options, here: Here) -> Plan:
    """Decide what runs where.

    Raises:
        ConfigurationError: The flags contradict each other.
    """
    torchrun = dict(options.torchrun)
    low, _, high = torchrun["nnodes"].partition(":")
    nodes = plan_nodes(options.nodes, torchrun["nproc_per_node"], here)
    count = len(nodes)
    by_hand = options.nodes.hosts is None and int(high or low) > 1
    if count > 1:
        _refuse_flags_of_one_node(torchrun)
    min_nodes = count if by_hand or torchrun["nnodes"] == "1:1" else _min_nodes(int(low), int(high or low), count)
    if not by_hand:
        torchrun["nnodes"] = f"{min_nodes}:{count}"
    elastic = min_nodes < count or (count > 1 and torchrun["max_restarts"] > 0)
    address, port = _address(torchrun)
    own = by_hand or (torchrun["rdzv_backend"] != "static" and bool(torchrun["rdzv_endpoint"]))
    if torchrun["rdzv_backend"] not in ("static", "c10d") and not own:
        raise ConfigurationError(f"--rdzv-backend {torchrun['rdzv_backend']} needs --rdzv-endpoint.")
    return Plan(
        nodes=nodes,
        min_nodes=min_nodes,
        rendezvous=None if own else "elastic" if elastic else "fixed",
        address=address,
        port=port,
        script=None if torchrun["module"] or torchrun["no_python"] else options.command[0],
        torchrun=torchrun,
        command=options.command,
        environ=options.environ,
        forwarded=options.forwarded,
    )


def _refuse_flags_of_one_node(torchrun: dict[str, Any]) -> None:
    for name in _FOR_ONE_NODE:
        if torchrun[name]:
            raise ConfigurationError(
                f"--{name.replace('_', '-')} describes a single node; with several, ddprun finds it out for each. "
                "Leave it out."
            )


def _address(torchrun: dict[str, Any]) -> tuple[str | None, int]:
    """The user's address for the first node; torchrun's static endpoint means the same as its two other flags."""
    if torchrun["rdzv_backend"] == "static" and torchrun["rdzv_endpoint"]:
        host, _, port = torchrun["rdzv_endpoint"].rpartition(":")
        if not host or not port.isdigit():
            raise ConfigurationError(f"--rdzv-endpoint takes HOST:PORT, got {torchrun['rdzv_endpoint']!r}.")
        return host.removeprefix("[").removesuffix("]"), int(port)
    given = torchrun["master_addr"] != "127.0.0.1"  # torchrun's default
    return torchrun["master_addr"] if given else None, torchrun["master_port"] or 0


def _min_nodes(low: int, high: int, count: int) -> int:
    if not low <= count <= high:
        raise ConfigurationError(
            f"--nnodes {low}{'' if low == high else f':{high}'} does not match the number of nodes, {count}. Leave "
            f"it out, or give a range that contains {count}."
        )
    return low


def is_this_machine(name: str) -> bool:
    """Whether a host, as the user has named it, needs no ssh: its name or address belongs to this machine."""
    if name in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        return True
    try:
        addresses = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False  # an alias of the ssh configuration, or user@host
    return any(_is_own(family, address) for family, *_, address in addresses)


def _is_own(family: int, address: Any) -> bool:
    """Whether an address is this machine's: it is a loopback address, or packets to it come from it."""
    if is_loopback(address[0]):
        return True
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address[0], 1, *address[2:]))  # sends nothing
        except OSError:
            return False
        return bool(probe.getsockname()[0] == address[0])


def describe(plan: Plan, command_to: Callable[[NodePlan], list[str]]) -> str:
    """The plan as text; ``command_to`` returns the command line that reaches a node."""
    return "\n".join(_describe_node(plan, node, command_to) for node in plan.nodes)


def _describe_node(plan: Plan, node: NodePlan, command_to: Callable[[NodePlan], list[str]]) -> str:
    per_process = f"cores // {node.processes}" if node.processes.isdigit() else "cores // processes"
    lines = {
        "reached by": "a local process" if node.host is None else shlex.join(command_to(node)),
        "directory": node.cwd,
        "processes": node.processes or "one per GPU, or one per CPU socket if there is no GPU",
        "command": _command(plan, node),
        "variables": " ".join(
            [
                *(f"{shlex.quote(f'{name}={value}')}" for name, value in plan.environ.items()),
                *(
                    []
                    if "OMP_NUM_THREADS" in {*plan.environ, *plan.forwarded}
                    else [f"OMP_NUM_THREADS={per_process} (if not set there)"]
                ),
            ]
        ),
        "forwarded": " ".join(sorted(plan.forwarded.keys() - plan.environ.keys())),
        "rendezvous": _rendezvous(plan),
    }
    text = "".join(f"  {name:<11} {value}\n" for name, value in lines.items() if value)
    return f"node {node.rank}: {node.name}\n{text}"


def _command(plan: Plan, node: NodePlan) -> str:
    if plan.torchrun["no_python"]:
        return shlex.join(plan.command)
    module = ["-m"] if plan.torchrun["module"] else []
    return shlex.join([node.python, "-u", *module, *plan.command])


def _rendezvous(plan: Plan) -> str:
    if plan.rendezvous is None:
        return (
            f"--rdzv-backend {plan.torchrun['rdzv_backend']} --rdzv-endpoint {plan.torchrun['rdzv_endpoint']}".strip()
        )
    first = plan.nodes[0].name
    port = str(plan.port) if plan.port else "a free port"
    where = f"{plan.address or ('127.0.0.1' if len(plan.nodes) == 1 else f'the address of {first}')}, {port}"
    return where if plan.rendezvous == "fixed" else f"{where}, elastic: {plan.torchrun['nnodes']} nodes"
