"""Start ranks on nodes: the variables and the command that each gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp_callbacks.launcher.connection import Connection
from ddp_callbacks.launcher.plan import Job
from ddp_callbacks.launcher.remote import as_hex

STORE = ("-P", "-m", "ddp_callbacks.launcher.store")  # the command for the first node's interpreter


def start_ranks(job: Job, nodes: Sequence[Connection], where: tuple[str, int], restarts: int = 0) -> None:
    """Start the ranks on nodes of which all is known; the first one hosts their store at ``where``."""
    counts = [int(node.place["processes"]) for node in nodes]
    address, port = where
    for number, node in enumerate(nodes):
        variables = {
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
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
            "PYTHONPATH": f"{node.place['package']}/launcher/hook",
        }
        node.tell(
            "start",
            argv=[as_hex(word) for word in job.words(node.plan)],
            ranks=list(range(sum(counts[:number]), sum(counts[: number + 1]))),
            environ={name: str(value) for name, value in variables.items()},
            defaults=_defaults(node.place),
            store=[as_hex(word) for word in node.plan.words(node.plan.python, *STORE)] if number == 0 else [],
            bind=job.bind,
        )


def _defaults(place: dict[str, Any]) -> dict[str, str]:
    """Variables that a rank gets unless they are set on its node."""
    interface = place.get("interface", "")
    found = {
        "OMP_NUM_THREADS": str(max(1, place["cores"] // place["processes"])),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": "" if interface == "lo" else interface,  # NCCL finds its way inside a node
    }
    return {name: value for name, value in found.items() if value}
