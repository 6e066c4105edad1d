"""Train on a slow network in several ways, interleaved in one run: speed, accuracy and bytes sent.

    ddprun -H h1,h2 examples/benchmarks/local_sgd/main.py

A convolutional network learns scikit-learn's bundled digits, with AdamW in every process: by exact synchronization of
the gradients, by local SGD, by DiLoCo, also with bf16 on the wire, and without any synchronization. Every way has its
own copy of the model and sees the same batches. A round times one block of steps of each way, one after another, in an
order that rotates from round to round, so that whatever else the machines do meets all of them alike. A ratio divides
the time of the block without synchronization by that of another way's block in the same round; a block ends with a
closed window.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

from ddp_callbacks import (
    DiLoCo,
    GradientSynchronizer,
    LocalSGD,
    ParameterAverager,
    join_process_group,
    leave_process_group,
)

ALONE, EXACT = "no synchronization", "every_step"
EVERY = 50  # steps in a window of DiLoCo
TEST = 500  # samples
Batch = tuple[torch.Tensor, torch.Tensor]


def digits() -> tuple[Batch, Batch]:
    """Images of shape ``[samples, 1, 8, 8]`` and classes, to train and to test, in an order of our own."""
    images, targets = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x = torch.from_numpy(images).float().view(-1, 1, 8, 8)[order] / 16 - 0.3
    y = torch.from_numpy(targets)[order]
    return (x[TEST:], y[TEST:]), (x[:TEST], y[:TEST])


def network() -> nn.Module:
    """224 thousand parameters (0.9 MB), which one core takes about as long to compute as 100 Mbit/s to send."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(128, 128, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


@dataclass
class Way:
    """A copy of the model, and how it is trained. Times in seconds per step, bytes that this host sent per step."""

    model: nn.Module
    weigh: Callable[[int, int], None] = lambda own, total: None
    after_step: Callable[[int], None] = lambda own: None
    end_block: Callable[[], None] = lambda: None
    times: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)

    def step(self, part: Batch, total: int) -> None:
        own = len(part[0])
        self.weigh(own, total)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(part[0]), part[1]).backward()
        self.optimizer.step()
        self.after_step(own)


def ways(seed: int) -> dict[str, Way]:
    """The same model for each."""
    torch.manual_seed(seed)
    model = network()
    made = {ALONE: Way(copy.deepcopy(model)), EXACT: Way(copy.deepcopy(model))}
    made[EXACT].weigh = GradientSynchronizer(made[EXACT].model).weigh
    for sync, compress in ((LocalSGD(every=8), None), (DiLoCo(every=EVERY), None), (DiLoCo(every=EVERY), "bf16")):
        name = f"{type(sync).__name__}(every={sync.every})" + (f", {compress}" if compress else "")
        way = made[name] = Way(copy.deepcopy(model))
        averager = ParameterAverager(way.model, sync, way.optimizer, compress=compress)
        way.after_step, way.end_block = averager.step, averager.outer_step
    return made


def batches(data: Batch, size: int, seed: int, round_index: int) -> list[Batch]:
    """This rank's parts of the batches of a round, the same for every way."""
    random = torch.Generator().manual_seed(1000 * seed + round_index)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    drawn = [torch.randint(0, len(data[0]), (size,), generator=random) for _ in range(EVERY)]
    own = [indices.tensor_split(world_size)[rank] for indices in drawn]
    return [(data[0][indices], data[1][indices]) for indices in own]


def time_block(way: Way, parts: list[Batch], total: int) -> None:
    dist.barrier()
    sent, start = bytes_sent(), time.perf_counter()
    for part in parts:
        way.step(part, total)
    way.end_block()
    taken = torch.tensor(time.perf_counter() - start)
    way.sent.append((bytes_sent() - sent) / len(parts))
    dist.all_reduce(taken, dist.ReduceOp.MAX)  # the slowest rank's
    way.times.append(float(taken) / len(parts))


def bytes_sent() -> int:
    """By this host, over all its network devices but the loopback one (over that too, where it has no other)."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    counts = {line.partition(":")[0].strip(): int(line.partition(":")[2].split()[8]) for line in lines}
    outside = [count for name, count in counts.items() if name != "lo"]
    return sum(outside) or counts.get("lo", 0)


@torch.no_grad()
def accuracy(model: nn.Module, data: Batch) -> float:
    """In percent. Without synchronization, rank 0's."""
    model.eval()
    right = (model(data[0]).argmax(1) == data[1]).double().mean().item() * 100
    model.train()
    return right


def quartiles(values: list[float]) -> tuple[float, float, float]:
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, median, third


@dataclass
class Result:
    """Of one way, over all seeds."""

    times: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)


def train_all(seed: int, arguments: argparse.Namespace, results: dict[str, Result]) -> None:
    train, test = digits()
    made = ways(seed)
    names = list(made)
    for index in range(arguments.rounds):
        parts = batches(train, arguments.batch, seed, index)
        for name in names[index % len(names) :] + names[: index % len(names)]:
            time_block(made[name], parts, arguments.batch)
    for name, way in made.items():
        result = results.setdefault(name, Result())
        result.times += way.times
        result.sent += way.sent
        result.accuracies.append(accuracy(way.model, test))


def speeds(results: dict[str, Result]) -> dict[str, tuple[float, float, float]]:
    """Steps per second relative to no synchronization, quartiles over the rounds."""
    base = results[ALONE].times
    return {
        name: quartiles([alone / own for alone, own in zip(base, result.times, strict=True)])
        for name, result in results.items()
    }


def table(results: dict[str, Result]) -> str:
    head = (
        "| way | median step, ms | relative steps per second, median | quartiles | accuracy, % | spread | KB per step |"
    )
    lines = [head, "|---|---|---|---|---|---|---|"]
    for name, (first, median, third) in speeds(results).items():
        result = results[name]
        step = f"{statistics.median(result.times) * 1e3:.1f} | **{median:.3f}** | {first:.3f} to {third:.3f}"
        spread = f"{min(result.accuracies):.1f} to {max(result.accuracies):.1f}"
        right = f"**{statistics.mean(result.accuracies):.2f}** | {spread}"
        lines.append(f"| {name} | {step} | {right} | {statistics.mean(result.sent) / 1e3:.1f} |")
    return "\n".join(lines)


def plot(results: dict[str, Result], path: Path) -> None:
    """Speed, accuracy and bytes, a panel each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(12, 2.8), sharey=True, layout="constrained")
    rows = range(len(results))
    for row, (first, median, third) in enumerate(speeds(results).values()):
        panels[0].barh(row, median, color="tab:blue", alpha=0.85)
        panels[0].plot([first, third], [row, row], color="black", linewidth=2)
    panels[0].axvline(0.95, color="gray", linestyle="--", linewidth=1)
    panels[0].set_xlabel("steps per second / those alone\n(black: quartiles, dashed: 0.95)")
    for row, result in enumerate(results.values()):
        panels[1].plot(result.accuracies, [row] * len(result.accuracies), "o", color="tab:orange", alpha=0.7)
    panels[1].set_xlabel("accuracy on the test set, %\n(one point per seed)")
    panels[2].barh(rows, [max(statistics.mean(r.sent) / 1e3, 0.1) for r in results.values()], color="tab:green")
    panels[2].set_xscale("log")
    panels[2].set_xlabel("KB that a host sends per step")
    panels[0].set_yticks(rows, list(results))
    panels[0].invert_yaxis()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help=f"blocks of {EVERY} steps per way and seed (default 8)")
    parser.add_argument("--seeds", type=int, default=3, help="how often everything is trained (default 3)")
    parser.add_argument("--batch", type=int, default=64, help="samples of a step, over all processes (default 64)")
    parser.add_argument("--plot", type=Path, help="where to draw it; local_sgd.png, to show it in README.md")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # A model that has learned its data makes denormal numbers, with which processors are slow; the ways come to that
    # after different numbers of steps.
    torch.set_flush_denormal(True)
    env = join_process_group()
    if env.world_size == 1:
        parser.error("start it on at least two processes")
    results: dict[str, Result] = {}
    for seed in range(arguments.seeds):
        train_all(seed, arguments, results)
        if env.rank == 0:
            print(f"{seed + 1} of {arguments.seeds} seeds\n{table(results)}", flush=True)
    if env.rank == 0 and arguments.plot:
        plot(results, arguments.plot)
    leave_process_group()


if __name__ == "__main__":
    main()
