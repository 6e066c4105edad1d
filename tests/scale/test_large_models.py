"""Models of hundreds of megabytes: they wait for a late rank, stop, resume and lose processes as small ones do."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.commands import environment, run, start
from kit.once import once

SCRIPT = str(Path(__file__).with_name("large_models.py"))
RELATIVE = 1e-10  # of the largest number of a parameter
pytestmark = [pytest.mark.night, pytest.mark.cold]


@once
def truth() -> dict[str, torch.Tensor]:
    """Of one process, without the library."""
    folder = Path(tempfile.mkdtemp())
    run(["python", SCRIPT, "transformer"], folder)
    return torch.load(folder / "result.pt")  # type: ignore[no-any-return]


def require_truth(folder: Path) -> None:
    found = torch.load(folder / "result.pt")
    for name, expected in truth().items():
        difference = float((found[name] - expected).abs().max())
        assert difference <= RELATIVE * float(expected.abs().max()), f"{name}: {difference}"


def ddprun(folder: Path, *words: Any, **variables: str) -> tuple[int, str]:
    with start(["ddprun", *words], folder, env=environment() | variables) as job:
        printed, _ = job.communicate(timeout=1500)
    return job.returncode, printed


@pytest.mark.parametrize("late", [12, 60])
def test_0_96_gb_in_40_buckets_are_summed_though_a_rank_is_late(tmp_path: Path, late: int) -> None:
    """A late rank is waited for."""
    code, printed = ddprun(tmp_path, "--nproc-per-node", 2, SCRIPT, "buckets", LATE=str(late))
    assert code == 0 and "rank 0 has the sums" in printed, printed


def test_124_million_parameters_that_stop_are_resumed_on_another_number_of_processes(tmp_path: Path) -> None:
    code, printed = ddprun(tmp_path, "--nproc-per-node", 2, SCRIPT, "transformer", STOPS="")
    assert code == 75 and (tmp_path / "run.ckpt").stat().st_size > 1.9e9, printed
    code, printed = ddprun(tmp_path, "--nproc-per-node", 3, SCRIPT, "transformer")
    assert code == 0, printed
    require_truth(tmp_path)


def test_124_million_parameters_survive_the_death_of_a_process(tmp_path: Path) -> None:
    words = ["--keep-going", "--nproc-per-node", 2, SCRIPT, "transformer"]
    code, printed = ddprun(tmp_path, *words, DIES="1")
    assert code == 0 and re.search(r"rank 1 on localhost was killed by SIGKILL; continuing", printed), printed
    require_truth(tmp_path)
