"""The benchmark of step times runs: every model is compared with DDP, in every way. What it measures is not tested."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kit.paths import ROOT, python_path

MAIN = ROOT / "examples" / "benchmarks" / "step_time" / "main.py"
MODELS = ("MLP, 80 k", "MLP, 5.8 M", "GRU, bidirectional", "conv + BatchNorm")
WAYS = ("no sync", "per parameter, afterwards", "DDP", "DDP, bucket view", "ours")
SHORT = ("--rounds", "2", "--block-seconds", "0.02")


def run_step_time(processes: int, folder: Path, *options: str) -> str:
    """What the command prints, shortened; with one process, it is started without torchrun."""
    by_torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    launcher = by_torchrun if processes > 1 else []
    command = [sys.executable, *launcher, str(MAIN), *SHORT, "--plot", str(folder / "plot.png"), *options]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environ = kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def assert_all_are_compared(output: str) -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \| ([\d.]+) \| \*\*([\d.]+)\*\* \|", output, re.MULTILINE)
    assert {(model, way) for model, way, *_ in rows} == {(model, way) for model in MODELS for way in WAYS}, output
    assert all(float(step) > 0 and float(ratio) > 0 for *_, step, ratio in rows), output
    assert all(float(ratio) == 1.0 for _, way, _, ratio in rows if way == "DDP"), output


@pytest.mark.cold
def test_the_step_of_each_model_is_compared_with_ddp(tmp_path: Path) -> None:
    """The benchmark compares each model's step with DDP's."""
    assert_all_are_compared(run_step_time(2, tmp_path))
