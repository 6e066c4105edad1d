"""Time gathering few bytes and summing many over the machines: what ``ddprun predict`` runs to know the network."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ddp_callbacks.process_group import join_process_group, leave_process_group
from ddp_callbacks.reporting.cost import SIZES
from ddp_callbacks.reporting.recorder import WAITING, recorder

_TIMES = 15


def main() -> None:
    """Tell the launcher the median seconds for each of :data:`SIZES`, as a setting of the report."""
    join_process_group()
    few, many = (torch.zeros(size // 4) for size in SIZES)
    parts = [few.clone() for _ in range(dist.get_world_size())]
    found = [_seconds(lambda: dist.all_gather(parts, few)), _seconds(lambda: dist.all_reduce(many))]
    if (own := recorder()) is not None:
        own.describe(torch.nn.Module(), {"sums": json.dumps(found)})
        for _ in range(2):  # it is sent when this ends, if any time has passed
            own.mark(WAITING)
    leave_process_group()


def _seconds(run: Callable[[], Any]) -> float:
    found = []
    for _ in range(_TIMES):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


if __name__ == "__main__":
    main()
