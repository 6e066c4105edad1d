"""``ddprun predict`` trains a script on two processes and on one, and extrapolates."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from kit.commands import run, start

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("predict")]  # it measures time

# A batch takes 40 ms of a process, a half of it 20 ms; 10 ms of each step are not divided.
TRAIN = """
import time, torch
from ddp_callbacks import GradientSynchronizer, join_process_group

torch.manual_seed(0)
ranks, module = join_process_group().world_size, torch.nn.Linear(2, 2)
synchronizer, optimizer = GradientSynchronizer(module), torch.optim.SGD(module.parameters(), lr=0.1)
while True:
    time.sleep(0.04 / ranks)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
"""


def predict(folder: Path, *flags: str) -> list[str]:
    (folder / "train.py").write_text(TRAIN)
    return ["ddprun", "predict", "--nproc-per-node", "2", "--seconds", "2", *flags, "train.py"]


def test_a_script_is_trained_for_a_short_time_and_its_parts_are_found(tmp_path: Path) -> None:
    """`ddprun predict` measures a script as it is."""
    output = run(predict(tmp_path, "--json", "--plot", "found.svg"), tmp_path)
    found = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    few, many = found["measured"]
    assert (few["processes"], many["processes"]) == (1, 2)
    assert few["seconds"] >= 0.05 and many["seconds"] >= 0.03
    # Of a machine with two processes: 0.02. A step of these takes 0.03 s to compute, and longer with the exchange.
    least = min(few["seconds"] - many["seconds"], few["seconds"] / 2)  # of two processes, one does no more than half
    assert least <= found["step"]["divided"] <= few["seconds"] - 0.03
    assert (tmp_path / "found.svg").read_text().startswith("<svg")


def test_ctrl_c_in_the_second_run_ends_it_and_nothing_is_predicted(tmp_path: Path) -> None:
    with start(predict(tmp_path), tmp_path) as process:
        assert process.stdout is not None and any(" rank 0, 1 thread each" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[0].splitlines()
    assert process.returncode == -signal.SIGINT and said[-1] == "ddprun: stopped by SIGINT"
    assert not any(line.startswith("Measured") for line in said)
