"""Train a Lightning ``Trainer`` or a Torchbearer ``Trial`` on many processes by adding one line.

:mod:`ddp_callbacks.lightning` has the strategy for a Trainer, :mod:`ddp_callbacks.torchbearer` the callbacks for a
Trial. This module has the functions for a training loop in plain PyTorch and needs only torch;
:mod:`ddp_callbacks.comm` sends small messages between the ranks.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ddp_callbacks.versions import __version__

if TYPE_CHECKING:
    from ddp_callbacks.batch_norm import BatchNormSynchronizer, samples_needed
    from ddp_callbacks.checkpoints.file import CheckpointFile
    from ddp_callbacks.checkpoints.objects import LocalSums
    from ddp_callbacks.checkpoints.own_loop import load_checkpoint, save_checkpoint
    from ddp_callbacks.comm.agreement import require_agreement
    from ddp_callbacks.comm.compression import PowerSGD
    from ddp_callbacks.comm.ddp_hook import hierarchical_allreduce_hook
    from ddp_callbacks.comm.hooks import GradBucket
    from ddp_callbacks.data.iterator import ShardedIterator
    from ddp_callbacks.data.random_state import RunRandomState, broadcast_rng_state, seed_by_rank
    from ddp_callbacks.data.resuming import resumable_loader
    from ddp_callbacks.data.samplers import LazyRandomSampler
    from ddp_callbacks.data.sharding import ShardedLoader, shard_loader, with_shares
    from ddp_callbacks.data.shares import Share, WholeBatch, slice_bounds
    from ddp_callbacks.environment import WorkerEnv
    from ddp_callbacks.files import write_atomically
    from ddp_callbacks.gradients import GradientSynchronizer
    from ddp_callbacks.local_sgd import DiLoCo, LocalSGD, ParameterAverager
    from ddp_callbacks.process_group.membership import (
        get_rank,
        get_world_size,
        join_process_group,
        leave_process_group,
    )
    from ddp_callbacks.process_group.preemption import Preemption
    from ddp_callbacks.process_group.spawn import spawn
    from ddp_callbacks.replicas import (
        broadcast_optimizer_state,
        broadcast_parameters,
        describe_checkpoint,
        merge_buffers,
        require_equal_replicas,
        require_same_checkpoint,
    )
    from ddp_callbacks.verification import verify_gradient
    from ddp_callbacks.weighing import CrossEntropyWeight

__all__ = [
    "BatchNormSynchronizer",
    "CheckpointFile",
    "CrossEntropyWeight",
    "DiLoCo",
    "GradBucket",
    "GradientSynchronizer",
    "LazyRandomSampler",
    "LocalSGD",
    "LocalSums",
    "ParameterAverager",
    "PowerSGD",
    "Preemption",
    "RunRandomState",
    "ShardedIterator",
    "ShardedLoader",
    "Share",
    "WholeBatch",
    "WorkerEnv",
    "__version__",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "broadcast_rng_state",
    "describe_checkpoint",
    "get_rank",
    "get_world_size",
    "hierarchical_allreduce_hook",
    "join_process_group",
    "leave_process_group",
    "load_checkpoint",
    "merge_buffers",
    "require_agreement",
    "require_equal_replicas",
    "require_same_checkpoint",
    "resumable_loader",
    "samples_needed",
    "save_checkpoint",
    "seed_by_rank",
    "shard_loader",
    "slice_bounds",
    "spawn",
    "verify_gradient",
    "with_shares",
    "write_atomically",
]

_HOMES = {
    "batch_norm": ("BatchNormSynchronizer", "samples_needed"),
    "checkpoints.file": ("CheckpointFile",),
    "checkpoints.objects": ("LocalSums",),
    "checkpoints.own_loop": ("load_checkpoint", "save_checkpoint"),
    "comm.agreement": ("require_agreement",),
    "comm.compression": ("PowerSGD",),
    "comm.ddp_hook": ("hierarchical_allreduce_hook",),
    "comm.hooks": ("GradBucket",),
    "data.random_state": ("RunRandomState", "broadcast_rng_state", "seed_by_rank"),
    "data.iterator": ("ShardedIterator",),
    "data.resuming": ("resumable_loader",),
    "data.samplers": ("LazyRandomSampler",),
    "data.sharding": ("ShardedLoader", "shard_loader", "with_shares"),
    "data.shares": ("Share", "WholeBatch", "slice_bounds"),
    "environment": ("WorkerEnv",),
    "files": ("write_atomically",),
    "gradients": ("GradientSynchronizer",),
    "local_sgd": ("DiLoCo", "LocalSGD", "ParameterAverager"),
    "process_group.membership": ("get_rank", "get_world_size", "join_process_group", "leave_process_group"),
    "process_group.preemption": ("Preemption",),
    "process_group.spawn": ("spawn",),
    "replicas": (
        "broadcast_optimizer_state",
        "broadcast_parameters",
        "describe_checkpoint",
        "merge_buffers",
        "require_equal_replicas",
        "require_same_checkpoint",
    ),
    "verification": ("verify_gradient",),
    "weighing": ("CrossEntropyWeight",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

# Deprecated: modules and names of version 0.1.
_MOVED = {
    "agreement": "comm.agreement",
    "broadcast": "replicas",
    "collectives": "comm.collectives",
    "comm_hooks": "comm.hooks",
    "compression": "comm.compression",
    "random_state": "data.random_state",
    "sharding": "data.sharding",
}
_RENAMED = {
    "make_distinct": "seed_by_rank",
    "make_equal": "broadcast_rng_state",
    "two_level_hook": "hierarchical_allreduce_hook",
}


def __getattr__(name: str) -> Any:
    """Import torch only on first use (PEP 562): ``ddprun`` has to install its signal handlers before that."""
    if name in _MOVED:
        return sys.modules[f"{__name__}.{name}"]
    current = _RENAMED.get(name, name)
    if current not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if current != name:
        warnings.warn(f"{name} is deprecated: it is called {current} now.", DeprecationWarning, stacklevel=2)
    return getattr(import_module(f"{__name__}.{_HOME_OF[current]}"), current)


class _MovedModule(ModuleType):
    """The old name of a module: it imports names from the new one, with a DeprecationWarning."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        home = f"{__name__}.{_MOVED[self.__name__.rpartition('.')[2]]}"
        current = _RENAMED.get(name, name)
        public = __name__ if current in _HOME_OF else home.removesuffix(".collectives")
        warnings.warn(
            f"{self.__name__}.{name} is deprecated: import {current} from {public}.", DeprecationWarning, stacklevel=2
        )
        return getattr(import_module(home), current)


for _name in _MOVED:
    sys.modules[f"{__name__}.{_name}"] = _MovedModule(f"{__name__}.{_name}")
