"""Start ranks on nodes: what must be known of a node, and the variables that its ranks get."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_callbacks.launcher import facts
from ddp_callbacks.launcher.connection import Connection, NodeProblem
from ddp_callbacks.launcher.plan import Job
from ddp_callbacks.launcher.remote import as_hex

STORE = ("-P", "-m", "ddp_callbacks.launcher.store")  # the command for the first node's interpreter


def ask_for_facts(node: Connection, which: str, seconds: float) -> dict[str, Any]:
    """What :mod:`ddp_callbacks.launcher.facts` prints there; ``which`` is its first argument.

    Raises:
        NodeProblem: The interpreter there cannot run it.
    """
    words = node.plan.words(
        node.plan.python, "-P", "-c", Path(facts.__file__).read_text(), which, str(node.plan.cores or 0)
    )
    said = node.ask("output", argv=[as_hex(word) for word in words], seconds=seconds)
    if said["code"]:
        needs = f"--setup {node.plan.setup!r} or Python failed" if node.plan.setup else "needs Python 3.11 or newer"
        raise NodeProblem(f"{needs}: {said['err'].strip().rpartition(chr(10))[2]}")
    return dict(json.loads(said["out"].strip().rpartition("\n")[2]))  # below what --setup may print


def find_interface(node: Connection, address: str) -> None:
    """Find the interface of a node on the route to ``address``; gloo and NCCL use it, unless the user chose another.

    Raises:
        NodeProblem: There is no route.
    """
    own = node.ask("route", address=address)["address"]
    node.place["interface"] = node.place["interfaces"].get(own, "")


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
            "TORCHELASTIC_RUN_ID": job.run_id,
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
