"""The digits examples as a user starts them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.commands import DEADLINE, TWO_PROCESSES, finish, run, start
from kit.paths import ROOT, TESTS

TRIAL, FABRIC = (ROOT / "examples" / name / "train.py" for name in ("digits", "digits_fabric"))
LINES = {
    TRIAL: r"(.+) \(checksum [0-9a-f]{8}\); accuracy on 360 test digits: (\d\.\d{3})",
    FABRIC: r"(.+): accuracy (\d\.\d{3}), loss (\d+\.\d{4}) on 360 digits",
}


def told(script: Path, output: str) -> tuple[str, list[float]]:
    """What one line tells of the processes, and the figures in it."""
    found = re.findall(f"^{LINES[script]}", output, re.MULTILINE)
    assert len(found) == 1, output
    return found[0][0], [float(figure) for figure in found[0][1:]]


def run_both(folder: Path, alone: list[Any], two: list[Any], epochs: int) -> list[str]:
    """What one process prints and what two print, each with a checkpoint of its own."""
    options = ["--epochs", epochs, "--checkpoint"]
    with start([*alone, *options, "alone.pt"], folder, cold=epochs == 2) as running_alone:
        output = run([*two, *options, "two.pt"], folder)
        return [finish(running_alone), output]


def swap(folder: Path) -> None:
    """Let each go on where the other one was."""
    for old, new in (("alone.pt", "of one"), ("two.pt", "alone.pt"), ("of one", "two.pt")):
        (folder / old).rename(folder / new)


def checkpoint(path: Path) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
    """The history and the parameters of a saved Trial, without the running means, which only feed the progress bar."""
    state = torch.load(path, weights_only=False)  # names the classes of the callbacks, none of them the script's own
    history = [{key: epoch[key] for key in epoch if not key.startswith("running_")} for epoch in state["history"]]
    return history, list(state["model"].values())


@pytest.mark.cold
def test_digits_by_torchrun_equal_python_and_go_on_at_another_size(tmp_path: Path) -> None:
    """One added line trains the digits as `python` does."""
    ways = (["python", TRIAL], [*TWO_PROCESSES, TRIAL])
    alone, two = run_both(tmp_path, *ways, 2)
    expected = told(TRIAL, alone)
    assert expected[0] == "1 process" and told(TRIAL, two) == ("2 processes hold equal parameters", expected[1])
    # How often a bar is drawn depends on the time; it begins once.
    assert [out.count("| 0/2 [") for out in (alone, two)] == [1, 1], f"not one progress bar:\n{two}"
    swap(tmp_path)
    assert told(TRIAL, run_both(tmp_path, *ways, 3)[1])[0] == "2 processes hold equal parameters"
    (history, parameters), (expected_history, others) = (
        checkpoint(tmp_path / f"{name}.pt") for name in ("two", "alone")
    )
    assert len(history) == 3
    assert history == [pytest.approx(epoch, rel=1e-5) for epoch in expected_history]
    torch.testing.assert_close(parameters, others, rtol=1e-4, atol=1e-5)


@pytest.mark.cold
def test_digits_with_fabric_equal_one_process_and_go_on_at_another_size(tmp_path: Path) -> None:
    one = ["python", "-W", "ignore", FABRIC, "--strategy", "auto"]
    ways = (one, ["ddprun", "--nproc-per-node", 2, FABRIC])
    expected, found = (told(FABRIC, output) for output in run_both(tmp_path, *ways, 2))
    assert expected[0] == "1 process" and found[0].endswith("2 processes")
    assert found[1] == pytest.approx(expected[1], abs=2e-4)
    swap(tmp_path)
    alone, two = run_both(tmp_path, *ways, 3)
    assert "epoch 2" in two and "epoch 1" not in two
    assert told(FABRIC, two)[1] == pytest.approx(told(FABRIC, alone)[1], abs=1e-3)


def test_hosts_for_the_benchmarks_need_neither_pytest_nor_torch() -> None:
    command = [sys.executable, "-S", "-c", "import kit.costs, kit.hosts, kit.wire"]  # -S: without installed packages
    subprocess.run(command, cwd=TESTS, check=True, timeout=DEADLINE)


@pytest.mark.cold
def test_the_losses_with_dropout_augmentation_and_batchnorm_do_not_depend_on_the_number(tmp_path: Path) -> None:
    command = [ROOT / "examples" / "any_number.py", "--epochs", 1, "--folder"]
    with start(["python", *command, "1"], tmp_path, cold=True) as alone:
        run([*TWO_PROCESSES, *command, "2"], tmp_path)
        finish(alone)
    losses = [(tmp_path / name / "metrics.csv").read_text().split() for name in "12"]
    assert len(losses[0]) == 37 and losses[0][0] == losses[1][0] == "epoch,loss,step"
    one, two = (torch.tensor([float(row.split(",")[1]) for row in each[1:]], dtype=torch.float64) for each in losses)
    torch.testing.assert_close(one, two, rtol=0, atol=1e-12)
