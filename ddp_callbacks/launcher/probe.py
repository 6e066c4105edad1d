"""Sums between the nodes, one process each: the first prints latency and bandwidth, and tells ``ddprun`` the seconds.

``ddprun doctor`` and ``ddprun predict`` run this.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist

from ddp_callbacks.reporting.cost import SIZES
from ddp_callbacks.reporting.recorder import WAITING, recorder

_TIMEOUT = timedelta(seconds=8)
_TIMES = 15


def main() -> None:
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    few, many = (torch.zeros(size // 4) for size in SIZES)
    parts = [few.clone() for _ in range(dist.get_world_size())]
    found = [_seconds(lambda: dist.all_gather(parts, few)), _seconds(lambda: dist.all_reduce(many))]
    if dist.get_rank() == 0:
        on_the_wire = 2 * (1 - 1 / dist.get_world_size()) * SIZES[1]  # bytes that each node sends in a ring
        print(f"{found[0] * 1e3:.2f} ms for 1 KiB, {on_the_wire / found[1] / 1e6:.0f} MB/s per node", flush=True)
    if (own := recorder()) is not None:
        own.describe(torch.nn.Module(), {"sums": json.dumps(found)})
        for _ in range(2):  # it is sent when this ends, if any time has passed
            own.mark(WAITING)
    dist.barrier()
    dist.destroy_process_group()


def _seconds(run: Callable[[], object]) -> float:
    """Return the median time of a call."""
    ends = [time.perf_counter()]
    for _ in range(_TIMES):
        run()
        ends.append(time.perf_counter())
    return statistics.median(end - begin for begin, end in pairwise(ends))


if __name__ == "__main__":
    main()
