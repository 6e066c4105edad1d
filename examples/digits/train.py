"""Train a small network on handwritten digits, on one process or many.

    python train.py                                               one process
    ddprun --nproc-per-node 2 train.py                            two processes on this machine
    ddprun -H node1,node2 train.py                                one on each of two machines
    python train.py --world-size 2 --rank 0 --host 10.0.0.1       by hand, on each node with its own rank

The script is an ordinary Torchbearer script; ``DDPCallback()`` is what makes it run on many processes.
"""

from __future__ import annotations

import argparse
import os
import sys
import zlib
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchbearer import Trial
from torchbearer.callbacks import Callback, MostRecent, TensorBoard

from ddp_callbacks import WorkerEnv, join_process_group
from ddp_callbacks.collectives import all_gather_json
from ddp_callbacks.torchbearer import DDPCallback, Flatten


def main() -> None:
    args = parse_arguments()
    # Only for the start by hand, and to know the rank: DDPCallback() joins torchrun's processes by itself.
    worker = join_process_group(args.rank, args.world_size, args.host, args.port)
    torch.manual_seed(0)
    train, test = load_mnist(args.root, worker) if args.data == "mnist" else load_digits()
    train_loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test, batch_size=args.batch_size)
    model = nn.Sequential(nn.Linear(train[0][0].numel(), 100), nn.ReLU(), nn.Linear(100, 10))

    trial = Trial(
        model,
        torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9),
        nn.CrossEntropyLoss(),
        metrics=["acc", "loss"],
        callbacks=[
            DDPCallback(),  # <- the added line
            Flatten(),
            *writers(args),
        ],
    )
    trial.to("cuda" if torch.cuda.is_available() else "cpu")
    trial.with_generators(train_generator=train_loader, val_generator=test_loader)
    if args.checkpoint and os.path.exists(args.checkpoint):
        trial.load_state_dict(torch.load(args.checkpoint, map_location="cpu", weights_only=False))
    history = trial.run(args.epochs, verbose=1)

    report(model, history[-1]["val_acc"], len(test), worker)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=10, help="epochs in all, those of the checkpoint included")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per step, over all processes")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    parser.add_argument("--data", choices=["digits", "mnist"], default="digits", help="scikit-learn's digits, or MNIST")
    parser.add_argument("--root", default="data", metavar="DIR", help="where MNIST is, or is downloaded to")
    parser.add_argument("--checkpoint", metavar="PATH", help="save to this file each epoch; go on from it if it exists")
    parser.add_argument("--tensorboard", metavar="DIR", help="write the metrics of each epoch for TensorBoard")
    by_hand = parser.add_argument_group("start by hand", "the same on each node, except for --rank")
    by_hand.add_argument("--world-size", type=int, help="number of processes")
    by_hand.add_argument("--rank", type=int, help="number of this process, from 0")
    by_hand.add_argument("--host", metavar="ADDRESS", help="address of rank 0's node")
    by_hand.add_argument("--port", type=int, help="a free port there (default: 29500)")
    return parser.parse_args()


def load_digits() -> tuple[Any, Any]:
    """scikit-learn's 1797 handwritten digits of 8x8 pixels, which come with the package; 360 of them for the test."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    images = torch.tensor(bunch.images / 16, dtype=torch.float32)
    data = TensorDataset(images, torch.tensor(bunch.target))
    train, test = train_test_split(range(len(data)), test_size=360, random_state=0, stratify=bunch.target)
    return TensorDataset(*data[train]), TensorDataset(*data[test])


def load_mnist(root: str, worker: WorkerEnv) -> tuple[Any, Any]:
    """MNIST from ``root``, downloaded if it is not there."""
    try:
        from torchvision import datasets, transforms  # type: ignore[import-not-found,unused-ignore]
    except (ImportError, RuntimeError) as error:  # RuntimeError: it was built for another torch
        raise SystemExit(f"--data mnist needs torchvision, which cannot be imported here: {error}") from error

    def load(download: bool) -> tuple[Any, Any]:
        train, test = (
            datasets.MNIST(root, train=train, transform=transforms.ToTensor(), download=download)
            for train in (True, False)
        )
        return train, test

    # One process of each node downloads what is missing, while the others wait.
    if worker.local_rank == 0:
        load(download=True)
    all_gather_json(None, "MNIST to be downloaded")
    return load(download=False)


def writers(args: argparse.Namespace) -> list[Callback]:
    """Written by rank 0 alone: DDPCallback sees to it."""
    chosen: list[Callback] = []
    if args.checkpoint:
        chosen.append(MostRecent(args.checkpoint))
    if args.tensorboard:
        chosen.append(TorchTensorBoard(args.tensorboard, write_graph=False, comment="digits"))
    return chosen


class TorchTensorBoard(TensorBoard):  # type: ignore[misc]
    """Torchbearer's callback, writing through ``torch.utils.tensorboard`` instead of tensorboardX."""

    def get_writer(self, log_dir: str | None = None, visdom: bool = False, visdom_params: Any = None) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(log_dir or self.log_dir)
        return self.writer

    def close_writer(self, log_dir: str | None = None) -> None:
        self.writer.close()


def report(model: nn.Module, accuracy: float, size: int, worker: WorkerEnv) -> None:
    """The last line: do all processes hold the same parameters, and how good are they?"""
    parameters = torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])
    checksums = all_gather_json(f"{zlib.crc32(parameters.numpy().tobytes()):08x}", "the checksums")
    if len(set(checksums)) > 1:
        sys.exit(f"the processes hold different parameters: checksums {', '.join(checksums)}")
    if worker.rank == 0:
        who = f"{len(checksums)} processes hold equal parameters" if len(checksums) > 1 else "1 process"
        print(f"{who} (checksum {checksums[0]}); accuracy on {size} test digits: {accuracy:.3f}")


if __name__ == "__main__":
    main()
