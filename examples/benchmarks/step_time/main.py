"""Time a training step under several ways to synchronize gradients, interleaved in one run.

    torchrun --standalone --nproc-per-node 2 examples/benchmarks/step_time/main.py
    torchrun --standalone --nproc-per-node 2 examples/benchmarks/step_time/main.py --device cuda
    python examples/benchmarks/step_time/main.py --device cuda      # one process, DDP in a group of one

Every way has its own copy of the model. A round times one block of steps of each way, one after another, in an order
that rotates from round to round, so that whatever else the machine does meets all of them alike. The ratio of a round
is a way's block divided by the same round's DDP block; what is reported is the median of the ratios and their
quartiles. Absolute times mean little on a shared machine.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_callbacks import GradientSynchronizer, join_process_group, leave_process_group

BASELINE = "DDP"
CPU = torch.device("cpu")
Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[], None]
Summary = dict[str, dict[str, list[float]]]


class GRUClassifier(nn.Module):
    """A bidirectional three-layer GRU over a sequence, and a linear layer on its last output."""

    def __init__(self, features: int = 32, hidden: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.gru = nn.GRU(features, hidden, num_layers=3, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(x)[0][:, -1])


def mlp(*sizes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for first, second in itertools.pairwise(sizes):
        layers += [nn.Linear(first, second), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convolutional() -> nn.Module:
    channels = [1, 16, 32, 64]
    layers: list[nn.Module] = []
    for first, second in itertools.pairwise(channels):
        layers += [nn.Conv2d(first, second, 3, padding=1, bias=False), nn.BatchNorm2d(second), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], 10))


@dataclass(frozen=True)
class Workload:
    """A model, the shape of one sample, and the number of samples per process."""

    name: str
    build: Callable[[], nn.Module]
    sample: tuple[int, ...]
    batch: int


WORKLOADS = [
    Workload("MLP, 80 k", lambda: mlp(784, 100, 10), (784,), 32),
    Workload("MLP, 5.8 M", lambda: mlp(784, 1600, 1600, 1200, 10), (784,), 32),
    Workload("GRU, bidirectional", GRUClassifier, (16, 32), 16),
    Workload("conv + BatchNorm", convolutional, (1, 16, 16), 16),
]


def make_step(model: nn.Module, batch: Batch, after_backward: Callable[[], None] = lambda: None) -> Step:
    """One ordinary training step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = batch

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        after_backward()
        optimizer.step()

    return step


def average_each_parameter(model: nn.Module) -> None:
    """By hand: one blocking all-reduce per parameter after backward."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def ways(model: nn.Module, batch: Batch) -> dict[str, Step]:
    """Each way to synchronize, on a copy of ``model`` of its own."""
    alone, afterwards, ours = (copy.deepcopy(model) for _ in range(3))
    ddp = DistributedDataParallel(copy.deepcopy(model))
    as_view = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=True)
    synchronizer = GradientSynchronizer(ours)
    step_ours, samples = make_step(ours, batch), len(batch[0])

    def weighed_step() -> None:
        synchronizer.weigh(samples, samples * dist.get_world_size())
        step_ours()

    return {
        "no sync": make_step(alone, batch),
        "per parameter, afterwards": make_step(afterwards, batch, lambda: average_each_parameter(afterwards)),
        BASELINE: make_step(ddp, batch),
        "DDP, bucket view": make_step(as_view, batch),
        "ours": weighed_step,
    }


def time_block(step: Step, steps: int, device: torch.device) -> float:
    """Seconds per step."""
    meet(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    meet(device)
    return (time.perf_counter() - start) / steps


def meet(device: torch.device) -> None:
    """Wait for all processes and what they have given to their GPUs."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # NCCL's barrier runs on the GPU


def time_rounds(
    workload: Workload,
    rounds: int,
    block_seconds: float,
    ways: Callable[[nn.Module, Batch], dict[str, Step]] = ways,
    device: torch.device = CPU,
) -> dict[str, list[float]]:
    """Seconds per step of each way, one entry per round."""
    torch.manual_seed(0)
    model = workload.build().to(device)
    torch.manual_seed(dist.get_rank())
    inputs, targets = torch.randn(workload.batch, *workload.sample), torch.randint(0, 10, (workload.batch,))
    steps = ways(model, (inputs.to(device), targets.to(device)))
    for step in steps.values():
        time_block(step, 5, device)
    count = torch.tensor(max(3, int(block_seconds / time_block(steps[BASELINE], 10, device))), device=device)
    dist.broadcast(count, 0)
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            times[name].append(time_block(steps[name], int(count), device))
    return times


def quartiles(values: list[float]) -> tuple[float, float, float]:
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, median, third


def ratios(times: dict[str, list[float]]) -> dict[str, tuple[float, float, float]]:
    """Per way, the quartiles over the rounds of its time divided by DDP's of the same round."""
    return {
        name: quartiles([own / base for own, base in zip(values, times[BASELINE], strict=True)])
        for name, values in times.items()
    }


def summary(results: dict[str, dict[str, list[float]]]) -> Summary:
    """By model and way: the median step in ms, and the quartiles of its ratio to DDP, as tables show them."""
    found: Summary = {}
    for model, times in results.items():
        steps = {name: statistics.median(values) * 1e3 for name, values in times.items()}
        found[model] = {name: [round(each, 2) for each in (steps[name], *own)] for name, own in ratios(times).items()}
    return found


def table(found: Summary) -> str:
    lines = ["| model | way | median step, ms | ratio to DDP, median | quartiles |", "|---|---|---|---|---|"]
    for model, ways in found.items():
        for name, (step, first, median, third) in ways.items():
            lines.append(f"| {model} | {name} | {step:.2f} | **{median:.2f}** | {first:.2f} to {third:.2f} |")
    return "\n".join(lines)


def plot(found: Summary, path: Path, processes: int) -> None:
    """Ratios to DDP, one panel per model. A PNG says which figures it shows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (3.4 * len(found), 3.2)
    figure, (panels,) = pyplot.subplots(1, len(found), figsize=size, sharey=True, squeeze=False)
    for panel, (model, ways) in zip(panels, found.items(), strict=True):
        for row, (name, (_, first, median, third)) in enumerate(ways.items()):
            color = "tab:orange" if name == "ours" else "tab:blue"
            panel.barh(row, median, color=color, alpha=0.85)
            panel.plot([first, third], [row, row], color="black", linewidth=2)
        panel.axvline(1.0, color="gray", linestyle="--", linewidth=1)
        panel.set_yticks(range(len(ways)), list(ways))
        panel.set_title(model)
        panel.set_xlabel("step time / DDP")
    panels[0].invert_yaxis()  # and with it all of them, which share it
    figure.suptitle(f"{processes} processes; black: quartiles over the rounds", y=1.02)
    figure.savefig(path, dpi=150, bbox_inches="tight", metadata={"Description": json.dumps(found)})


def join(device: str, backend: str | None) -> tuple[int, torch.device]:
    """This process's rank, and the device to compute on. One process alone gets a group of one, for DDP."""
    env = join_process_group(device=CPU if device == "cpu" else None, backend=backend)
    where = CPU if device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    if env.world_size == 1:
        default = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend or default, store=dist.HashStore(), rank=0, world_size=1)
    return env.rank, where


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="blocks per way (default 40)")
    parser.add_argument("--block-seconds", type=float, default=0.3, help="about how long a block takes (default 0.3)")
    parser.add_argument("--plot", type=Path, help="where to draw the ratios; step_time.png, to show them in README.md")
    parser.add_argument("--json", type=Path, help="where to write what is drawn; step_time.json, with that figure")
    parser.add_argument("--draw", type=Path, help="draw the figures of such a file, and measure nothing")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to compute (default cpu)")
    parser.add_argument("--backend", help="of the process group; by gloo, processes share a GPU")
    arguments = parser.parse_args()
    if arguments.draw:
        plot(json.loads(arguments.draw.read_text()), arguments.plot or arguments.draw.with_suffix(".png"), 2)
        return
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rank, device = join(arguments.device, arguments.backend)
    if device == CPU and dist.get_world_size() == 1:
        parser.error("start it with torchrun, on at least two processes")
    results = {}
    for workload in WORKLOADS:
        times = time_rounds(workload, arguments.rounds, arguments.block_seconds, device=device)
        results[workload.name] = times
        if rank == 0:
            print(table(summary({workload.name: times})), flush=True)
    if rank == 0:
        found = summary(results)
        print(f"\n{table(found)}")
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
        if arguments.plot:
            plot(found, arguments.plot, dist.get_world_size())
    leave_process_group()


if __name__ == "__main__":
    main()
