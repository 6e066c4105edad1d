"""An all-reduce between the nodes, one process each: the first prints its latency and bandwidth."""

from __future__ import annotations

import itertools
import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(seconds=8)
_BYTES = 4 << 20


def main() -> None:
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    latency, large = _median_time(1, times=100), _median_time(_BYTES // 4, times=10)
    if dist.get_rank() == 0:
        on_the_wire = 2 * (1 - 1 / dist.get_world_size()) * _BYTES  # bytes that each node sends in a ring
        print(f"{latency * 1e3:.2f} ms for one number, {on_the_wire / large / 1e6:.0f} MB/s per node", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _median_time(numel: int, times: int) -> float:
    """Median seconds for a sum of ``numel`` float32."""
    tensor, ends = torch.ones(numel), [time.perf_counter()]
    for _ in range(times):
        dist.all_reduce(tensor)
        ends.append(time.perf_counter())
    return statistics.median(end - begin for begin, end in itertools.pairwise(ends))


if __name__ == "__main__":
    main()
