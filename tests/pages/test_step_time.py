"""The benchmark of step times runs: every model is compared with DDP, in every way. What it measures is not tested."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kit.commands import TWO_PROCESSES, run
from kit.paths import ROOT

MAIN = ROOT / "examples" / "benchmarks" / "step_time" / "main.py"
MODELS = ("MLP, 80 k", "MLP, 5.8 M", "GRU, bidirectional", "conv + BatchNorm")
WAYS = ("no sync", "per parameter, afterwards", "DDP", "DDP, bucket view", "ours")


@pytest.mark.night
def test_the_step_of_each_model_is_compared_with_ddp(tmp_path: Path) -> None:
    """The benchmark compares each model's step with DDP's."""
    short = ["--rounds", 2, "--block-seconds", 0.02, "--plot", "plot.png"]
    output = run([*TWO_PROCESSES, MAIN, *short], tmp_path, cold=True)
    rows = re.findall(r"^\| (.+?) \| (.+?) \| ([\d.]+) \| \*\*([\d.]+)\*\* \|", output, re.MULTILINE)
    assert {(model, way) for model, way, *_ in rows} == {(model, way) for model in MODELS for way in WAYS}, output
    assert all(float(step) > 0 and float(ratio) > 0 for *_, step, ratio in rows), output
    assert all(float(ratio) == 1.0 for _, way, _, ratio in rows if way == "DDP"), output
