"""The plan of a job, made before any node is contacted: what runs where."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ddp_callbacks.launcher.flags import FORWARDED
from ddp_callbacks.launcher.hosts import NodePlan
from ddp_callbacks.launcher.job import Job
from ddp_callbacks.launcher.node.processes import StartRanks
from ddp_callbacks.launcher.remote import command_to

_STORE = ("-P", "-m", "ddp_callbacks.launcher.store")  # the command for the first node's interpreter


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
        "setup": node.setup,
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
) -> Iterator[StartRanks]:
    """Yield for each node how its ranks are started; the first node hosts their store at ``where``.

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
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": sum(counts),
            "TORCHELASTIC_RESTART_COUNT": restarts,
            "TORCHELASTIC_MAX_RESTARTS": job.max_restarts,
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "PYTHONPATH": f"{place['package']}/launcher/hook",
        }
        yield StartRanks(
            argv=job.words(node),
            ranks=list(range(first, first + counts[number])),
            environ={name: str(value) for name, value in variables.items()},
            defaults=_defaults(place),
            store=[node.python, *_STORE] if number == 0 else [],
            bind=job.bind,
            patience=job.heartbeat_timeout if job.keep_going else None,
        )


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
