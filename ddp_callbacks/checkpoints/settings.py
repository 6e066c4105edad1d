"""What a script passes to its optimizers and schedulers. A file brings back what the script of its time passed."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_callbacks._torch import schedulers_within
from ddp_callbacks.comm.agreement import text_of
from ddp_callbacks.errors import warn

_CHANGES = {"optimizer", "last_epoch"}


def settings_of(parts: Iterable[Any]) -> dict[str, str]:
    """Return what is passed to optimizers and to torch's own schedulers, as text by name. Other parts have nothing."""
    found: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for part in (one for each in parts for one in (each, *schedulers_within(each))):
        kind = type(part).__name__
        counts[kind] += 1
        name = kind if counts[kind] == 1 else f"{kind} {counts[kind]}"
        options = _of_optimizer(part) if isinstance(part, Optimizer) else _of_scheduler(part)
        found |= {f"{option} of {name}": text_of(value) for option, value in options.items()}
    return found


def warn_of_ignored(saved: Mapping[str, str], now: Mapping[str, str], path: str) -> None:
    """Warn of settings that a resumed run has from its file, while the script passes others. Local."""
    others = [f"{name} {saved[name]}, now {now[name]}" for name in now if saved.get(name, now[name]) != now[name]]
    if others:
        warn(
            f"{path} was written with other settings than this script passes: {'; '.join(others)}. The run resumes "
            "with those of the file. To train with the script's, start from the file's weights, with another path."
        )


def _of_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Return the defaults, and the learning rates of several groups if a scheduler has noted them: both stay."""
    groups = optimizer.param_groups if len(optimizer.param_groups) > 1 else []
    rates = {f"lr of group {n}": group["initial_lr"] for n, group in enumerate(groups) if "initial_lr" in group}
    return dict(optimizer.defaults) | rates


def _of_scheduler(scheduler: Any) -> dict[str, Any]:
    """Return what stays of the arguments; a scheduler of another's may change its attributes."""
    if not isinstance(scheduler, LRScheduler) or not type(scheduler).__module__.startswith("torch."):
        return {}
    arguments = inspect.signature(type(scheduler)).parameters.keys() - _CHANGES
    return {name: value for name, value in sorted(vars(scheduler).items()) if name in arguments}
