"""Tests that need a GPU: where there is none, each file is skipped by name, before it imports anything."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.once import once
from kit.worlds import run_on

_REFUSAL = "NCCL.*(WARN|[Ee]rror)|Duplicate GPU"


class _WithoutGpu(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip("needs a CUDA GPU", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Without a GPU a file is not imported."""
    return None if torch.cuda.is_available() else _WithoutGpu.from_parent(parent, path=module_path)


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.cuda)


@pytest.fixture(scope="session", autouse=True)
def server() -> None:
    """Nothing here is forked."""


@once
def why_not_by_nccl() -> str:
    """Why two ranks cannot share the GPU under NCCL, in NCCL's words; empty if they can."""
    from device_bodies import a_sum

    try:
        run_on("nccl", a_sum, "cuda", deadline=90.0)
    except AssertionError as error:
        lines = [line.strip() for line in str(error).splitlines() if re.search(_REFUSAL, line)]
        if not lines:
            raise
        return " | ".join(dict.fromkeys(lines))[-600:]
    return ""


@pytest.fixture(params=["gloo", "nccl"])
def kind(request: pytest.FixtureRequest) -> str:
    """Of two ranks on the GPU; by NCCL the test is skipped where that refuses them."""
    if request.param == "nccl" and (reason := why_not_by_nccl()):
        pytest.skip(f"NCCL refuses two ranks on one GPU: {reason}")
    return str(request.param)


@pytest.fixture
def pair(kind: str) -> Callable[..., Any]:
    """Runs a body on two ranks on the GPU."""
    return partial(run_on, kind)


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """In place of that of all tests, which watches the server."""
    before = _children()
    yield
    assert not _children() - before, "the test left processes running"


def _children() -> set[int]:
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    return set(map(int, listed.read_text().split())) if listed.exists() else set()
