"""Run functions on fresh ranks of a kind (:mod:`kit.ranks`) that have joined, for tests of GPUs."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ddp_callbacks import leave_process_group
from kit.ranks import Nursery

SIZES = {"one": 1, "gloo": 2, "nccl": 2, "cpu": 2}
BODY = 240.0  # seconds for a body, with the start of its ranks


def run_on(kind: str, body: Callable[..., Any], *args: Any, deadline: float = BODY) -> list[Any]:
    """Call ``body(*args)`` on every rank; return the results by rank, with their tensors on the CPU.

    Raises:
        AssertionError: With every rank's output, if one raised, died or took longer than ``deadline``.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, call = Path(name), (body.__module__, body.__name__, args)
        ranks = Nursery(kind).run(_join_and_return, SIZES[kind], folder, kind, *call, deadline=deadline)
        texts = "\n".join(f"--- rank {index}\n{rank.stdout}{rank.stderr}" for index, rank in enumerate(ranks))
        codes = [rank.code for rank in ranks]
        assert codes == [0] * len(ranks), f"{body.__name__} on {kind}: exit codes {codes}\n{texts}"
        results = [folder / f"result-{index}" for index in range(len(ranks))]
        return [torch.load(result, map_location="cpu", weights_only=False) for result in results]


def _join_and_return(kind: str, module: str, name: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    folder = Path.cwd()
    failures = importlib.import_module("device_failures")
    failures.join_on(kind)
    result = getattr(importlib.import_module(module), name)(*args)
    torch.save(result, folder / f"result-{failures.my_rank()}")  # one process has no group
    leave_process_group()
