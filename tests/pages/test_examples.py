"""The digits example as a user starts it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.commands import TWO_PROCESSES, finish, run, start
from kit.paths import ROOT

TRAIN = ROOT / "examples" / "digits" / "train.py"
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


@pytest.mark.cold
def test_digits_by_torchrun_equal_python_and_go_on_at_another_size(tmp_path: Path) -> None:
    """One added line trains the digits as `python` does."""
    alone = ["python", TRAIN, "--checkpoint", "alone.pt"]
    two = [*TWO_PROCESSES, TRAIN, "--checkpoint", "two.pt"]

    with start([*alone, "--epochs", 2], tmp_path, cold=True) as running_alone:
        output = run([*two, "--epochs", 2], tmp_path)
        output_alone = finish(running_alone)

    assert last_line(output) == ("2 processes hold equal parameters", *last_line(output_alone)[1:])
    assert last_line(output_alone)[:2] == ("1 process", 360)
    # How often a bar is drawn depends on the time; it begins once.
    assert [out.count("| 0/2 [") for out in (output_alone, output)] == [1, 1], f"not one progress bar:\n{output}"

    # Each goes on where the other one was.
    (tmp_path / "alone.pt").rename(tmp_path / "of one")
    (tmp_path / "two.pt").rename(tmp_path / "alone.pt")
    (tmp_path / "of one").rename(tmp_path / "two.pt")
    with start([*alone, "--epochs", 3], tmp_path) as running_alone:
        output = run([*two, "--epochs", 3], tmp_path)
        finish(running_alone)
    assert last_line(output)[0] == "2 processes hold equal parameters"
    assert_equal_checkpoints(tmp_path / "alone.pt", tmp_path / "two.pt", epochs=3)


FABRIC = ROOT / "examples" / "digits_fabric" / "train.py"
FABRIC_LINE = re.compile(r"(\d) process(?:es)?: accuracy (\d\.\d{3}), loss (\d+\.\d{4}) on 360 digits")


def fabric_line(output: str) -> tuple[int, float, float]:
    """The number of processes, the accuracy and the loss."""
    match = FABRIC_LINE.search(output)
    assert match, output
    return int(match[1]), float(match[2]), float(match[3])


@pytest.mark.cold
def test_digits_with_fabric_equal_one_process_and_go_on_at_another_size(tmp_path: Path) -> None:
    alone = ["python", "-W", "ignore", FABRIC, "--checkpoint", "alone.pt", "--epochs"]
    two = ["ddprun", "--nproc-per-node", 2, FABRIC, "--checkpoint", "two.pt", "--epochs"]
    with start([*alone, 2, "--strategy", "auto"], tmp_path, cold=True) as running_alone:
        output = run([*two, 2], tmp_path)
        expected = fabric_line(finish(running_alone))
    processes, *found = fabric_line(output)
    assert (expected[0], processes) == (1, 2)
    assert found == pytest.approx(expected[1:], abs=2e-4)

    (tmp_path / "two.pt").rename(tmp_path / "of two")
    (tmp_path / "alone.pt").rename(tmp_path / "two.pt")
    (tmp_path / "of two").rename(tmp_path / "alone.pt")
    with start([*alone, 3], tmp_path) as running_alone:
        output = run([*two, 3], tmp_path)
        expected = fabric_line(finish(running_alone))
    assert "epoch 2" in output and "epoch 1" not in output
    assert fabric_line(output)[1:] == pytest.approx(expected[1:], abs=1e-3)
