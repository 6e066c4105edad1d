"""Processes that are forked, or end, beside torch's threads."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from kit.ranks import Nursery, note

from ddp_callbacks import join_process_group, leave_process_group
from ddp_callbacks.comm.collectives import all_gather_object
from ddp_callbacks.process_group import torch_threads

PR_SET_NAME = 15
FORKS = 20
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


def fork_after_collectives(joins: bool) -> None:
    """In a group of the library's, or in one that the program has made itself."""
    join_process_group() if joins else dist.init_process_group("gloo")
    for number in range(FORKS):
        for _ in range(3):
            all_gather_object(number, "numbers")
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        assert ends(pid), f"fork {number}"
    leave_process_group() if joins else dist.destroy_process_group()
    note("forked")


@pytest.mark.parametrize("joins", [True, False])
def test_workers_forked_right_after_collectives_start(nursery: Nursery, tmp_path: Path, joins: bool) -> None:
    """The library uses your own process group."""
    for rank in nursery.run(fork_after_collectives, 2, tmp_path, joins):
        assert "forked" in rank.notes, rank.stderr


def end_beside_a_thread_that_frees() -> None:
    """Ends while a thread of torch's still needs the interpreter, which notes that it had it."""
    named = threading.Event()
    torch_threads._LIMIT = LIMIT  # on a busy machine the thread gets little of a second

    def free() -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, b"pt_gloo_runloop")
        named.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 300_000)  # without the GIL
        note("done")

    join_process_group()
    threading.Thread(target=free, daemon=True).start()
    assert named.wait(LIMIT)
    leave_process_group()


def test_the_interpreter_ends_when_torchs_threads_have_let_go_of_it(nursery: Nursery, tmp_path: Path) -> None:
    for rank in nursery.run(end_beside_a_thread_that_frees, 2, tmp_path):
        assert rank.code == 0 and "done" in rank.notes, rank.stderr
