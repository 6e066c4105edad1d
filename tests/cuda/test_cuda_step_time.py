"""The benchmark of step times runs on a GPU. Its figures are measured by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit.paths import python_path
from test_step_time import MAIN, MODELS

pytest.importorskip("matplotlib", reason="the benchmark draws its ratios by matplotlib")

BY_TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", MAIN, "--backend", "gloo"]
SHORT = ["--rounds", "2", "--block-seconds", "0.02", "--plot", "plot.png"]


@pytest.mark.parametrize("words", [[MAIN], BY_TORCHRUN], ids=["one process", "two processes by gloo"])
def test_on_a_gpu_the_step_of_each_model_is_compared_with_ddp(
    tmp_path: Path, record_property: Callable[[str, Any], None], words: list[Any]
) -> None:
    """The benchmark compares steps on a GPU with DDP's."""
    command = [sys.executable, *map(str, words), "--device", "cuda", *SHORT]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200)
    record_property("ratios", done.stdout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert all(f"| {model} | ours |" in done.stdout for model in MODELS), done.stdout
