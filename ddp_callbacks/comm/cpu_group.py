"""The process group for CPU tensors: the user's own, or one beside it if that takes GPU tensors only."""

from __future__ import annotations

import os
import weakref

import torch
import torch.distributed as dist

from ddp_callbacks._torch import devices_of, timeout_of
from ddp_callbacks.process_group.rendezvous import choose_interface

_cpu_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def cpu_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """``group``, or a gloo group of the same ranks if ``group`` is for GPUs only (``init_process_group("nccl")``).

    Control numbers must not wait for a GPU, and a wait for a GPU cannot end early when another rank has failed. A
    collective on first use, if the gloo group must be made.
    """
    if torch.device("cpu") in devices_of(group):
        return group
    if group not in _cpu_groups:
        choose_interface(os.environ.get("MASTER_ADDR"))
        made = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=timeout_of(group),
            backend="gloo",
            use_local_synchronization=True,  # ranks outside of ``group`` don't take part
        )
        assert isinstance(made, dist.ProcessGroup)
        _cpu_groups[group] = made
    return _cpu_groups[group]
