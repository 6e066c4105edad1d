"""The digits example as a user starts it."""

from __future__ import annotations

import importlib.machinery
import os
import re
import runpy
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TWO_PROCESSES, finish, run, run_by_hand, start
from sklearn.datasets import load_digits
from torch.nn import functional as F

from ddp_callbacks import WorkerEnv

ROOT = Path(__file__).parents[1]
TRAIN = ROOT / "examples" / "digits" / "train.py"
WITH_TORCHVISION = ROOT / "tests" / "with_torchvision.py"
LAST_LINE = re.compile(r"(.+) \(checksum ([0-9a-f]{8})\); accuracy on (\d+) test digits: (\d\.\d{3})")


def last_line(output: str) -> tuple[str, int, float]:
    """Who holds the parameters, the number of test digits, and the accuracy."""
    match = LAST_LINE.fullmatch(output.strip().splitlines()[-1])
    assert match, output
    return match[1], int(match[3]), float(match[4])


def load_checkpoint(path: Path) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    """The history and the parameters of a saved Trial."""
    state = torch.load(path, weights_only=False)  # names the classes of the callbacks, none of them the script's own
    return [dict(epoch) for epoch in state["history"]], list(state["model"].values())


def assert_equal_checkpoints(one: Path, other: Path, epochs: int) -> None:
    """Equal to float32's rounding, except for the running means, which only feed the progress bar."""
    (history, parameters), (other_history, other_parameters) = load_checkpoint(one), load_checkpoint(other)
    assert len(history) == len(other_history) == epochs
    for epoch, other_epoch in zip(history, other_history, strict=True):
        keys = [key for key in epoch if not key.startswith("running_")]
        assert {key: epoch[key] for key in keys} == pytest.approx({key: other_epoch[key] for key in keys}, rel=1e-5)
    torch.testing.assert_close(parameters, other_parameters, rtol=1e-4, atol=1e-5)


def test_digits_by_torchrun_equals_python_and_goes_on_by_hand(tmp_path: Path) -> None:
    alone = [sys.executable, TRAIN, "--checkpoint", "alone.pt"]
    two = [TRAIN, "--checkpoint", "two.pt"]

    with start([*alone, "--epochs", 2], tmp_path) as running_alone:
        output = run([*TWO_PROCESSES, *two, "--epochs", 2, "--tensorboard", "runs"], tmp_path)
        output_alone = finish(running_alone)

    assert last_line(output) == ("2 processes hold equal parameters", *last_line(output_alone)[1:])
    assert last_line(output_alone)[:2] == ("1 process", 360)
    assert output.count("2/2 [") == output_alone.count("2/2 ["), f"more than one progress bar:\n{output}"
    assert len([path for path in (tmp_path / "runs").rglob("*") if path.is_file()]) == 1

    # Both go on where they were, the second with two processes started by hand, of which only rank 0 has the file.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with start([*alone, "--epochs", 3], tmp_path) as running_alone:
        outputs = run_by_hand([*two, "--epochs", 3], [tmp_path, elsewhere])
        finish(running_alone)
    assert last_line(outputs[0])[0] == "2 processes hold equal parameters"
    assert outputs[1] == "" and not list(elsewhere.iterdir()), "rank 1 must be silent"
    assert_equal_checkpoints(tmp_path / "alone.pt", tmp_path / "two.pt", epochs=3)


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
    places = [os.environ.get("TORCHVISION_PATH", ""), *sys.path]
    if importlib.machinery.PathFinder.find_spec("torchvision", places) is None:
        pytest.skip("torchvision is neither installed nor in the folder TORCHVISION_PATH")
    write_mnist(tmp_path / "root")
    script = [WITH_TORCHVISION, TRAIN, "--data", "mnist", "--root", "root", "--epochs", 1]
    output, _ = run_by_hand(script, [tmp_path, tmp_path])
    assert last_line(output)[:2] == ("2 processes hold equal parameters", 32)


def test_mnist_without_torchvision_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    load_mnist = runpy.run_path(str(TRAIN))["load_mnist"]
    with pytest.raises(SystemExit, match="--data mnist needs torchvision, which cannot be imported here: "):
        load_mnist(str(tmp_path), WorkerEnv())
