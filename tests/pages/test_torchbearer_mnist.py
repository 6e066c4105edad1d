"""examples/torchbearer_mnist.py as a user starts it: by torchrun and by hand, with scikit-learn's digits."""

from __future__ import annotations

import csv
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.commands import TWO_PROCESSES, finish, run, run_by_hand, start
from kit.paths import ROOT
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ddp_callbacks.cluster.environment import WorkerEnv

SCRIPT = ROOT / "examples" / "torchbearer_mnist.py"


def logged(path: Path) -> list[dict[str, float]]:
    """The metrics of each epoch, without the running means, which only feed the progress bar."""
    with path.open() as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    return [{name: value for name, value in row.items() if not name.startswith("running_")} for row in rows]


def train_in_plain_torch(epochs: int) -> list[dict[str, float]]:
    """What the script does, in float64 and in a loop of torch alone."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        train, test = runpy.run_path(str(SCRIPT))["load_digits"]()
        model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        train_loader, test_loader = DataLoader(train, 128, shuffle=True), DataLoader(test, 128)
        rows = []
        for _ in range(epochs):
            acc, loss = go_through(model, train_loader, optimizer)
            val_acc, val_loss = go_through(model, test_loader)
            rows.append({"acc": acc, "loss": loss, "val_acc": val_acc, "val_loss": val_loss})
    return rows


def go_through(model: nn.Module, loader: DataLoader, optimizer: Any = None) -> tuple[float, float]:
    """An epoch; the accuracy, and the mean of the batches' losses, as Torchbearer's metric is."""
    losses, hits = [], []
    for images, digits in loader:
        logits = model(images.double().flatten(1))
        loss = F.cross_entropy(logits, digits)
        losses.append(loss.item())
        hits.append(logits.argmax(1) == digits)
        if optimizer:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return torch.cat(hits).double().mean().item(), sum(losses) / len(losses)


@pytest.mark.cold
def test_two_processes_by_torchrun_and_by_hand_equal_one_and_plain_torch(tmp_path: Path) -> None:
    """The example equals plain torch."""
    folders = {name: tmp_path / name for name in ("one", "torchrun", "rank 0", "rank 1")}
    for folder in folders.values():
        folder.mkdir()
    script = [SCRIPT, "--epochs", 3, "--csv", "log.csv"]

    with start(["python", *script], folders["one"], cold=True) as running:
        by_torchrun = run([*TWO_PROCESSES, *script], folders["torchrun"])
        alone = finish(running)
    by_hand, silent = run_by_hand(script, [folders["rank 0"], folders["rank 1"]])

    assert silent == "" and not list(folders["rank 1"].iterdir()), "rank 1 says and writes nothing"
    expected = train_in_plain_torch(3)
    for name in ("one", "torchrun", "rank 0"):
        epochs = [{key: epoch[key] for key in expected[0]} for epoch in logged(folders[name] / "log.csv")]
        assert epochs == [pytest.approx(epoch, rel=1e-5) for epoch in expected], name
    said = rf"accuracy {expected[-1]['val_acc']:.3f} on 360 test images"
    assert alone.splitlines()[-1] == f"1 process: {said}"
    assert by_torchrun.splitlines()[-1] == by_hand.splitlines()[-1] == f"2 processes: {said}"
    # How often a bar is drawn depends on the time; it begins once.
    assert [out.count("| 0/3 [") for out in (alone, by_torchrun)] == [1, 1], f"not one progress bar:\n{by_torchrun}"


def test_mnist_is_downloaded_once_and_read_or_torchvision_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads MNIST, or asks for torchvision."""
    load_mnist, asked = runpy.run_path(str(SCRIPT))["load_mnist"], []

    def mnist(root: str, train: bool, transform: Any, download: bool) -> tuple[str, bool]:
        asked.append((train, download))
        return root, train

    transforms = SimpleNamespace(Compose=list, ToTensor=lambda: None, Normalize=lambda *_: None)
    torchvision = SimpleNamespace(datasets=SimpleNamespace(MNIST=mnist), transforms=transforms)
    monkeypatch.setitem(sys.modules, "torchvision", torchvision)
    assert load_mnist("root", WorkerEnv()) == (("root", True), ("root", False))
    assert asked == [(True, True), (False, True), (True, False), (False, False)]
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(SystemExit, match="--data mnist needs torchvision, which cannot be imported here: "):
        load_mnist("root", WorkerEnv())
