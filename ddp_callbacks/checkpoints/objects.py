"""What each kind of object in a loop has to save, and how it goes on, on as many ranks or on another number."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ddp_callbacks._torch import mark_as_stepped
from ddp_callbacks.data.random_state import RunRandomState
from ddp_callbacks.data.resuming import Resumable
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.gradients import GradientSynchronizer
from ddp_callbacks.local_sgd import ParameterAverager

Objects = Mapping[str, Any]

_OWN = (Resumable, GradientSynchronizer, ParameterAverager, RunRandomState)


class LocalSums(dict[str, Any]):
    """Sums of this rank's part of the data: losses, counts. A dict of numbers and tensors, for ``save_checkpoint``.

    Each rank has different values. On as many ranks each resumes from its own; on another number, rank 0 resumes from
    the sums over the ranks and the others from zero, so that the sum over the ranks stays the same.

    Args:
        sums: Their first values, by name: ``LocalSums(loss=0.0, samples=0)``.
    """

    def __init__(self, **sums: Any) -> None:
        super().__init__(sums)


def is_own(value: Any) -> bool:
    """Whether each rank has a different state of this object."""
    return isinstance(value, (*_OWN, LocalSums))


def state_of(name: str, value: Any) -> Any:
    """What to save of an object.

    Raises:
        ConfigurationError: It has neither ``state_dict`` nor is it a dict.
    """
    if isinstance(value, dict):
        return dict(value)
    if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
        raise ConfigurationError(
            f"{name!r} must have state_dict and load_state_dict, or be a dict of plain values, got a "
            f"{type(value).__name__}. Make a loader by resumable_loader(); put numbers into a dict."
        )
    return value.state_dict()


def load_shared(value: Any, state: Any) -> None:
    """Go on from a state that all ranks have alike. The state may be kept: give each call a new one."""
    if isinstance(value, dict):
        _replace(value, state)
    else:
        value.load_state_dict(state)
    if isinstance(value, torch.optim.Optimizer) and value.state:
        mark_as_stepped(value)


def load_own(value: Any, states: Sequence[Any], rank: int, world_size: int) -> None:
    """Go on from the states of all ranks that wrote the file, in rank order. Local."""
    is_same = len(states) == world_size
    if isinstance(value, GradientSynchronizer):
        value.load_state_dict(states)
    elif isinstance(value, LocalSums):
        _replace(value, states[rank] if is_same else _part_of_sums(states, rank))
    else:
        value.load_state_dict(states[rank if is_same else 0])


def load_window(averager: ParameterAverager, states: Sequence[Any], modules: Sequence[torch.nn.Module]) -> None:
    """Go on from a window of another number of ranks: it is closed, as it would have been there. A collective.

    Args:
        modules: Those of the loop; the averaged one is among them.
    """
    weights = [state["weight"] for state in states]
    total = sum(weights)
    first = states[0]
    if "parameters" in first and total:
        names = first["parameters"]
        mean = {
            name: sum(
                state["parameters"][name].double() * (weight / total)
                for state, weight in zip(states, weights, strict=True)
            ).to(names[name].dtype)
            for name in names
        }
        _copy_parameters(mean, modules)
        if "anchors" in averager.state_dict():
            averager.load_state_dict({**first, "parameters": mean, "weight": total})
            averager.outer_step()
            return
    averager.load_state_dict({"steps": 0, "weight": 0.0})
    averager.outer_step()  # takes the parameters that are loaded as the anchors


def _copy_parameters(values: Mapping[str, torch.Tensor], modules: Sequence[torch.nn.Module]) -> None:
    for module in modules:
        named = dict(module.named_parameters())
        if values.keys() <= named.keys():
            with torch.no_grad():
                for name, value in values.items():
                    named[name].copy_(value)


def _replace(value: dict[str, Any], state: Mapping[str, Any]) -> None:
    value.clear()
    value.update(copy.deepcopy(dict(state)))


def _part_of_sums(states: Sequence[Mapping[str, Any]], rank: int) -> dict[str, Any]:
    names = dict.fromkeys(name for state in states for name in state)
    sums = {name: sum(state[name] for state in states if name in state) for name in names}
    return sums if rank == 0 else {name: _zero(value) for name, value in sums.items()}


def _zero(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)(0)
