"""Run a program of this folder on one process and on two, and compare what each has left in a file."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import torch
from kit.commands import DEADLINE, run, start

HERE = Path(__file__).parent


def on_one(program: str | list[str], folder: Path) -> dict[str, Any]:
    """What the program, perhaps with arguments, computes on one process, without the library."""
    run(["python", *_command(program), "alone", folder / "one"], folder, cold=True)
    result: dict[str, Any] = torch.load(folder / "one.0", weights_only=True)
    return result


def on_two(program: str | list[str], kind: str, folder: Path) -> list[dict[str, Any]]:
    """What it computes on each of two processes."""
    run(["ddprun", "--nproc-per-node", 2, *_command(program), kind, folder / kind], folder, cold=True)
    return [torch.load(folder / f"{kind}.{rank}", weights_only=True) for rank in range(2)]


def failing(program: str, kind: str, folder: Path) -> str:
    """What it prints on two processes, where it is to fail."""
    process = start(["ddprun", "--nproc-per-node", 2, HERE / program, kind, folder / kind], folder, cold=True)
    try:
        output, _ = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        process.terminate()  # ddprun ends its processes
        output, _ = process.communicate(timeout=60)
    assert process.returncode != 0, output
    return output


def _command(program: str | list[str]) -> list[Any]:
    name, *arguments = [program] if isinstance(program, str) else program
    return [HERE / name, *arguments]


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-10, where: str = "") -> None:
    """Compare nested results number by number, to ``tolerance`` of each or of 1.

    Of 1: some gradients are zero but for rounding (a key's bias does not change a softmax), and Adam divides the
    rounding by itself.
    """
    if isinstance(expected, dict):
        assert sorted(actual) == sorted(expected), where
        for key in expected:
            assert_close(actual[key], expected[key], tolerance, f"{where} {key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), where
        for index, pair in enumerate(zip(actual, expected, strict=True)):
            assert_close(*pair, tolerance, f"{where} [{index}]")
    else:
        values = [torch.as_tensor(value, dtype=torch.float64) for value in (actual, expected)]
        torch.testing.assert_close(*values, rtol=tolerance, atol=tolerance, msg=lambda text: f"{where}: {text}")
