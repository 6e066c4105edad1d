"""The example of a plain loop that starts its own processes, as a user starts it, beside a loop in torch alone."""

from __future__ import annotations

import argparse
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from kit.commands import DEADLINE, run, start
from kit.paths import ROOT
from kit.ranks import free_port
from torch.nn import functional as F

SCRIPT = ROOT / "examples" / "spawn_resume.py"
SETTINGS = {"dtype": "float64", "batch_size": 100, "lr": 0.2, "seed": 5}
EPOCHS = 3
OPTIONS = [word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", value)]
COMMAND = ["python", SCRIPT, "--epochs", EPOCHS, *OPTIONS]
RELATIVE = 1e-10  # sums in another order, in float64
EPOCH = re.compile(r"^epoch (\d+): loss (\d+\.\d{12})$", re.MULTILINE)
LAST_LINE = re.compile(r"(.+) \(checksum [0-9a-f]{8}\); (\d+) of 360 test digits recognized")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("spawn_resume", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Plain:
    """What one process gets with torch alone."""

    def __init__(self, example: ModuleType) -> None:
        train, test = example.make_loaders(argparse.Namespace(**SETTINGS, workers=0, nproc_per_node=1))
        torch.manual_seed(5)
        self.model = example.make_model().double()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        self.losses = []
        for epoch in range(EPOCHS):
            example.seed_epoch(5, epoch, 0)
            total = 0.0
            for images, targets in train:
                optimizer.zero_grad()
                loss = F.cross_entropy(self.model(images), targets)
                loss.backward()
                optimizer.step()
                total += loss.item() * len(images)
            schedule.step()
            self.losses.append(total / 1437)
        images, targets = test.dataset.tensors
        self.recognized = int((self.model(images).argmax(1) == targets).sum())
        self.optimizer = optimizer.state_dict()


@pytest.fixture(scope="module")
def plain(example: ModuleType) -> Plain:
    return Plain(example)


def assert_equals(plain: Plain, output: str, checkpoint: Path, processes: int, first: int = 1) -> None:
    """What was printed from epoch ``first`` on, and the parameters and the momentum that were saved."""
    assert [int(number) for number, _ in EPOCH.findall(output)] == list(range(first, EPOCHS + 1)), output
    losses = [float(loss) for _, loss in EPOCH.findall(output)]
    assert losses == pytest.approx(plain.losses[first - 1 :], rel=RELATIVE, abs=1e-12)
    who = f"{processes} processes hold equal parameters" if processes > 1 else "1 process"
    match = LAST_LINE.search(output)
    assert match is not None and (match[1], int(match[2])) == (who, plain.recognized), output
    state = torch.load(checkpoint)
    assert state["epochs"] == EPOCHS
    close = {"rtol": RELATIVE, "atol": 1e-14}
    torch.testing.assert_close(state["model"], dict(plain.model.state_dict()), **close)
    torch.testing.assert_close(state["optimizer"]["state"], plain.optimizer["state"], **close)
    assert state["optimizer"]["param_groups"] == plain.optimizer["param_groups"]


def run_nodes(folders: list[Path], *options: Any) -> list[tuple[int, str]]:
    """How two nodes end that are started by hand, with a process each, and what they print."""
    command = [*COMMAND, *options, "--nproc-per-node", 1, "--nnodes", 2]
    command += ["--init-method", f"tcp://127.0.0.1:{free_port()}", "--node-rank"]
    nodes = [start([*command, rank], folder) for rank, folder in enumerate(folders)]
    try:
        printed = [node.communicate(timeout=DEADLINE)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    return [(node.returncode, output) for node, output in zip(nodes, printed, strict=True)]


def test_two_nodes_train_as_one_process_in_torch_alone(tmp_path: Path, plain: Plain) -> None:
    """`spawn_resume.py` trains as torch alone, over nodes, too."""
    options = ["--checkpoint", "nodes.pt", "--workers", 1, "--deterministic"]
    (first, output), (second, told) = run_nodes([tmp_path, tmp_path], *options)
    assert (first, second) == (0, 0), output + told
    assert_equals(plain, output, tmp_path / "nodes.pt", 2)
    assert "rank 1 of 2: process 0 of node 1, on cpu, 50 of 100 samples per step\n" in told


# Started with rank 0 killed while it writes the checkpoint of epoch 2.
DYING = """
import os, signal, sys
import torch
sys.path.insert(0, {folder!r})
import spawn_resume
save = torch.save

def die_while_saving(state, path):
    save(state, path)
    if state["epochs"] == 2:
        os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

torch.save = die_while_saving
if __name__ == "__main__":
    spawn_resume.main()
"""


def test_a_run_that_was_killed_goes_on_on_one_process(tmp_path: Path, plain: Plain) -> None:
    dying = tmp_path / "dying.py"
    dying.write_text(DYING.format(folder=str(SCRIPT.parent)))
    command = ["python", dying, *COMMAND[2:], "--nproc-per-node", 2, "--checkpoint", "killed.pt"]
    with start(command, tmp_path) as process:
        try:
            output, _ = process.communicate(timeout=DEADLINE)
        finally:
            process.kill()
    assert process.returncode and "process 0 terminated with signal SIGKILL" in output
    assert [float(loss) for _, loss in EPOCH.findall(output)] == pytest.approx(plain.losses[:2], rel=RELATIVE)
    assert torch.load(tmp_path / "killed.pt")["epochs"] == 1, "the half of a checkpoint has replaced a whole one"

    output = run([*COMMAND, "--nproc-per-node", 1, "--checkpoint", "killed.pt"], tmp_path)
    assert_equals(plain, output, tmp_path / "killed.pt", 1, first=2)
    assert not list(tmp_path.glob("killed.pt.*"))


def test_a_checkpoint_that_one_node_lacks_is_an_error_on_both(tmp_path: Path, example: ModuleType) -> None:
    """A node that lacks the checkpoint stops all."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    model = example.make_model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    example.save_checkpoint(str(here / "one.pt"), parts, 2)

    for code, output in run_nodes([here, elsewhere], "--checkpoint", "one.pt"):
        assert code and "epochs of the checkpoint: 2 on rank 0; 0 on rank 1" in output, output
