"""examples/tabular_pbs.py in the PBS job of its page."""

from __future__ import annotations

import csv
import re
import subprocess
from pathlib import Path

import pytest
from kit.commands import DEADLINE, environment, finish, start
from kit.paths import ROOT

SCRIPT = ROOT / "examples" / "tabular_pbs.py"


def logged(folder: Path) -> list[dict[str, float]]:
    """The metrics of each epoch that Lightning's CSVLogger has written."""
    (path,) = folder.rglob("metrics.csv")
    with path.open() as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def used(output: str) -> list[str]:
    """In which steps of the first epoch each rank used the layer, as the script shows it."""
    return re.findall(r"^ *(?:\[\S+\] *)?rank \d  ([#.]+)$", output, re.MULTILINE)


@pytest.mark.cold
def test_a_pbs_job_equals_lightning_on_one_process_though_only_some_use_the_layer(tmp_path: Path) -> None:
    """Processes may use different layers."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "nodes").write_text("localhost\nlocalhost\n")  # as PBS does, on this host alone, with two processes
    variables = {
        "PBS_ENVIRONMENT": "PBS_BATCH",
        "PBS_JOBID": "12.server",
        "PBS_NODEFILE": str(tmp_path / "nodes"),
        "PBS_O_WORKDIR": str(tmp_path),
        "SCRIPT": "examples/tabular_pbs.py --epochs 3 --csv two",
    }
    with start(["python", SCRIPT, "--epochs", 3, "--csv", "one", "--strategy", "auto"], tmp_path, cold=True) as running:
        job = subprocess.run(
            ["bash", "examples/jobs/ddp.pbs"],
            cwd=tmp_path,
            env=environment() | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        alone = finish(running)
    assert job.returncode == 0, job.stderr
    assert "ddprun: localhost: ranks 0-1, " in job.stderr

    by_ranks = ["".join(step) for step in zip(*used(job.stdout), strict=True)]
    assert {"..", "##"} < set(by_ranks), "no and both processes use the layer, and in other steps one"
    assert ["".join("#" if "#" in step else "." for step in by_ranks)] == used(alone), "the parts of the same batches"
    one, two = logged(tmp_path / "one"), logged(tmp_path / "two")
    assert len(one) == 3 and one[-1]["val_auc"] > 0.95
    assert two == [pytest.approx(epoch, rel=1e-5) for epoch in one]
