"""Train a small network on handwritten digits, on one process or many.

    python train.py                                 one process
    ddprun --nproc-per-node 2 train.py              two processes on this machine
    ddprun -H node1,node2 train.py                  one on each of two machines

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
from torchbearer.callbacks import MostRecent

from ddp_callbacks import join_process_group
from ddp_callbacks.comm import all_gather_object
from ddp_callbacks.torchbearer import DDPCallback


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(0)
    train, test = load_digits()
    train_loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test, batch_size=args.batch_size)
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))

    trial = Trial(
        model,
        torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9),
        nn.CrossEntropyLoss(),
        metrics=["acc", "loss"],
        callbacks=[
            DDPCallback(),  # <- the added line
            *([MostRecent(args.checkpoint)] if args.checkpoint else []),
        ],
    )
    trial.to("cuda" if torch.cuda.is_available() else "cpu")
    trial.with_generators(train_generator=train_loader, val_generator=test_loader)
    if args.checkpoint and os.path.exists(args.checkpoint):
        trial.load_state_dict(torch.load(args.checkpoint, map_location="cpu", weights_only=False))
    history = trial.run(args.epochs, verbose=1)

    report(model, history[-1]["val_acc"], len(test))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=10, help="epochs in all, those of the checkpoint included")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per step, over all processes")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    parser.add_argument("--checkpoint", metavar="PATH", help="save to this file each epoch; go on from it if it exists")
    return parser.parse_args()


def load_digits() -> tuple[Any, Any]:
    """scikit-learn's 1797 handwritten digits of 8x8 pixels, which come with the package; 360 of them for the test."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    pixels = torch.tensor(bunch.data / 16, dtype=torch.float32)
    data = TensorDataset(pixels, torch.tensor(bunch.target))
    train, test = train_test_split(range(len(data)), test_size=360, random_state=0, stratify=bunch.target)
    return TensorDataset(*data[train]), TensorDataset(*data[test])


def report(model: nn.Module, accuracy: float, size: int) -> None:
    """The last line: do all processes hold the same parameters, and how good are they?"""
    parameters = torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])
    checksums = all_gather_object(f"{zlib.crc32(parameters.numpy().tobytes()):08x}", "the checksums")
    if len(set(checksums)) > 1:
        sys.exit(f"the processes hold different parameters: checksums {', '.join(checksums)}")
    if join_process_group().rank == 0:  # DDPCallback() has joined it; this says which of its processes this is
        who = f"{len(checksums)} processes hold equal parameters" if len(checksums) > 1 else "1 process"
        print(f"{who} (checksum {checksums[0]}); accuracy on {size} test digits: {accuracy:.3f}")


if __name__ == "__main__":
    main()
