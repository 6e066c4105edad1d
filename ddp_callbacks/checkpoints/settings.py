"""What a script passes to its optimizers and schedulers. A file brings back what the script of its time passed."""

from __future__ import annotations

import ast
import contextlib
import inspect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_callbacks._torch import schedulers_within
from ddp_callbacks.comm.agreement import text_of
from ddp_callbacks.errors import CheckpointError, warn

_CLASSES = "classes"
_CHANGES = {"optimizer", "last_epoch"}


def settings_of(parts: Iterable[Any]) -> dict[str, str]:
    """Return what is passed to optimizers and to torch's own schedulers, as text by name. Other parts have nothing."""
    named = _named(parts)
    found = {
        f"{option} of {name}": text_of(value)
        for name, part in named.items()
        for option, value in (_of_optimizer(part) if isinstance(part, Optimizer) else _of_scheduler(part)).items()
    }
    return found | {_CLASSES: ", ".join(type(part).__name__ for part in named.values())}


def follow_settings(saved: Mapping[str, str], parts: Sequence[Any], path: str, rank: int) -> None:
    """Compare what the script passes with a file's settings, which stay. Local; each rank calls it before it loads.

    Args:
        saved: The result of :func:`settings_of` when the file was written; empty if it is unknown.
        parts: The optimizers and schedulers. The defaults of the optimizers become those of the file.
        path: The path of the file, for messages.
        rank: Rank 0 warns of what differs.

    Raises:
        CheckpointError: On every rank: the file has the state of another class.
    """
    now = settings_of(parts)
    then = saved.get(_CLASSES, now[_CLASSES])
    if any(one != other for one, other in zip(then.split(", "), now[_CLASSES].split(", "), strict=False)):
        raise CheckpointError(
            f"{path} has the states of {then}, this script has {now[_CLASSES]}. Give the optimizers and schedulers "
            "that the file was written with, or another path to start from the beginning."
        )
    others = [f"{name} {saved[name]}, now {now[name]}" for name in now if saved.get(name, now[name]) != now[name]]
    if others and rank == 0:
        warn(
            f"{path} was written with other settings than this script passes: {'; '.join(others)}. The run resumes "
            "with those of the file. To train with the script's, start from the file's weights, with another path."
        )
    for name, part in _named(parts).items():
        for option in part.defaults if isinstance(part, Optimizer) else ():
            with contextlib.suppress(ValueError, SyntaxError, KeyError):  # no plain data, or unknown
                part.defaults[option] = ast.literal_eval(saved[f"{option} of {name}"])


def _named(parts: Iterable[Any]) -> dict[str, Any]:
    """Return optimizers and schedulers, with those inside of others, by class; a second one has a number."""
    found: dict[str, Any] = {}
    counts: Counter[str] = Counter()
    for part in (one for each in parts for one in (each, *schedulers_within(each))):
        if isinstance(part, Optimizer | LRScheduler):
            kind = type(part).__name__
            counts[kind] += 1
            found[kind if counts[kind] == 1 else f"{kind} {counts[kind]}"] = part
    return found


def _of_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Return the defaults, and the learning rates of several groups if a scheduler has noted them: both stay."""
    groups = optimizer.param_groups if len(optimizer.param_groups) > 1 else []
    rates = {f"lr of group {n}": group["initial_lr"] for n, group in enumerate(groups) if "initial_lr" in group}
    return dict(optimizer.defaults) | rates


def _of_scheduler(scheduler: Any) -> dict[str, Any]:
    """Return what stays of the arguments of torch's schedulers; others may change their attributes."""
    if not type(scheduler).__module__.startswith("torch."):
        return {}
    arguments = inspect.signature(type(scheduler)).parameters.keys() - _CHANGES
    return {name: value for name, value in sorted(vars(scheduler).items()) if name in arguments}
