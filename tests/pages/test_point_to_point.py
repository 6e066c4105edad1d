"""The example of messages between two processes, as a user starts it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kit.commands import DEADLINE, TWO_PROCESSES, run, start
from kit.paths import ROOT

SCRIPT = ROOT / "examples" / "point_to_point.py"
SHORT = [SCRIPT, "--megabytes", 0.01, "--rounds", 3, "--block-seconds", 0.001]
GRADIENT = re.compile(r"^  (.+?) +(\d+\.\d{6}) +(\d\.\de[-+]\d\d)$", re.MULTILINE)
LOSS = re.compile(r"^  (.+, lr \S+) +(\d+\.\d{6})$", re.MULTILINE)
TIME = re.compile(r"^ +0.01 +2 +(\S.+?) +\d+\.\d+ \(\d+\.\d+ to \d+\.\d+\) +(\d+\.\d+)$", re.MULTILINE)
EXACT = 1e-14  # float64, sums in another order


@pytest.mark.cold
def test_two_processes(tmp_path: Path) -> None:
    """Sums by hand are N times the gradient; `GradientSynchronizer` is exact."""
    output = run([*TWO_PROCESSES, *SHORT, "--lr", 0.25, "--plot", "times.png"], tmp_path, cold=True)
    assert "rank 0 has sent [1.0, -1.0] to rank 1, and received [2.0, -2.0]\n" in output

    summed, *exact = ((float(length), float(difference)) for _, length, difference in GRADIENT.findall(output))
    assert summed == pytest.approx((2, 1), rel=0.05)
    assert len(exact) == 3 and all(length == 1 and difference < EXACT for length, difference in exact)
    losses = dict(LOSS.findall(output))
    assert losses["one process, lr 0.25"] == losses["2 processes, GradientSynchronizer, lr 0.25"]
    assert losses["one process, lr 0.5"] == losses["2 processes, summed by hand, lr 0.25"]

    ratios = dict(TIME.findall(output))
    assert list(ratios) == ["send and recv", "broadcast of each", "broadcast_parameters"]
    assert ratios["broadcast of each"] == "1.00"
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")


def test_the_backend_that_an_installed_torch_lacks_is_named_with_what_works(tmp_path: Path) -> None:
    """An error names a missing backend and what works."""
    with start(["python", SCRIPT, "--backend", "mpi"], tmp_path) as process:
        output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert re.search(r"ConfigurationError: backend=\"mpi\" needs .* Use backend=\"mpi4py\"", output)
