"""examples/torchbearer_mnist.py as a user starts it: by torchrun and by hand, with scikit-learn's digits and MNIST."""

from __future__ import annotations

import csv
import importlib.machinery
import os
import re
import runpy
import struct
import sys
from pathlib import Path

import pytest
import torch
from kit.commands import TWO_PROCESSES, finish, run, run_by_hand, start
from kit.paths import ROOT
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ddp_callbacks import WorkerEnv

SCRIPT = ROOT / "examples" / "torchbearer_mnist.py"
WITH_TORCHVISION = Path(__file__).with_name("with_torchvision.py")


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
        return [train_epoch(model, optimizer, train_loader) | evaluate(model, test_loader) for _ in range(epochs)]


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> dict[str, float]:
    losses, hits = [], []
    for images, digits in loader:
        logits = model(images.double().flatten(1))
        optimizer.zero_grad()
        F.cross_entropy(logits, digits).backward()
        optimizer.step()
        losses.append(F.cross_entropy(logits, digits).item())  # Torchbearer's metric is the mean over the batches
        hits.append(logits.argmax(1) == digits)
    return {"acc": torch.cat(hits).double().mean().item(), "loss": sum(losses) / len(losses)}


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> dict[str, float]:
    batches = [(model(images.double().flatten(1)), digits) for images, digits in loader]
    losses = [F.cross_entropy(logits, digits).item() for logits, digits in batches]
    hits = torch.cat([logits.argmax(1) == digits for logits, digits in batches])
    return {"val_acc": hits.double().mean().item(), "val_loss": sum(losses) / len(losses)}


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


def write_idx(path: Path, values: torch.Tensor) -> None:
    """Write bytes in the format of MNIST's files: a magic number with type and dimensions, the sizes, the values."""
    header = struct.pack(f">BBBB{values.dim()}I", 0, 0, 8, values.dim(), *values.shape)
    path.write_bytes(header + bytes(values.to(torch.uint8).flatten().tolist()))


def write_mnist(root: Path) -> None:
    """64 and 32 of scikit-learn's digits in place of MNIST's."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] * (255 / 16)
    images = F.interpolate(images[:96], size=(28, 28), mode="bilinear")[:, 0].round()
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name, part in (("train", slice(0, 64)), ("t10k", slice(64, 96))):
        write_idx(folder / f"{name}-images-idx3-ubyte", images[part])
        write_idx(folder / f"{name}-labels-idx1-ubyte", torch.tensor(bunch.target[part]))


def test_mnist_is_read_by_torchvision(tmp_path: Path) -> None:
    """It reads MNIST, or asks for torchvision."""
    places = [os.environ.get("TORCHVISION_PATH", ""), *sys.path]
    if importlib.machinery.PathFinder.find_spec("torchvision", places) is None:
        pytest.skip("torchvision is neither installed nor in the folder TORCHVISION_PATH")
    write_mnist(tmp_path / "root")
    script = [WITH_TORCHVISION, SCRIPT, "--data", "mnist", "--root", "root", "--epochs", 1]
    output, _ = run_by_hand(script, [tmp_path, tmp_path])
    assert re.fullmatch(r"2 processes: accuracy 0\.\d{3} on 32 test images", output.splitlines()[-1])


def test_mnist_without_torchvision_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    load_mnist = runpy.run_path(str(SCRIPT))["load_mnist"]
    with pytest.raises(SystemExit, match="--data mnist needs torchvision, which cannot be imported here: "):
        load_mnist(str(tmp_path), WorkerEnv())
