"""Save the states of torchmetrics in the middle of a pass, and load them on any number of processes.

On the same number of processes, each gets its own states. On another, each state's ``dist_reduce_fx`` decides:

===================  ==========================================================================================
sum, lists           rank 0 gets the sum, or all entries, rank by rank; the others begin with the default
mean, maximum,       every rank gets the mean, maximum or minimum of all
minimum
any other            the rank's own, if there are no fewer ranks than before; otherwise it is an error
===================  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchmetrics import Metric

from ddp_callbacks.checkpoints import LocalStates
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.lightning._torchmetrics import default_states, plain_states, reductions_of, set_states
from ddp_callbacks.lightning.metrics import metrics_of


def save_metrics(owners: Sequence[Any]) -> list[dict[str, Any]]:
    """Return this rank's states of the metrics in ``owners``: a module and callbacks. Local."""
    return [plain_states(metric) for metric in metrics_of(owners)]


def load_metrics(owners: Sequence[Any], states: LocalStates) -> None:
    """Inverse of :func:`save_metrics`. Local.

    Raises:
        ConfigurationError: A metric's states cannot be given to fewer ranks.
    """
    for index, metric in enumerate(metrics_of(owners)):
        if index < len(states.mine):
            own = states.mine[index]
            saved = own["states"] if states.is_same_world else _merge(metric, states, index)
            set_states(metric, saved, own["updates"])


def _merge(metric: Metric, by_rank: LocalStates, index: int) -> dict[str, Any]:
    rank, world_size = by_rank.rank, by_rank.world_size
    defaults = default_states(metric)
    found: dict[str, Any] = {}
    for name, reduction in reductions_of(metric).items():
        states = [each[index]["states"][name] for each in by_rank.of_ranks]
        if isinstance(defaults[name], list):
            found[name] = [part for state in states for part in state] if rank == 0 else []
        elif reduction in ("mean", "max", "min"):
            stacked = torch.stack(states)
            found[name] = getattr(stacked, "mean" if reduction == "mean" else f"a{reduction}")(0)
        elif reduction == "sum" or (reduction == "cat" and len(states) == 1):
            found[name] = torch.stack(states).sum(0).to(states[0].dtype) if rank == 0 else defaults[name]
        elif reduction == "cat":
            found[name] = torch.cat(states) if rank == 0 else defaults[name]
        elif world_size >= len(states):
            found[name] = states[rank] if rank < len(states) else defaults[name]
        else:
            raise ConfigurationError(
                f"{type(metric).__name__} keeps {name!r} in a way (dist_reduce_fx) that cannot be put together: in the "
                f"middle of an epoch it can resume with {len(states)} processes or more, not with {world_size}."
            )
    return found
