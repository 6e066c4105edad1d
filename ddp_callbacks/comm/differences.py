"""Name what differs between the ranks, from what was gathered of them. No communication."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_callbacks.errors import MismatchError
from ddp_callbacks.process_group import resolve_group
from ddp_callbacks.process_group.failures import describe_rank

MISSING = "(none)"
_SHOWN = 5  # differences listed in a message


def require_equal(
    gathered: Sequence[Mapping[str, Any]], subject: str, remedy: str, group: dist.ProcessGroup | None = None
) -> None:
    """Raise unless the settings of all ranks are equal. Local, but every rank must call it with the same settings.

    Args:
        gathered: The settings of each rank: names mapped to JSON values; they are compared as strings.
        subject: What the settings belong to: "the model".
        remedy: How to fix a difference, one sentence.
        group: The ranks' process group; ``None`` is the default group.

    Raises:
        MismatchError: Names each setting that differs, the ranks and their values.
    """
    lines = list(differences(gathered))
    if lines:
        hosts = ", ".join(describe_rank(resolve_group(group), rank) for rank in range(len(gathered)))
        raise MismatchError(f"the ranks disagree about {subject}:{listed(lines)}\n{remedy}\nRanks: {hosts}.")


def listed(lines: Sequence[str]) -> str:
    """Return the first differences for a message, each in a line of its own, and the number of the others."""
    more = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "".join(f"\n  {line}" for line in [*lines[:_SHOWN], *more])


def differences(gathered: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Yield one line for each setting that differs: ``lr: 0.1 on ranks 0, 2; 0.2 on rank 1``."""
    names = dict.fromkeys(name for settings in gathered for name in settings)
    for name in names:
        ranks_by_value: dict[str, list[str]] = {}
        for rank, settings in enumerate(gathered):
            ranks_by_value.setdefault(str(settings.get(name, MISSING)), []).append(str(rank))
        if len(ranks_by_value) > 1:
            yield f"{name}: " + "; ".join(
                f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
                for value, ranks in ranks_by_value.items()
            )


def describe(tensor: torch.Tensor) -> str:
    """Return the shape and dtype as text."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
