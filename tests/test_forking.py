"""Processes forked beside torch's threads, as the workers of a loader are."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from nursery import Nursery, note

from ddp_callbacks import join_process_group, leave_process_group
from ddp_callbacks.comm.collectives import all_gather_json
from ddp_callbacks.process_group.forking import make_forks_wait

HAS_BUG = sys.version_info < (3, 12)
PR_SET_NAME = 15
FORKS = 40
LIMIT = 60.0  # seconds


def ends(pid: int) -> bool:
    """Whether a child ends by itself."""
    end = time.monotonic() + LIMIT
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return False
        time.sleep(1e-3)
    return True


def fork_after_collectives() -> None:
    join_process_group()
    for number in range(FORKS):
        for _ in range(3):
            all_gather_json(number, "numbers")
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        assert ends(pid), f"fork {number}"
    leave_process_group()
    note("forked")


def test_workers_forked_right_after_collectives_start(nursery: Nursery, tmp_path: Path) -> None:
    for rank in nursery.run(fork_after_collectives, 3, tmp_path):
        assert "forked" in rank.notes, rank.stderr


def fork_beside_threads(names: list[str]) -> None:
    """Notes of each thread, which computes without the GIL, whether a fork has waited for it."""
    make_forks_wait()
    for name in names:
        started, done = threading.Event(), threading.Event()

        def compute(name: str = name, started: threading.Event = started, done: threading.Event = done) -> None:
            ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())
            started.set()
            hashlib.pbkdf2_hmac("sha256", b"", b"", 300_000)
            done.set()
            threading.Event().wait()  # a thread that sleeps holds up nothing

        threading.Thread(target=compute, daemon=True).start()
        started.wait()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        note(name, done.is_set())
        assert ends(pid)
        done.wait()


@pytest.mark.skipif(not HAS_BUG, reason="this Python has no such bug")
def test_a_fork_waits_until_torchs_threads_have_let_go_of_the_interpreter(nursery: Nursery, tmp_path: Path) -> None:
    names = ["pt_gloo_runloop", "of somebody", "pt_nccl_watchdg"]
    (rank,) = nursery.run(fork_beside_threads, 1, tmp_path, names)
    assert rank.notes == dict(zip(names, [True, False, True], strict=True)), rank.stderr
