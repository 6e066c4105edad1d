"""The example of messages between two processes, as a user starts it."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from kit.commands import DEADLINE, TWO_PROCESSES, run, start
from kit.paths import ROOT
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

SCRIPT = ROOT / "examples" / "point_to_point.py"
SHORT = [SCRIPT, "--megabytes", 0.01, "--rounds", 3, "--block-seconds", 0.001]
MPICH = shutil.which("mpiexec", path=str(Path(sys.executable).parent))  # which pip puts beside Python
GRADIENT = re.compile(r"^  (.+?) +(\d+\.\d{6}) +(\d\.\de[-+]\d\d)$", re.MULTILINE)
LOSS = re.compile(r"^  (.+), lr (\S+) +(\d+\.\d{6})$", re.MULTILINE)
TIME = re.compile(r"^ +0.01 +(\d) +(\S.+?) +\d+\.\d+ \(\d+\.\d+ to \d+\.\d+\) +(\d+\.\d+)$", re.MULTILINE)
EXACT = 1e-14  # float64, sums in another order


def loss_of_one_process(lr: float) -> float:
    bunch = load_digits()
    images, targets = torch.tensor(bunch.images[:64] / 16).flatten(1), torch.tensor(bunch.target[:64])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
    for _ in range(50):
        model.zero_grad()
        F.cross_entropy(model(images), targets).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= lr * parameter.grad
    return F.cross_entropy(model(images), targets).item()


def assert_numbers(output: str, processes: int, lr: float) -> None:
    """The message, the gradients, and what is trained with them."""
    assert "rank 0 has sent [1.0, -1.0] to rank 1, and received [2.0, -2.0]\n" in output
    gradients = {name: (float(length), float(difference)) for name, length, difference in GRADIENT.findall(output)}
    names = [
        "mean loss, summed by hand",
        f"mean loss, summed by hand and divided by {processes}",
        "mean loss, GradientSynchronizer",
        "sum loss, GradientSynchronizer",
    ]
    assert list(gradients) == names
    summed, averaged, *ours = (gradients[name] for name in names)
    assert summed == pytest.approx((processes, processes - 1), rel=0.05)
    # 64 digits are divided evenly by two; the mean of means over 22, 21 and 21 digits is another gradient
    assert averaged[1] < EXACT if processes == 2 else 1e-3 < averaged[1] < 0.1
    assert all(length == 1 and difference < EXACT for length, difference in ours)

    losses = {(name, float(rate)): float(loss) for name, rate, loss in LOSS.findall(output)}
    expected = {rate: pytest.approx(loss_of_one_process(rate), abs=1e-6) for rate in (lr, processes * lr)}
    assert losses["one process", lr] == losses[f"{processes} processes, GradientSynchronizer", lr] == expected[lr]
    assert losses["one process", processes * lr] == expected[processes * lr]
    if processes == 2:
        assert losses["2 processes, summed by hand", lr] == expected[2 * lr]


def assert_times(output: str, processes: int) -> None:
    ways = ["send and recv", "broadcast of each", "broadcast_parameters"]
    rows = TIME.findall(output)
    assert [(int(size), way) for size, way, _ in rows] == [
        (size, way) for size in range(2, processes + 1) for way in ways
    ]
    assert [ratio for _, way, ratio in rows if way == "broadcast of each"] == ["1.00"] * (processes - 1)


@pytest.mark.cold
def test_two_processes(tmp_path: Path) -> None:
    """Sums by hand are N times the gradient; `GradientSynchronizer` is exact."""
    output = run([*TWO_PROCESSES, *SHORT, "--lr", 0.25, "--plot", "times.png"], tmp_path, cold=True)
    assert_numbers(output, 2, 0.25)
    assert_times(output, 2)
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.wide
def test_three_processes_by_ddprun(tmp_path: Path) -> None:
    output = run(["ddprun", "--no-prefix", "--nproc-per-node", 3, *SHORT], tmp_path)
    assert_numbers(output, 3, 0.5)
    assert_times(output, 3)


@pytest.mark.mpi
@pytest.mark.skipif(MPICH is None, reason="there is no mpiexec beside Python: pip install mpich")
def test_two_processes_over_mpi(tmp_path: Path) -> None:
    output = run([MPICH, "-n", 2, "python", *SHORT, "--backend", "mpi4py"], tmp_path)
    assert_numbers(output, 2, 0.5)
    assert_times(output, 2)


def test_the_backend_that_an_installed_torch_lacks_is_named_with_what_works(tmp_path: Path) -> None:
    """An error names a missing backend and what works."""
    with start(["python", SCRIPT, "--backend", "mpi"], tmp_path) as process:
        output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert output.splitlines()[-1].startswith('ddp_callbacks.errors.ConfigurationError: backend="mpi" needs')
    assert 'Use backend="mpi4py"' in output
