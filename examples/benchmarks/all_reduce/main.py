"""Time the sum of a float32 tensor over the ranks: ours, gloo, MPI, and the copy of as many bytes in memory.

    mpiexec -n 2 python examples/benchmarks/all_reduce/main.py        # one host, MPI too: pip install mpi4py mpich
    ddprun --nproc-per-node 2 examples/benchmarks/all_reduce/main.py  # one host
    ddprun -H h1:2,h2:2 examples/benchmarks/all_reduce/main.py        # several hosts

A round times one block of each way, one after another, in an order that rotates from round to round, so that whatever
else the machine does meets all of them alike. The ratio of a round is a way's block divided by the same round's block
of gloo; what is reported is the median of the ratios and their quartiles.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_callbacks import join_process_group, leave_process_group
from ddp_callbacks.comm.topology import choose_all_reduce
from ddp_callbacks.process_group import resolve_group

BASELINE = "gloo"
COPY = "copy in memory"
SIZES = {"1 KB": 1 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20, "25 MB": 25 << 20, "100 MB": 100 << 20}
Times = dict[str, list[float]]
Way = Callable[[], None]


def ways(nbytes: int) -> dict[str, Way]:
    """Each way, on a tensor of its own."""
    numel, cpu = nbytes // 4, torch.device("cpu")
    ours = choose_all_reduce(resolve_group(), [cpu])
    shared = ours.allocate(numel, torch.float32, cpu).zero_()
    sent, source, target = (torch.zeros(numel) for _ in range(3))

    def copy() -> None:
        target.copy_(source)

    found = {
        COPY: copy,
        "ours, in its memory": lambda: ours.launch(shared, "the benchmark").wait(),
        BASELINE: lambda: dist.all_reduce(sent),
    }
    return found | mpi(numel)


def mpi(numel: int) -> dict[str, Way]:
    """MPI's, where the processes were started by it."""
    started = any(name in os.environ for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK"))
    if not started or importlib.util.find_spec("mpi4py") is None:
        return {}
    from mpi4py import MPI

    buffer = torch.zeros(numel).numpy()
    return {"MPI": lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, buffer)}


def time_block(way: Way, calls: int) -> float:
    """Seconds per call."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        way()
    return (time.perf_counter() - start) / calls


def time_rounds(nbytes: int, rounds: int, block_seconds: float) -> Times:
    """Seconds per call of each way, one entry per round."""
    found = ways(nbytes)
    names = list(found)
    counts = {}
    for name, way in found.items():
        time_block(way, 3)
        count = torch.tensor(max(2, min(2000, int(block_seconds / time_block(way, 3)))))
        dist.broadcast(count, 0)
        counts[name] = int(count)
    times: Times = {name: [] for name in names}
    for index in range(rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            times[name].append(time_block(found[name], counts[name]))
    return times


def quartiles(values: list[float]) -> tuple[float, float, float]:
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, median, third


def ratios(own: list[float], base: list[float]) -> tuple[float, float, float]:
    return quartiles([one / other for one, other in zip(own, base, strict=True)])


def table(results: dict[str, Times]) -> str:
    """Medians, and ratios to gloo; to the copy as well."""
    lines = [
        "| bytes | way | median, ms | ratio to gloo, median (quartiles) | ratio to the copy, median |",
        "|---|---|---|---|---|",
    ]
    for size, times in results.items():
        for name, values in times.items():
            first, median, third = ratios(values, times[BASELINE])
            copies = ratios(values, times[COPY])[1]
            lines.append(
                f"| {size} | {name} | {statistics.median(values) * 1e3:.3f} "
                f"| **{median:.3f}** ({first:.3f} to {third:.3f}) | {copies:.1f} |"
            )
    return "\n".join(lines)


def plot(results: dict[str, Times], path: Path) -> None:
    """Milliseconds by size, both logarithmic, with the quartiles over the rounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.2))
    for name in next(iter(results.values())):
        points = [[1e3 * value for value in quartiles(times[name])] for times in results.values()]
        medians = [median for _, median, _ in points]
        spread = [[m - f for f, m, _ in points], [t - m for _, m, t in points]]
        style = ":" if name == COPY else "-"
        axes.errorbar(range(len(points)), medians, yerr=spread, label=name, marker="o", linestyle=style, capsize=3)
    axes.set_xticks(range(len(results)), list(results))
    axes.set_yscale("log")
    axes.set_ylabel("ms per sum; bars: quartiles over the rounds")
    axes.set_title(f"Sum of float32 over {dist.get_world_size()} ranks")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="blocks per way (default 20)")
    parser.add_argument("--block-seconds", type=float, default=0.1, help="about how long a block takes (default 0.1)")
    parser.add_argument("--plot", type=Path, help="where to draw the times")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    env = join_process_group()
    if env.world_size == 1:
        parser.error("start it on at least two processes")
    results = {}
    for size, nbytes in SIZES.items():
        results[size] = time_rounds(nbytes, arguments.rounds, arguments.block_seconds)
        if env.rank == 0:
            print(f"{size} done", flush=True)
    if env.rank == 0:
        print(table(results), flush=True)
        if arguments.plot:
            plot(results, arguments.plot)
    leave_process_group()


if __name__ == "__main__":
    main()
