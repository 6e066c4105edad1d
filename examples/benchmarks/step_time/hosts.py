"""Time a training step over several hosts, with several processes on each: DDP, ours, ours in half precision.

    ddprun -H h1:2,h2:2 examples/benchmarks/step_time/hosts.py

Interleaved as in ``main.py``. To see it on one Linux machine, as root, with links of a given rate::

    python tests/kit/hosts.py --rate 200mbit 2 ddprun -H h1:2,h2:2 examples/benchmarks/step_time/hosts.py
"""

from __future__ import annotations

import argparse
import copy
import os
from pathlib import Path

import torch
import torch.distributed as dist
from main import BASELINE, WORKLOADS, Batch, Step, make_step, plot, summary, table, time_rounds
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_callbacks import GradientSynchronizer, join_process_group, leave_process_group
from ddp_callbacks.gradients.compression import Compress


def step_of_ours(model: nn.Module, batch: Batch, compress: Compress = None) -> Step:
    synchronizer = GradientSynchronizer(model, compress=compress)
    step, samples = make_step(model, batch), len(batch[0])

    def weighed_step() -> None:
        synchronizer.weigh(samples, samples * dist.get_world_size())
        step()

    return weighed_step


def ways(model: nn.Module, batch: Batch) -> dict[str, Step]:
    """Each way to synchronize, on a copy of ``model`` of its own."""
    copies = [copy.deepcopy(model) for _ in range(4)]
    return {
        "no sync": make_step(copies.pop(), batch),
        BASELINE: make_step(DistributedDataParallel(copies.pop()), batch),
        "ours": step_of_ours(copies.pop(), batch),
        "ours, bf16": step_of_ours(copies.pop(), batch, "bf16"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="blocks per way (default 10)")
    parser.add_argument("--block-seconds", type=float, default=4.0, help="about how long a block takes (default 4)")
    parser.add_argument("--plot", type=Path, help="where to draw the ratios")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    env = join_process_group()
    workload = next(workload for workload in WORKLOADS if workload.name == "MLP, 5.8 M")
    results = {workload.name: time_rounds(workload, arguments.rounds, arguments.block_seconds, ways)}
    if env.rank == 0:
        print(table(summary(results)), flush=True)
        if arguments.plot:
            plot(summary(results), arguments.plot, dist.get_world_size())
    leave_process_group()


if __name__ == "__main__":
    main()
