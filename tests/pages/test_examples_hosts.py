"""Each example on two real hosts, with few steps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import ddprun, on_hosts
from kit.hosts import HostBed
from kit.paths import ROOT

pytestmark = [*on_hosts("examples"), pytest.mark.cold]

EXAMPLES = ROOT / "examples"
ON_TWO = {
    "smiles_rnn_kfold": (
        ["--molecules", "80", "--folds", "2", "--epochs", "1"],
        r"\[h1:0\] 2 processes: held-out ROC AUC 0\.\d{4}, standard deviation 0\.\d{4} over 2 folds",
    ),
    "torchbearer_mnist": (["--epochs", "1"], r"\[h1:0\] 2 processes: accuracy 0\.\d{3} on 360 test images"),
    "tabular_pbs": (["--epochs", "1"], r"\[h1:0\] 2 processes: accuracy 0\.\d{3}, AUC 0\.\d{4}, loss .*"),
    "point_to_point": (
        ["--megabytes", "0.01", "--rounds", "2", "--block-seconds", "0.01"],
        r"\[h1:0\] rank 0 has sent \[1\.0, -1\.0\] to rank 1, and received \[2\.0, -2\.0\]",
    ),
}


@pytest.fixture(scope="module")
def bed() -> Iterator[HostBed]:
    with HostBed(2) as made:
        yield made


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.night] if name != "torchbearer_mnist" else []) for name in ON_TWO]
)
def test_an_example_runs_on_two_hosts(bed: HostBed, tmp_path: Path, name: str) -> None:
    """The examples run on two hosts."""
    arguments, line = ON_TWO[name]
    script = str(EXAMPLES / f"{name}.py")
    done = ddprun("-H", "h1:1,h2:1", script, *arguments, cwd=tmp_path, host=bed.hosts[0])
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(re.fullmatch(line, printed) for printed in done.stdout.splitlines()), done.stdout
