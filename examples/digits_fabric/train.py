"""Train the digits with a loop of Lightning Fabric, on one process or many.

    python train.py                                    one process
    ddprun --nproc-per-node 2 train.py                 two processes on this machine
    ddprun -H node1,node2 train.py                     one on each of two machines

Two lines differ from the script for one process: the import, and the name of the strategy.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ddp_callbacks.lightning  # noqa: F401  <- the first added line


def network() -> nn.Module:
    """A convolutional network for images of 8x8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def digits() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's 1797 handwritten digits, which come with the package; 360 of them for the validation."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    images = torch.tensor(bunch.images / 16, dtype=torch.float32)[:, None]
    data = TensorDataset(images, torch.tensor(bunch.target))
    train, test = train_test_split(range(len(data)), test_size=360, random_state=0, stratify=bunch.target)
    return TensorDataset(*data[train]), TensorDataset(*data[test])


@torch.no_grad()
def evaluate(fabric: Fabric, model: Any, loader: Any) -> tuple[float, float]:
    """Accuracy and mean loss over all samples. torchmetrics merge what the processes have seen."""
    accuracy = torchmetrics.Accuracy("multiclass", num_classes=10).to(fabric.device)
    loss = torchmetrics.MeanMetric().to(fabric.device)
    model.eval()
    for images, labels in loader:
        logits = model(images)
        accuracy.update(logits, labels)
        loss.update(nn.functional.cross_entropy(logits, labels), len(labels))
    model.train()
    return accuracy.compute().item(), loss.compute().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=6, help="epochs in all (default 6)")
    parser.add_argument("--checkpoint", default="digits.pt", metavar="FILE", help="go on from it, if it is there")
    parser.add_argument("--strategy", default="ddp_callbacks", help="another of Fabric's, to compare")
    arguments = parser.parse_args()

    fabric = Fabric(strategy=arguments.strategy)  # <- the second: strategy="ddp_callbacks"
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    model: Any = network()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.01))
    train, test = digits()
    train_loader, test_loader = fabric.setup_dataloaders(
        DataLoader(train, batch_size=64, shuffle=True), DataLoader(test, batch_size=64)
    )
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    if Path(arguments.checkpoint).exists():
        fabric.load(arguments.checkpoint, state)

    accuracy, loss = evaluate(fabric, model, test_loader)
    for epoch in range(state["epoch"], arguments.epochs):
        fabric.seed_everything(epoch, verbose=False)  # the order of the data, also after a restart
        for images, labels in train_loader:
            fabric.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
        accuracy, loss = evaluate(fabric, model, test_loader)
        fabric.print(f"epoch {epoch}: accuracy {accuracy:.3f}, loss {loss:.4f}")
        state["epoch"] = epoch + 1
        fabric.save(arguments.checkpoint, state)

    processes = f"{fabric.world_size} process{'es' if fabric.world_size > 1 else ''}"
    if fabric.is_global_zero:
        print(f"{processes}: accuracy {accuracy:.3f}, loss {loss:.4f} on 360 digits")


if __name__ == "__main__":
    main()
