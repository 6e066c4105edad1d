"""The benchmark of the cost runs under ``ddprun`` and measures every part of a step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kit.commands import environment, finish, start
from kit.paths import ROOT
from test_predict import MODEL, row

PREDICT = ROOT / "examples" / "benchmarks" / "cost" / "predict.py"


@pytest.mark.cold
def test_one_run_on_this_machine(tmp_path: Path) -> None:
    """The benchmark of the cost measures every part of a step."""
    # Without shared memory each process counts as a host, and there is a wire.
    (tmp_path / "net.py").write_text(MODEL)
    options = ["--model", "net.py:make", "--seconds", "1", "--inexact", "--plot", "predicted.png"]
    command = ["ddprun", "--nproc-per-node", 2, "--no-prefix", PREDICT, *options]
    environ = environment() | {"PWD": str(tmp_path), "DDP_CALLBACKS_SHARED_MEMORY": "0"}
    text = finish(start(command, tmp_path, env=environ))
    assert row(text, "gradients,") == ["gradients,", "MB", "1.2"]
    assert row(text, "exact")[3].endswith("%") and row(text, "bf16")[3].endswith("%")
    assert row(text, "1,024")[:2] == ["1,024", "1,024"]
    assert re.search(r"On 2 hosts, \S+ is recommended ", text)
    assert (tmp_path / "predicted.png").exists()
