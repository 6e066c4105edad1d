"""The hierarchical all-reduce as a communication hook, also for plain ``DistributedDataParallel``."""

import weakref

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddp_callbacks.comm.hierarchical import Worker
from ddp_callbacks.comm.protocol import Work
from ddp_callbacks.comm.topology import choose_all_reduce
from ddp_callbacks.process_group import resolve_group

_waiters: weakref.WeakKeyDictionary[dist.ProcessGroup, Worker] = weakref.WeakKeyDictionary()
_DOING = "the gradients of a communication hook"


# DDP compares the annotations, so they must not be strings.
def hierarchical_allreduce_hook(
    state: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average gradients by a hierarchical all-reduce: shared memory within a node, the network between nodes::

        model = DistributedDataParallel(model)
        model.register_comm_hook(None, hierarchical_allreduce_hook)

    :class:`ddp_callbacks.GradientSynchronizer` does this by default. Here the buckets belong to DDP, so they are copied
    into shared memory and back. For CPUs; for gradients on GPUs it calls torch's ``allreduce_hook``. The first call is
    a collective that blocks; later calls do not block.

    Args:
        state: The process group of the model; ``None`` is the default group.
        bucket: The gradients, flat.
    """
    group, gradients = resolve_group(state), bucket.buffer()
    if gradients.device.type != "cpu":
        return allreduce_hook(group, bucket)  # its future knows the GPU's streams
    gradients.div_(group.size())
    return future_of(choose_all_reduce(group, [gradients.device]).launch(gradients, _DOING), gradients, group)


def future_of(pending: Work, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """A future with the CPU tensor ``tensor`` as its value. A thread of the group completes it after ``pending``.

    Each group has a separate thread, as the order of two groups' sums can differ between ranks.
    """
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()

    def complete() -> None:
        try:
            pending.wait(_DOING)
            future.set_result(tensor)
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]

    if group not in _waiters:
        _waiters[group] = Worker("ddp_callbacks futures")
    _waiters[group].submit(complete)
    return future
