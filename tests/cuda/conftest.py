"""Tests that need a GPU: where there is none, each file is skipped by name, before it imports anything."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from kit.ranks import Nursery
from kit.worlds import World, why_not


class _WithoutGpu(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip("needs a CUDA GPU", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Without a GPU a file is not imported."""
    return None if torch.cuda.is_available() else _WithoutGpu.from_parent(parent, path=module_path)


_worlds: dict[str, World] = {}  # of this session, by kind


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.cuda)


@pytest.fixture(scope="session", autouse=True)
def server() -> None:
    """Nothing here is forked."""


@pytest.fixture(scope="session")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], World]]:
    """The world of a kind; its processes start when they are first needed."""

    def of_kind(kind: str) -> World:
        if kind not in _worlds:
            _worlds[kind] = World(kind, tmp_path_factory.mktemp("world"))
        return _worlds[kind]

    yield of_kind
    for world in _worlds.values():
        world.close()
    _worlds.clear()


@pytest.fixture(scope="session")
def without_nccl(worlds: Callable[[str], World]) -> str:
    """Why two ranks cannot share the GPU under NCCL, in NCCL's words; empty if they can. Found out once."""
    from device_bodies import a_sum

    return why_not(worlds("nccl"), a_sum)


@pytest.fixture
def nccl(request: pytest.FixtureRequest, worlds: Callable[[str], World]) -> World:
    """Two ranks on the GPU, by NCCL; otherwise the test is skipped."""
    if reason := request.getfixturevalue("without_nccl"):
        pytest.skip(f"NCCL refuses two ranks on one GPU: {reason}")
    return worlds("nccl")


@pytest.fixture(params=["gloo", "nccl"])
def pair(request: pytest.FixtureRequest, worlds: Callable[[str], World]) -> World:
    """Two ranks on the GPU, by gloo and by NCCL."""
    return request.getfixturevalue("nccl") if request.param == "nccl" else worlds("gloo")


@pytest.fixture
def one(worlds: Callable[[str], World]) -> World:
    """One process on the GPU."""
    return worlds("one")


@pytest.fixture(params=["gloo", "nccl"])
def fresh(request: pytest.FixtureRequest) -> Nursery:
    """Ranks on the GPU that may fail."""
    if request.param == "nccl":
        request.getfixturevalue("nccl")
    return Nursery(request.param)


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """In place of that of all tests: worlds outlive a test. A process that is none of theirs does not."""
    before = _children()
    yield
    left = _children() - before - {pid for world in _worlds.values() for pid in world.pids()}
    assert not left, "the test left processes running"


def _children() -> set[int]:
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    return set(map(int, listed.read_text().split())) if listed.exists() else set()
