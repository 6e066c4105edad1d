"""Send and receive between two processes, and what one can build of it by hand: sums of gradients, equal parameters.

    ddprun --nproc-per-node 2 point_to_point.py               # messages through gloo
    mpirun -n 2 python point_to_point.py --backend mpi4py     # through MPI: pip install mpi4py mpich

Three parts, each beside what ddp_callbacks does in its place:

1. Rank 0 sends a tensor to rank 1, and receives one.
2. Each process computes the gradient of its part of a batch. What is the sum of these, and how does it train?
3. Rank 0 gives its parameters to all: by a send to each, or by a broadcast. How long do they take?
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ddp_callbacks import (
    GradientSynchronizer,
    broadcast_parameters,
    join_process_group,
    leave_process_group,
    slice_bounds,
)

BATCH = 64
STEPS = 50
PARAMETERS = 16  # of the model that is given to all
Backward = Callable[[], None]  # leaves gradients in the model
Way = tuple[int, str]  # a number of processes, and the name of a synchronization
Times = dict[Way, list[float]]  # seconds, one entry for each round


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    worker = join_process_group(backend=args.backend)
    if worker.world_size == 1:
        raise SystemExit("start it on at least two processes: ddprun --nproc-per-node 2 point_to_point.py")
    exchange()
    compare_gradients(args.lr)
    compare_synchronizations(args)
    leave_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", help="gloo, or mpi4py under mpirun (default: what join_process_group takes)")
    parser.add_argument("--lr", type=float, default=0.5, help="learning rate of part 2")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.0625, 1, 16], help="of the parameters, part 3")
    parser.add_argument("--rounds", type=int, default=10, help="blocks of each way in part 3")
    parser.add_argument("--block-seconds", type=float, default=0.1, help="about how long a block takes")
    parser.add_argument("--plot", type=Path, help="where to draw the times of part 3")
    return parser.parse_args()


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


# --- 1. a message -----------------------------------------------------------------------------------------------------


def exchange() -> None:
    """Rank 0 sends a tensor to rank 1, which sends back its double. The other ranks do nothing."""
    received = torch.zeros(2)
    if dist.get_rank() == 0:
        sent = torch.tensor([1.0, -1.0])
        dist.send(sent, dst=1)
        dist.recv(received, src=1)
        say(f"rank 0 has sent {sent.tolist()} to rank 1, and received {received.tolist()}")
    elif dist.get_rank() == 1:
        dist.recv(received, src=0)
        dist.send(2 * received, dst=0)


# --- 2. the sum of the gradients --------------------------------------------------------------------------------------


class Digits:
    """The first of scikit-learn's digits, and this process's part of them."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        self.images = torch.tensor(bunch.images[:BATCH] / 16).flatten(1)
        self.targets = torch.tensor(bunch.target[:BATCH])
        start, end = slice_bounds(BATCH, dist.get_rank(), dist.get_world_size())
        self.part = slice(start, end)
        self.size = end - start

    def loss(self, model: nn.Module, part: slice = slice(None), reduction: str = "mean") -> torch.Tensor:
        return F.cross_entropy(model(self.images[part]), self.targets[part], reduction=reduction)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()


def on_one_process(model: nn.Module, digits: Digits, reduction: str = "mean") -> Backward:
    return lambda: digits.loss(model, reduction=reduction).backward()


def summed_by_hand(model: nn.Module, digits: Digits) -> Backward:
    def backward() -> None:
        digits.loss(model, digits.part).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)

    return backward


def averaged_by_hand(model: nn.Module, digits: Digits) -> Backward:
    summed = summed_by_hand(model, digits)

    def backward() -> None:
        summed()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= dist.get_world_size()

    return backward


def synchronized(model: nn.Module, digits: Digits) -> Backward:
    synchronizer = GradientSynchronizer(model)
    synchronizer.weigh(digits.size, BATCH)
    return lambda: digits.loss(model, digits.part).backward()


def synchronized_sum(model: nn.Module, digits: Digits) -> Backward:
    """Of a loss that is a sum over the samples: each process counts once. So does DDPCallback(reduction="sum")."""
    synchronizer = GradientSynchronizer(model)
    synchronizer.weigh(1, 1)
    return lambda: digits.loss(model, digits.part, "sum").backward()


def gradient(backward_of: Callable[..., Backward], digits: Digits, *options: Any) -> torch.Tensor:
    model = make_model()
    backward_of(model, digits, *options)()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def train(backward_of: Callable[..., Backward], digits: Digits, lr: float) -> float:
    """The loss of the whole batch after some steps."""
    model = make_model()
    optimizer, backward = torch.optim.SGD(model.parameters(), lr=lr), backward_of(model, digits)
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward()
        optimizer.step()
    return digits.loss(model).item()


def compare_gradients(lr: float) -> None:
    digits, processes = Digits(), dist.get_world_size()
    say(f"\ngradient of {BATCH} digits on {processes} processes, beside that of one process   length   difference")
    for name, way, reduction in (
        ("mean loss, summed by hand", summed_by_hand, "mean"),
        (f"mean loss, summed by hand and divided by {processes}", averaged_by_hand, "mean"),
        ("mean loss, GradientSynchronizer", synchronized, "mean"),
        ("sum loss, GradientSynchronizer", synchronized_sum, "sum"),
    ):
        found, alone = gradient(way, digits), gradient(on_one_process, digits, reduction)
        length, difference = found.norm() / alone.norm(), (found - alone).norm() / alone.norm()
        say(f"  {name:<66} {length:9.6f}   {difference:10.1e}")

    say(f"\nloss after {STEPS} steps of SGD")
    for name, way, rate in (
        (f"one process, lr {lr:g}", on_one_process, lr),
        (f"{processes} processes, GradientSynchronizer, lr {lr:g}", synchronized, lr),
        (f"{processes} processes, summed by hand, lr {lr:g}", summed_by_hand, lr),
        (f"one process, lr {processes * lr:g}", on_one_process, processes * lr),
    ):
        say(f"  {name:<66} {train(way, digits, rate):9.6f}")


# --- 3. equal parameters ----------------------------------------------------------------------------------------------

Group = dist.ProcessGroup
Groups = dict[int, Group]  # by number of processes
Synchronization = Callable[[nn.Module, Group], None]


def send_to_each(model: nn.Module, group: Group) -> None:
    """Rank 0 sends each parameter to each other rank of the group, one after another."""
    for parameter in model.parameters():
        if dist.get_rank() == 0:
            for other in range(1, group.size()):
                dist.send(parameter.data, dst=other, group=group)
        else:
            dist.recv(parameter.data, src=0, group=group)


def broadcast_each(model: nn.Module, group: Group) -> None:
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0, group=group)


SYNCHRONIZATIONS: dict[str, Synchronization] = {
    "send and recv": send_to_each,
    "broadcast of each": broadcast_each,
    "broadcast_parameters": broadcast_parameters,
}
BASELINE = "broadcast of each"


def make_parameters(megabytes: float) -> nn.Module:
    """Equal ones, different on each rank."""
    size = max(1, int(megabytes * 2**20 / 4 / PARAMETERS))
    return nn.ParameterList(torch.full((size,), float(dist.get_rank())) for _ in range(PARAMETERS))


def check(synchronization: Synchronization, group: Group) -> None:
    """Raise unless it makes the ranks' parameters rank 0's."""
    model = make_parameters(0.001)
    synchronization(model, group)
    assert all(parameter.eq(0).all() for parameter in model.parameters()), "not rank 0's"


def time_block(way: Way, model: nn.Module, groups: Groups, calls: int) -> float:
    """Seconds per call until all members have the parameters. All ranks must call it, also those outside the group."""
    size, name = way
    dist.barrier()
    if dist.get_rank() >= size:
        return 0.0
    start = time.perf_counter()
    for _ in range(calls):
        SYNCHRONIZATIONS[name](model, groups[size])
    dist.barrier(groups[size])
    return (time.perf_counter() - start) / calls


def count_calls(way: Way, model: nn.Module, groups: Groups, block_seconds: float) -> int:
    """How many fill a block, as rank 0 finds."""
    seconds = time_block(way, model, groups, 2)
    calls = torch.tensor(max(1, min(1000, int(block_seconds / seconds))) if seconds else 1)
    dist.broadcast(calls, 0)
    return int(calls)


def time_rounds(megabytes: float, groups: Groups, args: argparse.Namespace) -> Times:
    """A round times one block of each, in an order that rotates, so that what else the machine does meets all alike."""
    model = make_parameters(megabytes)
    ways = list(itertools.product(groups, SYNCHRONIZATIONS))
    calls = {way: count_calls(way, model, groups, args.block_seconds) for way in ways}
    times: Times = {way: [] for way in ways}
    for index in range(args.rounds):
        first = index % len(ways)
        for way in ways[first:] + ways[:first]:
            times[way].append(time_block(way, model, groups, calls[way]))
    return times


def compare_synchronizations(args: argparse.Namespace) -> None:
    groups = {size: first_ranks(size) for size in range(2, dist.get_world_size() + 1)}
    for synchronization in SYNCHRONIZATIONS.values():
        check(synchronization, groups[dist.get_world_size()])
    results = {}
    say(f"\nrank 0's {PARAMETERS} parameters for all: ms, median of {args.rounds} blocks (quartiles)")
    say(f"{'MB':>7}  {'processes':>9}  {'way':<22}  {'ms':<28}  times broadcast of each")
    for megabytes in args.megabytes:
        results[megabytes] = times = time_rounds(megabytes, groups, args)
        if dist.get_rank() == 0:
            print_times(megabytes, times)
    if args.plot and dist.get_rank() == 0:
        plot(results, args.plot)


def print_times(megabytes: float, times: Times) -> None:
    for (size, name), values in times.items():
        low, median, high = (1e3 * value for value in quartiles(values))
        ratio = statistics.median(own / base for own, base in zip(values, times[size, BASELINE], strict=True))
        spread = f"{median:.2f} ({low:.2f} to {high:.2f})"
        print(f"{megabytes:7g}  {size:9d}  {name:<22}  {spread:<28}  {ratio:.2f}", flush=True)


def first_ranks(size: int) -> Group:
    """A group of them; all ranks must call it."""
    if size < dist.get_world_size():
        group: Group = dist.new_group(list(range(size)))
        return group
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def quartiles(values: list[float]) -> tuple[float, float, float]:
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, median, third


def plot(results: dict[float, Times], path: Path) -> None:
    """By the number of processes, a panel for each size; the bars are quartiles over the rounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(results), figsize=(3.4 * len(results), 3.4), squeeze=False, layout="constrained"
    )
    for panel, (megabytes, times) in zip(panels[0], results.items(), strict=True):
        sizes = sorted({size for size, _ in times})
        for name in SYNCHRONIZATIONS:
            points = [[1e3 * value for value in quartiles(times[size, name])] for size in sizes]
            spread = [[m - f for f, m, _ in points], [t - m for _, m, t in points]]
            panel.errorbar(sizes, [m for _, m, _ in points], yerr=spread, label=name, marker="o", capsize=3)
        panel.set_title(f"{megabytes:g} MB")
        panel.set_xlabel("processes")
        panel.set_xticks(sizes)
        panel.set_ylim(bottom=0)
        panel.grid(axis="y", alpha=0.3)
    panels[0][0].set_ylabel("ms until all have the parameters")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=len(results))
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
