"""Semaphores between processes: who has ended, and when, is known for sure."""

from __future__ import annotations

import ctypes
import os
import time
from datetime import timedelta

import pytest

from ddp_callbacks.comm import memfd as segments
from ddp_callbacks.comm.semaphores import SemaphoreChannel
from ddp_callbacks.process_group.failures import ProcessEnded

RANKS = [0, 1, 2]


def channel(fd: int, here: int) -> SemaphoreChannel:
    return SemaphoreChannel(fd, 0, RANKS, here, timedelta(seconds=20))


@pytest.fixture
def fd() -> int:
    return segments.create(SemaphoreChannel.nbytes(len(RANKS)))


def test_a_rank_that_has_signalled_and_ended_does_not_make_another_that_is_slow_a_death(fd: int) -> None:
    """A rank that has posted everything may end."""
    # A process does not see its own locks: to rank 0, rank 1 of the same process has ended.
    ready, made = os.pipe()
    gate, end = os.pipe()
    first, second = channel(fd, 0), channel(fd, 1)
    slow = os.fork()
    if slow == 0:
        os.close(end)
        third = channel(fd, 2)
        os.write(made, b"x")
        time.sleep(1)
        third.post()
        os.read(gate, 1)  # lives until the test is over
        os._exit(0)
    os.read(ready, 1)
    assert first.dead() == {1}
    second.post()
    arrival = first.missing(1)
    assert arrival is not None and first.ranks[arrival.other] == 2
    assert arrival.wait_slice(15)
    late = first.missing(2)
    assert late is not None and first.ranks[late.other] == 1
    with pytest.raises(ProcessEnded) as caught:
        late.wait_slice(5)
    assert caught.value.ranks == {1}
    os.close(end)
    os.waitpid(slow, 0)
    for descriptor in (ready, made, gate, fd):
        os.close(descriptor)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "sem_clockwait"), reason="needs a C library with sem_clockwait")
def test_a_clock_that_is_set_back_does_not_delay_a_look(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that you set back delays nothing."""
    first = channel(fd, 0)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    begin = time.monotonic()
    assert not first.sleep(1, 0.2)
    assert 0.19 < time.monotonic() - begin < 5
    os.close(fd)
