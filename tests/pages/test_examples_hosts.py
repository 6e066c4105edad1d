"""Each example on two real hosts, with few steps."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import LIMIT, ddprun, on_hosts
from kit import commands
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


OTHERS = sorted(ON_TWO.keys() - {"torchbearer_mnist"})


@pytest.fixture(scope="module")
def bed() -> Iterator[HostBed]:
    with HostBed(2) as made:
        yield made


@pytest.mark.parametrize(
    "name", ["torchbearer_mnist", *(pytest.param(name, marks=pytest.mark.night) for name in OTHERS)]
)
def test_an_example_runs_on_two_hosts(bed: HostBed, tmp_path: Path, name: str) -> None:
    """The examples run on two hosts."""
    arguments, line = ON_TWO[name]
    script = str(EXAMPLES / f"{name}.py")
    done = ddprun("-H", "h1:1,h2:1", script, *arguments, cwd=tmp_path, host=bed.hosts[0])
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(re.fullmatch(line, printed) for printed in done.stdout.splitlines()), done.stdout


@pytest.mark.night
def test_the_example_that_starts_its_own_processes_runs_on_two_hosts(bed: HostBed, tmp_path: Path) -> None:
    command = [str(EXAMPLES / "spawn_resume.py"), "--epochs", "1", "--dtype", "float64"]
    script = [sys.executable, "-u", *command]
    nodes = ["--nnodes", "2", "--nproc-per-node", "1", "--init-method", f"tcp://{bed.hosts[0].address}:29500"]
    options = {"cwd": tmp_path, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with (
        bed.hosts[1].start(*script, *nodes, "--node-rank", "1", **options) as second,
        bed.hosts[0].start(*script, *nodes, "--node-rank", "0", **options) as first,
    ):
        try:
            printed = [process.communicate(timeout=LIMIT)[0].decode() for process in (first, second)]
        finally:
            first.kill()
            second.kill()
    alone = commands.run(["python", *command], tmp_path)
    loss = re.search(r"epoch 1: loss .*", alone)
    assert (first.returncode, second.returncode) == (0, 0), printed
    assert loss and loss[0][:-2] in printed[0] and loss[0][:-2] not in printed[1], (alone, printed)
    assert "rank 1 of 2: process 0 of node 1, on cpu, 16 of 32 samples per step" in printed[1]
