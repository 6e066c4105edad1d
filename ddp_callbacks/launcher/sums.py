"""Time the sums of few and of many gradients over all ranks: what ``ddprun predict`` runs to know the network."""

from __future__ import annotations

import json
import statistics
import time

import torch
from torch import nn

from ddp_callbacks.gradients import GradientSynchronizer
from ddp_callbacks.process_group import join_process_group, leave_process_group
from ddp_callbacks.reporting.cost import SIZES
from ddp_callbacks.reporting.recorder import recorder

_TIMES = 15


def main() -> None:
    """Tell the launcher the median seconds for each of :data:`SIZES`, as a setting of the report."""
    join_process_group()
    found = [_seconds(size) for size in SIZES]
    if (own := recorder()) is not None:
        own.describe(nn.Module(), {"sums": json.dumps(found)})  # sent when this ends
    leave_process_group()


def _seconds(nbytes: int) -> float:
    module = nn.ParameterList([nn.Parameter(torch.zeros(nbytes // 4))])
    synchronizer, found = GradientSynchronizer(module), []
    for _ in range(_TIMES):
        begin = time.perf_counter()
        module[0].sum().backward()
        found.append(time.perf_counter() - begin)
    synchronizer.close()
    return statistics.median(found)


if __name__ == "__main__":
    main()
