"""Train a Torchbearer ``Trial`` or a Lightning ``Trainer`` on many processes by adding one line.

The callbacks for a Trial are in :mod:`ddp_callbacks.torchbearer`, the strategy for a Trainer in
:mod:`ddp_callbacks.lightning`. This package itself needs torch alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ddp_callbacks.version import __version__

if TYPE_CHECKING:
    from ddp_callbacks.compression import PowerSGD
    from ddp_callbacks.ddp_hook import two_level_hook
    from ddp_callbacks.environment import WorkerEnv
    from ddp_callbacks.gradients import GradientSynchronizer
    from ddp_callbacks.local_sgd import DiLoCo, LocalSGD, ParameterAverager
    from ddp_callbacks.process_group import join_process_group, leave_process_group
    from ddp_callbacks.processes import spawn
    from ddp_callbacks.weighing import CrossEntropyWeight

__all__ = [
    "CrossEntropyWeight",
    "DiLoCo",
    "GradientSynchronizer",
    "LocalSGD",
    "ParameterAverager",
    "PowerSGD",
    "WorkerEnv",
    "__version__",
    "join_process_group",
    "leave_process_group",
    "spawn",
    "two_level_hook",
]

_MODULES = {
    "CrossEntropyWeight": "weighing",
    "DiLoCo": "local_sgd",
    "GradientSynchronizer": "gradients",
    "LocalSGD": "local_sgd",
    "ParameterAverager": "local_sgd",
    "PowerSGD": "compression",
    "WorkerEnv": "environment",
    "join_process_group": "process_group",
    "leave_process_group": "process_group",
    "spawn": "processes",
    "two_level_hook": "ddp_hook",
}


def __getattr__(name: str) -> Any:
    """Import torch when it is first needed: ``ddprun`` has to see to its signals before that (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
