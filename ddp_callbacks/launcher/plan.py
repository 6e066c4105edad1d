"""The plan of a job, made before any node is contacted: what runs where."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddp_callbacks.launcher.flags import FORWARDED
from ddp_callbacks.launcher.hosts import NodePlan
from ddp_callbacks.launcher.node.ending import GRACE
from ddp_callbacks.launcher.remote import command_to

_STORE = ("-P", "-m", "ddp_callbacks.launcher.store")  # the command for the first node's interpreter
_PATIENCE = 30.0  # seconds for a logger that flushes, as torchrun gives


class Job(Namespace):
    """The settings of a job: the value of each flag by its name, see :mod:`ddp_callbacks.launcher.flags`, and more.

    Attributes:
        nodes: The nodes in rank order.
        min_nodes: The smallest number of nodes; the job is elastic if it is less than all.
        environ: Variables for the nodes that the user has named.
        forwarded: Variables of this process that every node gets without being named.
    """

    nodes: tuple[NodePlan, ...]
    min_nodes: int
    environ: dict[str, str]
    forwarded: dict[str, str]

    def changed(self, **settings: Any) -> Job:
        """Return this job with other settings."""
        return Job(**vars(self) | settings)

    @property
    def command(self) -> list[str]:
        """The script, or ``-m`` and the module, and its arguments."""
        return [*(["-m"] if self.module else []), self.training_script or "", *self.training_script_args]

    @property
    def script(self) -> str | None:
        """The file that must exist on each node; ``None`` if there is none to check."""
        return None if self.module or self.no_python else self.training_script

    @property
    def program(self) -> tuple[str, str]:
        """The kind and name of the program to compare between nodes, see :mod:`ddp_callbacks.launcher.facts`."""
        if self.no_python or self.training_script is None:
            return "any", ""
        return "module" if self.module else "script", self.training_script

    @property
    def shown(self) -> frozenset[int] | None:
        """The ranks whose output goes to the terminal; ``None`` for all."""
        return self.show_ranks if self.tee == "0" else None

    @property
    def least_nodes(self) -> int:
        """The smallest number of nodes with which ``--keep-going`` continues: the MIN of ``--nnodes MIN:MAX``."""
        least, is_range, _ = self.nnodes.partition(":")
        return int(least) if is_range else 1

    @property
    def force(self) -> float:
        """Seconds from a request to stop to SIGKILL."""
        return GRACE if self.grace is None else self.grace

    @property
    def patience(self) -> float:
        """Seconds for the other ranks to end after one was preempted."""
        return _PATIENCE if self.grace is None else self.grace

    def words(self, node: NodePlan) -> list[str]:
        """Return the command of a rank on a node."""
        return node.words(*([] if self.no_python else [node.python, "-u"]), *self.command)


# What these variables hold is no secret. Any other one may: a name tells too little.
_SHOWN = tuple(name for name in FORWARDED if name not in ("HF_", "LIGHTNING_", "PL_"))


def describe(job: Job) -> str:
    """Describe the job as text, for ``--dry-run``."""
    return "\n".join(_describe_node(job, node) for node in job.nodes)


def _describe_node(job: Job, node: NodePlan) -> str:
    usual = "127.0.0.1" if len(job.nodes) == 1 else f"the address of {job.nodes[0].name}"
    lines = {
        "reached by": "a local process" if node.is_here else shlex.join(command_to(node, job.heartbeat_timeout)),
        "directory": node.cwd,
        "processes": node.processes or "one per GPU, or one per CPU socket if there is no GPU",
        "command": shlex.join(job.words(node)),
        "binding": "" if job.bind == "none" else job.bind,
        "variables": " ".join(_variables(job, node)),
        "forwarded": " ".join(sorted(job.forwarded.keys() - job.environ.keys())),
        "rendezvous": f"{job.master_addr or usual}, {job.master_port or 'a free port'}",
    }
    text = "".join(f"  {name:<11} {value}\n" for name, value in lines.items() if value)
    return f"node {node.rank}: {node.name}\n{text}"


def _variables(job: Job, node: NodePlan) -> Iterator[str]:
    for name, value in job.environ.items():
        yield shlex.quote(f"{name}={value if name.startswith(_SHOWN) else '...'}")
    if "OMP_NUM_THREADS" not in {*job.environ, *job.forwarded}:
        processes = node.processes if node.processes.isdigit() else "processes"
        yield f"OMP_NUM_THREADS=cores // {processes} (if not set there)"


def starts(
    job: Job, nodes: Sequence[tuple[NodePlan, Mapping[str, Any]]], where: tuple[str, int], restarts: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield for each node the message that starts its ranks; the first node hosts their store at ``where``.

    Args:
        nodes: Each node with its place, see :func:`ddp_callbacks.launcher.facts.place`.
    """
    counts = [int(place["processes"]) for _, place in nodes]
    for number, (node, place) in enumerate(nodes):
        first = sum(counts[:number])
        variables = {
            "MASTER_ADDR": where[0],
            "MASTER_PORT": where[1],
            "WORLD_SIZE": sum(counts),
            "LOCAL_WORLD_SIZE": counts[number],
            "GROUP_RANK": number,
            "GROUP_WORLD_SIZE": len(counts),
            "ROLE_NAME": job.role,
            "ROLE_WORLD_SIZE": sum(counts),
            "TORCHELASTIC_RESTART_COUNT": restarts,
            "TORCHELASTIC_MAX_RESTARTS": job.max_restarts,
            "TORCHELASTIC_RUN_ID": job.rdzv_id,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "PYTHONPATH": f"{place['package']}/launcher/hook",
        }
        yield {
            "argv": job.words(node),
            "ranks": list(range(first, first + counts[number])),
            "environ": {name: str(value) for name, value in variables.items()},
            "defaults": _defaults(place),
            "store": node.words(node.python, *_STORE) if number == 0 else [],
            "bind": job.bind,
            "patience": job.heartbeat_timeout if job.keep_going else None,
        }


def _defaults(place: Mapping[str, Any]) -> dict[str, str]:
    """Return variables that a rank gets unless its node has set them."""
    interface = place.get("interface", "")
    found = {
        "OMP_NUM_THREADS": str(max(1, place["cores"] // place["processes"])),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": "" if interface == "lo" else interface,  # NCCL finds its way inside a node
    }
    return {name: value for name, value in found.items() if value}
