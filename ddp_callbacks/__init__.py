"""Train a Torchbearer ``Trial`` on many processes by adding one callback.

The callbacks are in :mod:`ddp_callbacks.torchbearer`. This package itself needs torch alone.
"""

from ddp_callbacks.environment import WorkerEnv
from ddp_callbacks.gradients import GradientSynchronizer
from ddp_callbacks.process_group import join_process_group, leave_process_group
from ddp_callbacks.processes import spawn
from ddp_callbacks.version import __version__

__all__ = ["GradientSynchronizer", "WorkerEnv", "__version__", "join_process_group", "leave_process_group", "spawn"]
