"""Train a Lightning ``Trainer`` or a Torchbearer ``Trial`` on many processes by adding one line.

:mod:`ddp_callbacks.lightning` has the strategy for a Trainer, :mod:`ddp_callbacks.torchbearer` the callbacks for a
Trial. This module has the functions for a training loop in plain PyTorch and needs only torch;
:mod:`ddp_callbacks.comm` sends small messages between the ranks. What only few loops need is in the submodules.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ddp_callbacks.versions import __version__ as __version__

if TYPE_CHECKING:
    from ddp_callbacks.batch_norm import BatchNormSynchronizer as BatchNormSynchronizer
    from ddp_callbacks.checkpoints.file import CheckpointFile as CheckpointFile
    from ddp_callbacks.checkpoints.own_loop import load_checkpoint as load_checkpoint
    from ddp_callbacks.checkpoints.own_loop import save_checkpoint as save_checkpoint
    from ddp_callbacks.comm.compression import PowerSGD as PowerSGD
    from ddp_callbacks.cross_entropy import CrossEntropyWeight as CrossEntropyWeight
    from ddp_callbacks.data.random_state import seed_by_rank as seed_by_rank
    from ddp_callbacks.data.resuming import resumable_loader as resumable_loader
    from ddp_callbacks.data.sharding import shard_loader as shard_loader
    from ddp_callbacks.data.sharding import with_shares as with_shares
    from ddp_callbacks.data.shares import Share as Share
    from ddp_callbacks.gradients import GradientSynchronizer as GradientSynchronizer
    from ddp_callbacks.local_sgd import DiLoCo as DiLoCo
    from ddp_callbacks.local_sgd import LocalSGD as LocalSGD
    from ddp_callbacks.local_sgd import ParameterAverager as ParameterAverager
    from ddp_callbacks.process_group.membership import get_rank as get_rank
    from ddp_callbacks.process_group.membership import get_world_size as get_world_size
    from ddp_callbacks.process_group.membership import join_process_group as join_process_group
    from ddp_callbacks.process_group.membership import leave_process_group as leave_process_group
    from ddp_callbacks.process_group.preemption import Preemption as Preemption
    from ddp_callbacks.process_group.spawn import spawn as spawn
    from ddp_callbacks.replicas import broadcast_optimizer_state as broadcast_optimizer_state
    from ddp_callbacks.replicas import broadcast_parameters as broadcast_parameters
    from ddp_callbacks.replicas import merge_buffers as merge_buffers
    from ddp_callbacks.verification import verify_gradient as verify_gradient

_HOMES = {
    "BatchNormSynchronizer": "batch_norm",
    "CheckpointFile": "checkpoints.file",
    "CrossEntropyWeight": "cross_entropy",
    "DiLoCo": "local_sgd",
    "GradientSynchronizer": "gradients",
    "LocalSGD": "local_sgd",
    "ParameterAverager": "local_sgd",
    "PowerSGD": "comm.compression",
    "Preemption": "process_group.preemption",
    "Share": "data.shares",
    "broadcast_optimizer_state": "replicas",
    "broadcast_parameters": "replicas",
    "get_rank": "process_group.membership",
    "get_world_size": "process_group.membership",
    "join_process_group": "process_group.membership",
    "leave_process_group": "process_group.membership",
    "load_checkpoint": "checkpoints.own_loop",
    "merge_buffers": "replicas",
    "resumable_loader": "data.resuming",
    "save_checkpoint": "checkpoints.own_loop",
    "seed_by_rank": "data.random_state",
    "shard_loader": "data.sharding",
    "spawn": "process_group.spawn",
    "verify_gradient": "verification",
    "with_shares": "data.sharding",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    """Import torch only on first use (PEP 562): ``ddprun`` has to install its signal handlers before that."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
