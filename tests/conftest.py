"""Every test leaves the machine as it found it: no process, no file in /dev/shm, no environment variable."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit import warm
from kit.leftovers import Machine, adopt_orphans
from kit.paths import find_tests

pytest_plugins = ["kit.budget"]

find_tests()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background; what tests start inherits it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # torch 2.8 keeps processes that compile


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keep tests that share results on one of pytest's workers."""
    for mark in item.iter_markers("shares_results"):
        values = getattr(item, "callspec", None) and item.callspec.params  # type: ignore[attr-defined]
        group = " ".join([item.path.stem, *(str((values or {}).get(name)) for name in mark.args)])
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests that share the longest starts of ranks come first, so that no worker ends long after the others."""
    items.sort(key=lambda item: item.path.stem not in ("test_lightning_equivalence", "test_equivalence"))


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
def server(temporary_files: None) -> Iterator[warm.Server]:
    """From which ranks and commands are forked."""
    adopt_orphans()
    made = warm.Server()
    yield made
    made.close()


@pytest.fixture(scope="session")
def nursery() -> Any:
    from kit.ranks import Nursery  # not before pytest knows the plugin that it imports

    return Nursery()


@pytest.fixture
def seed_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's seed_everything sets them."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")


@pytest.fixture(autouse=True)
def leaves_nothing_behind(server: warm.Server) -> Iterator[None]:
    from kit.costs import count

    environment, machine = dict(os.environ), Machine(server.pid)
    yield
    count("cold", len(server.cold_starts()))
    assert not dist.is_initialized(), "the test left its process group open"
    changed = {key for key in {**environment, **os.environ} if environment.get(key) != os.environ.get(key)}
    # These are set by pytest, and by torch, scikit-learn and Lightning when they are first used.
    changed -= {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
    changed -= {"PYTORCH_NVML_BASED_CUDA_CHECK"}
    assert not changed, f"the test left environment variables changed: {sorted(changed)}"
    if machine.processes():
        gc.collect()  # the workers of a loader end with its iterator
    end = time.monotonic() + 5
    files, left = machine.files(), machine.processes()
    while (files or left) and time.monotonic() < end:
        time.sleep(0.05)
        files, left = machine.files(), machine.processes()
    assert not files, "the test left files in /dev/shm"
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"the test left processes running: {list(left.values())}"
