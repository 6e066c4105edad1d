"""examples/tabular_pbs.py in the PBS job of its page, and under torch's own DistributedDataParallel."""

from __future__ import annotations

import csv
import re
import runpy
import subprocess
from pathlib import Path

import pytest
from kit.commands import DEADLINE, environment, finish, start
from kit.paths import ROOT
from kit.ranks import run_distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SCRIPT = ROOT / "examples" / "tabular_pbs.py"
STEPS = 13  # of an epoch: 426 rows in batches of 32, without the last, incomplete one


def logged(folder: Path) -> list[dict[str, float]]:
    """The metrics of each epoch that Lightning's CSVLogger has written."""
    (path,) = folder.rglob("metrics.csv")
    with path.open() as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def used(output: str) -> list[list[bool]]:
    """In which steps of the first epoch each rank used the layer, as the script shows it."""
    rows = re.findall(r"^ *(?:\[\S+\] *)?rank \d  ([#.]+)$", output, re.MULTILINE)
    return [[mark == "#" for mark in row] for row in rows]


def pbs_job(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run the job script as PBS does, on this host alone, with two processes."""
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "nodes").write_text("localhost\nlocalhost\n")
    environ = {
        **environment(),
        "PBS_ENVIRONMENT": "PBS_BATCH",
        "PBS_JOBID": "12.server",
        "PBS_NODEFILE": str(folder / "nodes"),
        "PBS_O_WORKDIR": str(folder),
        "SCRIPT": script,
    }
    job = ["bash", "examples/jobs/ddp.pbs"]
    return subprocess.run(
        job, cwd=folder, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE
    )


@pytest.mark.cold
def test_a_pbs_job_equals_lightning_on_one_process_though_only_some_use_the_layer(tmp_path: Path) -> None:
    """Processes may use different layers."""
    with start(["python", SCRIPT, "--epochs", 3, "--csv", "one", "--strategy", "auto"], tmp_path, cold=True) as running:
        job = pbs_job(tmp_path, "examples/tabular_pbs.py --epochs 3 --csv two")
        alone = finish(running)
    assert job.returncode == 0, job.stderr
    assert "ddprun: localhost: ranks 0-1, " in job.stderr

    of_batch, of_rank = used(alone), used(job.stdout)
    assert len(of_batch) == 1 and len(of_rank) == 2 and len(of_batch[0]) == STEPS
    assert [any(step) for step in zip(*of_rank, strict=True)] == of_batch[0], "the parts are those of the same batch"
    assert {sum(step) for step in zip(*of_rank, strict=True)} == {0, 1, 2}, "no, one and both processes use the layer"
    one, two = logged(tmp_path / "one"), logged(tmp_path / "two")
    assert len(one) == 3 and one[-1]["val_auc"] > 0.95
    assert two == [pytest.approx(epoch, rel=1e-5) for epoch in one]
    said = r"accuracy 0\.\d{3}, AUC 0\.\d{4}, loss 0\.\d{4} on the rows for the test"
    assert re.fullmatch(f"1 process: {said}", alone.splitlines()[-1])
    assert re.fullmatch(rf"\[localhost:0\] 2 processes: {said}", job.stdout.splitlines()[-1])


def ddp_in_two_steps_without_the_layer() -> str:
    """What torch's own wrapper says to two batches in which no row lacks anything."""
    example = runpy.run_path(str(SCRIPT))
    rows, benign = example["load_rows"]()[0].tensors
    complete = ~rows.isnan().any(dim=1)
    model = DistributedDataParallel(example["TumourClassifier"]())
    try:
        for part in (slice(0, 16), slice(16, 32)):
            logits = model(rows[complete][part])
            nn.functional.binary_cross_entropy_with_logits(logits, benign[complete][part]).backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_ddp_without_its_flag_says_what_the_page_quotes() -> None:
    """DDP without its flag fails as the page quotes."""
    page = " ".join((ROOT / "docs" / "tutorials" / "tabular_pbs.md").read_text().split())
    for rank, said in enumerate(run_distributed(ddp_in_two_steps_without_the_layer, 2)):
        assert "Expected to have finished reduction in the prior iteration before starting a new one." in said
        assert " ".join(said.split()).replace(f"for rank {rank}:", "for rank 0:") in page
