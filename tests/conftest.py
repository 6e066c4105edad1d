"""Every test leaves the machine as it found it: no process, no file in /dev/shm, no environment variable."""

from __future__ import annotations

import gc
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import set_wrappers
from distributed import set_nursery
from nursery import Nursery

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # torch 2.8 keeps processes that compile


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keep tests that share results on one of pytest's workers."""
    for mark in item.iter_markers("shares_results"):
        values = getattr(item, "callspec", None) and item.callspec.params  # type: ignore[attr-defined]
        group = " ".join([item.path.stem, *(str((values or {}).get(name)) for name in mark.args)])
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_finish(session: pytest.Session) -> None:
    """pytest-xdist writes the group behind a test's name; one that does not find it would compute all twice."""
    if hasattr(session.config, "workerinput") and session.config.getoption("loadgroup", False):
        lost = [
            item.nodeid for item in session.items if item.get_closest_marker("xdist_group") and "@" not in item.nodeid
        ]
        assert not lost, f"this pytest-xdist does not group tests with this pytest: {lost[0]}"


TIERS = ("hosts", "mpi", "pages", "cold", "wide", "cuda", "apps")
_left_out: Counter[str] = Counter()  # tests that -m has left out, by what they do


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        kinds = {mark.name for mark in item.iter_markers()}
        _left_out.update([next((kind for kind in TIERS if kind in kinds), "others")])


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # on a worker of pytest-xdist, which leave out the same
        session.config.workeroutput["left_out"] = dict(_left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _left_out.clear()
    _left_out.update(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what was left out, and how to run it."""
    if _left_out and terminalreporter.config.option.markexpr:
        kinds = ", ".join(f"{number} {kind}" for kind, number in _left_out.most_common())
        terminalreporter.write_line(f"Left out: {kinds} (tests/README.md says what these are). make check runs all.")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """More ranks than cores share the machine, and summation order must not depend on it."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """torchrun and killed ranks leave folders behind; they go where pytest keeps and later removes its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(scope="session", autouse=True)
def nursery(temporary_files: None) -> Iterator[Nursery]:
    """From which the tests start their ranks."""
    made = Nursery()
    set_nursery(made)
    set_wrappers(made.wrappers)
    yield made
    made.close()


@pytest.fixture
def seed_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's seed_everything sets them."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    environment, shared_memory, children = dict(os.environ), _shared_memory(), _children()
    yield
    if not _children() <= children:
        gc.collect()  # the workers of a loader end with its iterator
    assert not dist.is_initialized(), "the test left its process group open"
    changed = {key for key in {**environment, **os.environ} if environment.get(key) != os.environ.get(key)}
    # These are set by pytest, and by torch, scikit-learn and Lightning when they are first used.
    changed -= {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
    changed -= {"PYTORCH_NVML_BASED_CUDA_CHECK"}
    assert not changed, f"the test left environment variables changed: {sorted(changed)}"
    end = time.monotonic() + 5
    while (left := _abandoned(_shared_memory() - shared_memory)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left, "the test left files in /dev/shm"
    assert _children() <= children, "the test left processes running"


def _shared_memory() -> set[str]:
    """Without that of MPI libraries, whose jobs tests run side by side, and which a killed rank leaves there.

    Nor that of joblib's workers: no test starts any, but other programs of the machine may. Nor the semaphores of
    processes that are spawned, which have a name as long as they are in use, and a tracker that unlinks them.
    """
    folder = Path("/dev/shm")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return {name for name in names if not name.startswith(("mpich_shm_", "vader_segment.", "sem.loky-", "sem.mp-"))}


def _abandoned(names: set[str]) -> set[str]:
    """Without those that torch has made for a process that still runs: the tests run side by side."""
    owners = {name: re.match(r"torch_(\d+)_", name) for name in names}
    return {name for name, owner in owners.items() if owner is None or not Path(f"/proc/{owner[1]}").exists()}


def _children() -> set[str]:
    """The process ids of this process's children (Linux; nothing elsewhere)."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children")
    return set(listed.read_text().split()) if listed.exists() else set()
