"""``ddprun bench`` measures each part of a step, here and between processes that count as hosts."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kit.commands import environment, start
from kit.ranks import run_distributed
from test_bench import MODEL, row

from ddp_callbacks.launcher.bench import calibration
from ddp_callbacks.launcher.bench.calibration import load_training
from ddp_callbacks.launcher.bench.cost import Calibration, Layout

LIMIT = 600.0  # seconds


def calibrated() -> Calibration:
    said: list[tuple[float, str]] = []
    found = calibration.calibrate(load_training(None), 1.0, lambda share, doing: said.append((share, doing)))
    assert said[0][0] == 0.0 and said[-1] == (1.0, "") and [share for share, _ in said] == sorted(s for s, _ in said)
    return found


@pytest.mark.wide
def test_a_calibration_of_two_ranks_holds_every_part() -> None:
    """`ddprun bench` measures every part of a step."""
    found, other = run_distributed(calibrated, 2)
    assert found.layout == other.layout == Layout(1, 2)
    assert found.job == other.job, "all ranks find the same"
    assert [bucket.nbytes for bucket in found.job.buckets] == [7_732_840, 15_270_400]  # 5.8 M float32
    first, last = (bucket.full for bucket in found.job.buckets)
    assert 0 < first < last and found.job.after > 0 and found.job.compute > 0
    assert found.machine.memory_bandwidth < math.inf and found.steps["exact"] > 0
    assert {sample.level for sample in found.samples} == {"memory"}


@pytest.mark.cold
def test_one_run_on_this_machine(tmp_path: Path) -> None:
    # Without shared memory each process counts as a host, and there is a wire.
    (tmp_path / "net.py").write_text(MODEL)
    environ = {**os.environ, "PWD": str(tmp_path), "DDP_CALLBACKS_SHARED_MEMORY": "0"}
    command = [sys.executable, "-m", "ddp_callbacks.launcher", "bench", "--model", "net.py:make", "--seconds", "1"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert row(text, "gradients,") == ["gradients,", "MB", "1.2"]
    assert row(text, "exact")[3].endswith("%") and row(text, "bf16")[3].endswith("%")
    assert row(text, "1,024")[:2] == ["1,024", "1,024"]
    assert "cannot share memory here, so each counts as a host" in text
    assert re.search(r"On 2 hosts, \S+ is recommended ", text)
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}  # of net.py, where Python may write it
    assert left == {"ddprun-bench.png", "ddprun-logs", "net.py"}


def test_one_process_is_refused_by_name(tmp_path: Path) -> None:
    """It refuses a single process."""
    environ = environment() | {"PWD": str(tmp_path)}
    command = ["ddprun", "bench", "--nproc-per-node", 1]
    with start(command, tmp_path, env=environ, stderr=subprocess.PIPE) as process:
        stdout, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 2 and stdout == ""
    says = "ddprun: ddprun bench needs at least two processes. Name more hosts, or pass --nproc-per-node 2."
    assert stderr.splitlines()[-1] == says
    assert list(tmp_path.iterdir()) == []
