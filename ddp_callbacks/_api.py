"""The public names of ``ddp_callbacks``. The package imports this module at the first use of one of them."""

from ddp_callbacks.batch_norm import BatchNormSynchronizer as BatchNormSynchronizer
from ddp_callbacks.checkpoints.file import CheckpointFile as CheckpointFile
from ddp_callbacks.checkpoints.own_loop import load_checkpoint as load_checkpoint
from ddp_callbacks.checkpoints.own_loop import save_checkpoint as save_checkpoint
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
from ddp_callbacks.process_group.default_group import get_rank as get_rank
from ddp_callbacks.process_group.default_group import get_world_size as get_world_size
from ddp_callbacks.process_group.default_group import join_process_group as join_process_group
from ddp_callbacks.process_group.default_group import leave_process_group as leave_process_group
from ddp_callbacks.process_group.preemption import Preemption as Preemption
from ddp_callbacks.process_group.spawn import spawn as spawn
from ddp_callbacks.randomness import WholeDraws as WholeDraws
from ddp_callbacks.replicas import broadcast_optimizer_state as broadcast_optimizer_state
from ddp_callbacks.replicas import broadcast_parameters as broadcast_parameters
from ddp_callbacks.replicas import merge_buffers as merge_buffers
from ddp_callbacks.verification import verify_gradient as verify_gradient
