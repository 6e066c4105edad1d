"""An all-reduce between the nodes, one process each: the first prints its latency and bandwidth."""

from __future__ import annotations

import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(seconds=8)
_BYTES = 4 << 20
_TIME = 1.0  # seconds for each measurement


def main() -> None:
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    latency, large = _median_time(1), _median_time(_BYTES // 4)
    if rank == 0:
        on_the_wire = 2 * (world_size - 1) / world_size * _BYTES  # bytes that each node sends in a ring
        print(f"{latency * 1e3:.2f} ms for one number, {on_the_wire / large / 1e6:.0f} MB/s per node", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _median_time(numbers: int) -> float:
    """Median seconds for a sum of ``numel`` float32; rank 0 decides the number of repetitions."""
    tensor, times = torch.ones(numbers), []
    go_on, end = torch.ones(1), time.monotonic() + _TIME
    while go_on.item():
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - begin)
        tensor.fill_(1.0)
        go_on.fill_(float(time.monotonic() < end))
        dist.broadcast(go_on, 0)
    return statistics.median(times)


if __name__ == "__main__":
    main()
