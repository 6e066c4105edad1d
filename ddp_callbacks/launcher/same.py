"""Whether all nodes have the same program: the script, this package, and what they stand on.

With an older script on one node a job trains, but to other numbers.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from ddp_callbacks.launcher.hosts import NodePlan
from ddp_callbacks.versions import how_to_install_this

_SUMS = ("script", "module", "ddp_callbacks")  # compared by a checksum of the files


def differences(places: Mapping[NodePlan, Mapping[str, Any]]) -> Iterator[tuple[NodePlan, str, str]]:
    """Yield each thing that a node has unlike the first one: the node, the thing, and a text with the remedy.

    Args:
        places: The facts about each node, see :func:`ddp_callbacks.launcher.facts.place`.
    """
    for plan, place in places.items():
        first = next(iter(places))
        for name, usual in places[first]["same"].items():
            own = place["same"].get(name)
            if own and usual and own != usual:  # what a node lacks is named where it is needed
                says = f"its {name} is not that of" if name in _SUMS else f"{name} {own}, but {usual} on"
                yield plan, name, f"{says} {first.name}. {remedy(plan, name, usual)}"


def remedy(plan: NodePlan, name: str, version: str) -> str:
    """Say how to get a thing to a node in this version, which may be empty."""
    if name in ("script", "module"):
        return how_to_copy(plan)
    if name == "python":
        return "Choose another with --python"
    python, wanted = f"{plan.shell}{plan.python}", f"{name}=={version.partition('+')[0]}" if version else name
    return f"Run: {how_to_install_this(python) if name in _SUMS else f'{python} -m pip install {wanted}'}"


def how_to_copy(plan: NodePlan) -> str:
    """Say how to copy the working directory to the node."""
    if plan.is_here or plan.rsh is not None:
        return f"Copy it to {plan.cwd} there"
    here = shlex.quote(f"{os.getcwd()}/")
    return f"Copy it: rsync -a --mkpath {here} {shlex.quote(f'{plan.host}:{plan.cwd}/')}"
