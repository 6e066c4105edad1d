"""Train a small network on handwritten digits in a plain PyTorch loop that starts its own processes.

    python spawn_resume.py                                     one process
    python spawn_resume.py --nproc-per-node 2                  two processes of this machine, the same numbers
    python spawn_resume.py --checkpoint digits.pt              goes on from that file if it exists

    on each of two nodes, with i = 0 on the one that has ADDRESS, and 1 on the other:
    python spawn_resume.py --nnodes 2 --node-rank i --nproc-per-node 2 --init-method tcp://ADDRESS:PORT

There is no host framework here: the loop calls ddp_callbacks itself.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import zlib
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ddp_callbacks import (
    GradientSynchronizer,
    WorkerEnv,
    broadcast_parameters,
    join_process_group,
    shard_loader,
    slice_bounds,
    spawn,
    with_shares,
    write_atomically,
)
from ddp_callbacks.comm import all_gather_object, all_reduce, require_agreement

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def main() -> None:
    args = parse_arguments()
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts, in the processes
    spawn(
        train,
        args.nproc_per_node,
        (args,),
        nnodes=args.nnodes,
        node_rank=args.node_rank,
        init_method=args.init_method,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on handwritten digits, in processes that this script starts.")
    parser.add_argument("--epochs", type=int, default=4, help="epochs in all, those of the checkpoint included")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per step, over all processes")
    parser.add_argument("--workers", type=int, default=0, help="loader workers of this node, over its processes")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate; halved after every second epoch")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the images and the parameters")
    parser.add_argument("--seed", type=int, default=0, help="of the parameters and of the order of the samples")
    parser.add_argument("--deterministic", action="store_true", help="take deterministic algorithms alone")
    parser.add_argument("--checkpoint", metavar="PATH", help="save to this file each epoch; go on from it if it exists")
    nodes = parser.add_argument_group("nodes", "the same on each, except for --node-rank")
    nodes.add_argument("--nnodes", type=int, default=1, help="number of nodes")
    nodes.add_argument("--node-rank", type=int, default=0, help="number of this node, from 0")
    nodes.add_argument(
        "--nproc-per-node",
        type=int,
        default=max(1, torch.cuda.device_count()),
        help="processes of each node (default: one for each GPU, else one)",
    )
    nodes.add_argument(
        "--init-method",
        default="env://",
        help="where to meet: env:// (MASTER_ADDR and MASTER_PORT), tcp://ADDRESS:PORT of node 0, or file:///PATH",
    )
    return parser.parse_args()


def train(args: argparse.Namespace) -> None:
    """What each process runs."""
    worker = join_process_group()  # spawn has joined already; this says which process it is
    device = torch.device("cuda", worker.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    introduce(worker, device, args)
    torch.use_deterministic_algorithms(args.deterministic)  # on GPUs cuDNN's convolutions, too

    torch.manual_seed(args.seed)
    train_loader, test_loader = (shard_loader(loader) for loader in make_loaders(args))
    model = make_model().to(device, DTYPES[args.dtype])
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}

    done = load_checkpoint(args.checkpoint, parts, device)
    broadcast_parameters(model)
    synchronizer = GradientSynchronizer(model)
    for epoch in range(done, args.epochs):
        seed_epoch(args.seed, epoch, worker.rank)
        loss = train_epoch(model, train_loader, optimizer, synchronizer)
        schedule.step()
        if worker.rank == 0:
            print(f"epoch {epoch + 1}: loss {loss:.12f}", flush=True)
            save_checkpoint(args.checkpoint, parts, epoch + 1)
    report(model, evaluate(model, test_loader), worker)


def introduce(worker: WorkerEnv, device: torch.device, args: argparse.Namespace) -> None:
    start, end = slice_bounds(args.batch_size, worker.rank, worker.world_size)
    who = f"rank {worker.rank} of {worker.world_size}: process {worker.local_rank} of node {args.node_rank}"
    # In one piece: the processes print side by side.
    print(f"{who}, on {device}, {end - start} of {args.batch_size} samples per step\n", end="", flush=True)


def make_loaders(args: argparse.Namespace) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """scikit-learn's 1797 handwritten digits of 8x8 pixels, which come with the package; 360 of them for the test."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.tensor(bunch.images / 16, dtype=DTYPES[args.dtype]).unsqueeze(1)
    targets = torch.tensor(bunch.target)
    test = torch.arange(len(targets)) % 5 == 0
    workers = -(-args.workers // args.nproc_per_node)  # of each process; the batch is divided by shard_loader
    options: dict[str, Any] = {"batch_size": args.batch_size, "num_workers": workers}
    return (
        DataLoader(TensorDataset(images[~test], targets[~test]), shuffle=True, **options),
        DataLoader(TensorDataset(images[test], targets[test]), **options),
    )


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 4 * 4, 10)
    )


def seed_epoch(seed: int, epoch: int, rank: int) -> None:
    """Seed by the epoch, so that a run that goes on draws what it would have drawn; each process something else.

    The order of the samples is drawn from rank 0's, on every number of processes.
    """
    number = random.Random(f"{seed} {epoch} {rank}").getrandbits(32)
    random.seed(number)
    torch.manual_seed(number)  # of all GPUs, too


def train_epoch(
    model: nn.Module, loader: Any, optimizer: torch.optim.Optimizer, synchronizer: GradientSynchronizer
) -> float:
    """One pass; the mean loss of all samples of all processes."""
    sums = torch.zeros(2, dtype=torch.float64)  # of the losses, and of the samples
    device = next(model.parameters()).device
    for (images, targets), share in with_shares(loader):
        synchronizer.weigh(share.local, share.total)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(device)), targets.to(device))
        loss.backward()  # when it returns, the gradients are those of the whole batch
        optimizer.step()
        sums += torch.tensor([loss.item() * share.local, share.local], dtype=torch.float64)
    all_reduce(sums, "the loss of the epoch")
    return float(sums[0] / sums[1])


@torch.no_grad()
def evaluate(model: nn.Module, loader: Any) -> tuple[int, int]:
    """The number of digits that were recognized, and of all, over all processes."""
    counts = torch.zeros(2, dtype=torch.float64)
    device = next(model.parameters()).device
    for (images, targets), share in with_shares(loader):
        right = (model(images.to(device)).argmax(1) == targets.to(device))[: share.local]
        counts += torch.tensor([right.sum().item(), share.local], dtype=torch.float64)
    all_reduce(counts, "the accuracy")
    return int(counts[0]), int(counts[1])


def load_checkpoint(path: str | None, parts: dict[str, Any], device: torch.device) -> int:
    """Load ``parts`` on this process, onto its own device; the number of epochs that they have been trained for."""
    done = 0
    if path and os.path.exists(path):
        state = torch.load(path, map_location=device)  # else all processes would put a copy on cuda:0
        for name, part in parts.items():
            part.load_state_dict(state[name])
        done = state["epochs"]
    remedy = "Let the processes of all nodes see the file, or none."
    require_agreement({"epochs of the checkpoint": done}, f"the checkpoint {path}", remedy)
    return done


def save_checkpoint(path: str | None, parts: dict[str, Any], epochs: int) -> None:
    """For rank 0 alone. A process that is killed while it writes leaves the last checkpoint as it is."""
    if path:
        state = {name: part.state_dict() for name, part in parts.items()} | {"epochs": epochs}
        write_atomically(path, lambda temporary: torch.save(state, temporary))


def report(model: nn.Module, counts: tuple[int, int], worker: WorkerEnv) -> None:
    """The last line: do all processes hold the same parameters, and how good are they?"""
    parameters = torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])
    checksums = all_gather_object(f"{zlib.crc32(parameters.numpy().tobytes()):08x}", "the checksums")
    if len(set(checksums)) > 1:
        sys.exit(f"the processes hold different parameters: checksums {', '.join(checksums)}")
    if worker.rank == 0:
        who = f"{len(checksums)} processes hold equal parameters" if len(checksums) > 1 else "1 process"
        right, samples = counts
        print(f"{who} (checksum {checksums[0]}); {right} of {samples} test digits recognized")


if __name__ == "__main__":
    main()
