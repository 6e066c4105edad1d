"""What a job that loses processes leaves (:mod:`dying`), compared with one process without the library."""

from __future__ import annotations

import datetime
import json
import os
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import dying
import torch
from kit.commands import environment, finish, run, start
from kit.compare import assert_equal
from kit.once import once

SCRIPT = dying.__file__
RELATIVE = 1e-10
SEED = os.environ.get("SEED", str(datetime.date.today()))  # of random moments
KINDS, OPTIMIZERS = ("trial", "trainer"), ("sgd", "adam")
# How often each phase comes about at least; see dying.py.
PHASES = {
    "loading": 40,
    "forward": 15,
    "backward": 15,
    "step": 12,  # between the sum of the gradients and the optimizer's step
    "merge": 3,  # of metrics, at the end of an epoch
    "validation": 8,
    "copy": 8,
    "opening": 1,
    "start": 1,
    "meeting": 1,
    "connecting": 1,
    "end": 2,
    "ended": 1,
}

Plan = dict[int, tuple[str, float] | tuple[str, float, str]]  # who dies where; see dying.py
Steps = dict[tuple[int, int], list[int]]  # the samples of each step, by epoch and batch


def steps(folder: Path) -> Steps:
    """What counts of a step is done in the last group that has done it."""
    found: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for path in folder.glob("steps-*"):
        for line in path.read_text().splitlines():
            epoch, batch, group, samples = json.loads(line)
            found[epoch, batch][group] += samples
    return {step: sorted(by_group[max(by_group)]) for step, by_group in sorted(found.items())}


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / "result.pt")
    rows = [{name: float(value or "nan") for name, value in row.items()} for row in found["rows"]]
    return found | {"rows": [{n: v for n, v in row.items() if v == v} for row in rows], "steps": steps(folder)}


@once
def truth(kind: str, optimizer: str) -> dict[str, Any]:
    """Of one process, without the library."""
    folder = Path(tempfile.mkdtemp())
    run(["python", SCRIPT, kind, optimizer], folder)
    return results(folder)


def require_truth(folder: Path, kind: str, optimizer: str, printed: str) -> None:
    """What the job in ``folder`` has left has the numbers of one process."""
    assert_equal(results(folder), truth(kind, optimizer), RELATIVE, printed)


def prove(folder: Path, kind: str, optimizer: str, size: int, dies: Plan, copies: str) -> str:
    """Return what the job has printed whose processes die, which has the numbers of one process."""
    command = ["ddprun", "--keep-going", "-H", f"localhost:{size}", SCRIPT, kind, optimizer]
    variables = {"DIES": json.dumps(dies), "COPIES": copies}
    printed = finish(start(command, folder, env=environment() | variables))
    require_truth(folder, kind, optimizer, printed)
    return printed
