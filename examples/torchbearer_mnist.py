"""Classify handwritten digits with Torchbearer on CPUs, on one process or many.

    python examples/torchbearer_mnist.py                              one process
    ddprun --nproc-per-node 2 examples/torchbearer_mnist.py           two processes on this machine
    ddprun -H node1,node2 examples/torchbearer_mnist.py               one on each of two machines

Or by hand, on each node with its own rank; ADDRESS is that of rank 0's node:

    python examples/torchbearer_mnist.py --world-size 2 --rank 0 --host ADDRESS
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial
from torchbearer.callbacks import Callback, CSVLogger

from ddp_callbacks import WorkerEnv, join_process_group
from ddp_callbacks.comm import all_gather_object
from ddp_callbacks.torchbearer import DDPCallback, Flatten


def main() -> None:
    args = parse_arguments()
    # Only for the start by hand, and to know the rank: DDPCallback() joins the processes of a launcher by itself.
    worker = join_process_group(args.rank, args.world_size, args.host, args.port)
    torch.manual_seed(0)
    train, test = load_mnist(args.root, worker) if args.data == "mnist" else load_digits()
    model = nn.Sequential(nn.Linear(train[0][0].numel(), 100), nn.ReLU(), nn.Linear(100, 10))
    writers: list[Callback] = [CSVLogger(args.csv)] if args.csv else []

    trial = Trial(
        model,
        torch.optim.SGD(model.parameters(), lr=args.lr),
        nn.CrossEntropyLoss(),
        metrics=["acc", "loss"],
        callbacks=[DDPCallback(), Flatten(), *writers],
    )
    trial.with_generators(
        train_generator=DataLoader(train, batch_size=args.batch_size, shuffle=True),
        val_generator=DataLoader(test, batch_size=args.batch_size),
    )
    history = trial.run(args.epochs, verbose=1)

    if worker.rank == 0:
        processes = f"{worker.world_size} process{'es' if worker.world_size > 1 else ''}"
        print(f"{processes}: accuracy {history[-1]['val_acc']:.3f} on {len(test)} test images")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Classify handwritten digits with Torchbearer.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=128, help="images per step, over all processes")
    parser.add_argument("--lr", type=float, default=0.5, help="learning rate")
    parser.add_argument("--data", choices=["digits", "mnist"], default="digits", help="scikit-learn's digits, or MNIST")
    parser.add_argument("--root", default="data", metavar="DIR", help="where MNIST is, or is downloaded to")
    parser.add_argument("--csv", metavar="PATH", help="write the metrics of each epoch to this CSV file")
    by_hand = parser.add_argument_group("start by hand", "the same on each node, except for --rank")
    by_hand.add_argument("--world-size", type=int, help="number of processes")
    by_hand.add_argument("--rank", type=int, help="number of this process, from 0")
    by_hand.add_argument("--host", metavar="ADDRESS", help="address of rank 0's node")
    by_hand.add_argument("--port", type=int, help="a free port there (default: 29500)")
    return parser.parse_args()


def load_digits() -> tuple[Any, Any]:
    """scikit-learn's 1797 images of 8x8 pixels, which come with the package; the last 360 are for the test."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images, digits = torch.tensor(bunch.images / 16, dtype=torch.float32), torch.tensor(bunch.target)
    return TensorDataset(images[:-360], digits[:-360]), TensorDataset(images[-360:], digits[-360:])


def load_mnist(root: str, worker: WorkerEnv) -> tuple[Any, Any]:
    """MNIST from ``root``, downloaded if it is not there."""
    try:
        from torchvision import datasets, transforms  # type: ignore[import-not-found,unused-ignore]
    except (ImportError, RuntimeError) as error:  # RuntimeError: it was built for another torch
        raise SystemExit(f"--data mnist needs torchvision, which cannot be imported here: {error}") from error

    # The mean and the standard deviation of MNIST's pixels.
    scale = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])

    def load(download: bool) -> tuple[Any, Any]:
        train, test = (datasets.MNIST(root, train=train, transform=scale, download=download) for train in (True, False))
        return train, test

    # One process of each node downloads what is missing, while the others wait.
    if worker.local_rank == 0:
        load(download=True)
    all_gather_object(None, "MNIST to be downloaded")
    return load(download=False)


if __name__ == "__main__":
    main()
