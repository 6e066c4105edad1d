"""Waiting and ending where there are GPUs, without one: by the device of the work, not by what the process has used."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.ranks import HOSTNAME, Nursery, note, run_distributed

from ddp_callbacks import join_process_group
from ddp_callbacks.comm.collectives import all_reduce, any_rank, broadcast
from ddp_callbacks.errors import PeerError
from ddp_callbacks.process_group import presence, resolve_group, runs
from ddp_callbacks.process_group.coordinator import FOREVER
from ddp_callbacks.process_group.failures import (
    Launched,
    announce_join,
    enter,
    launching,
    of_device,
    report_failure,
    wait,
)
from ddp_callbacks.process_group.presence import is_aborted
from ddp_callbacks.process_group.runs import begin_run

CUDA = torch.device("cuda")


def my_rank() -> int:
    return int(os.environ["RANK"])


class NcclWork(dist.Work):
    """As NCCL's: to wait orders the stream, and with a timeout it would block the host and abort."""

    waits = 0

    def is_completed(self) -> bool:
        return False  # the GPU has not come to it

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        assert timeout == timedelta(0), "the host waits for its GPU"
        self.waits += 1
        return True


class Group(SimpleNamespace):
    """Other than its base, and like torch's, it can be referred to weakly."""


def group_of(accelerator: Any, on_cpu: Any = None) -> Any:
    """A group for CPUs and GPUs, whose backends these are."""
    return Group(
        _device_types=[torch.device("cpu"), CUDA],
        _get_backend=lambda device: on_cpu if device.type == "cpu" else accelerator,
    )


@pytest.mark.parametrize(("backend", "device"), [("nccl", "cuda"), ("gloo", "cuda"), ("nccl", "cpu")])
def test_the_host_waits_for_a_sum_unless_it_is_in_a_stream(backend: str, device: str) -> None:
    named, work = SimpleNamespace(name=lambda: backend), NcclWork()
    launched = of_device(work, torch.device(device), group_of(named, named))  # type: ignore[arg-type]
    if (backend, device) == ("nccl", "cuda"):
        wait(launched, "a sum", None)  # type: ignore[arg-type]
        assert work.waits == 1
    else:
        assert launched is work  # for which the host waits in slices


def test_a_hook_is_launched_when_its_future_is_done_for_the_host() -> None:
    # On a GPU, to wait for the future itself would let backward wait for the sum.

    class Future(torch.futures.Future):  # type: ignore[type-arg]
        def wait(self) -> Any:
            raise AssertionError("backward waits for the sum")

    future = Future()
    assert not Launched(future).wait_slice(0.01)
    future.set_result(torch.ones(1))
    wait(Launched(future), "the gradients of bucket 0", None)  # type: ignore[arg-type]


class Accelerator:
    """A backend whose operations never end, until they are aborted."""

    def __init__(self) -> None:
        self.aborts, self.aborted = 0, threading.Event()

    def abort(self) -> None:
        self.aborts += 1
        self.aborted.set()


# --- a host that waits for its GPU ------------------------------------------------------------------------------------


def join_with_an_accelerator() -> Accelerator:
    """Beside the group of gloo, there is one of made-up GPUs; once this rank has left, it notes the aborts."""
    torch.cuda.is_initialized = lambda: True
    accelerator, known = Accelerator(), presence.known_groups
    atexit.register(lambda: note("aborts", accelerator.aborts))
    join_process_group()
    group = group_of(accelerator)
    for module in (presence, runs):
        module.known_groups = lambda: [*known(), group]  # type: ignore[attr-defined]
    return accelerator


def wait_in_the_driver(accelerator: Accelerator) -> None:
    """As ``loss.item()`` where a rank does not take part in a sum."""
    assert accelerator.aborted.wait(60), "nobody frees this rank"
    note("freed")


def lose_a_rank(lost: int, end: str) -> None:
    accelerator = join_with_an_accelerator()
    any_rank(False, "the first step")
    if my_rank() == lost:
        note("happens")
        if end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the data are gone")
    wait_in_the_driver(accelerator)
    with pytest.raises(PeerError) as launch, launching("a sum on GPUs", resolve_group()):
        note("launched")
    with pytest.raises(PeerError) as waiting:
        wait(_Done(), "the sum on GPUs", resolve_group())
    with pytest.raises(PeerError) as exchange:
        broadcast(torch.ones(3), "the parameters")
    note("says", [str(caught.value) for caught in (launch, waiting, exchange)])


class _Done(dist.Work):
    """What was aborted counts as done."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True


@pytest.mark.parametrize("lost", [0, 1])  # all are connected to rank 0
@pytest.mark.parametrize("end", ["kill", "raise"])
def test_a_host_that_waits_for_its_gpu_is_freed_where_a_rank_is_lost(
    nursery: Nursery, tmp_path: Path, lost: int, end: str
) -> None:
    """A lost rank frees programs that wait for GPUs."""
    ranks = nursery.run_watched(lose_a_rank, 2, tmp_path, lost, end)
    gone, freed = ranks[lost], ranks[1 - lost]
    assert freed.code == 0, freed.stderr
    assert freed.noted_at["freed"] - gone.noted_at["happens"] < 4 * freed.slowness
    assert freed.notes["aborts"] == 1 and "launched" not in freed.notes
    assert end == "kill" or gone.notes["aborts"] == 1, "a rank that has failed waits for no sum on GPUs when it leaves"
    for text in freed.notes["says"]:
        if end == "raise":
            assert f"rank {lost} (host {HOSTNAME}, pid {gone.pid}) failed with ValueError: the data are gone" in text
        else:
            assert f"rank {lost} (host {HOSTNAME}, pid {gone.pid}) died or went silent" in text


def fail_in_one_run() -> None:
    """Rank 1 gives up a run in which rank 0 waits for it; both have entered the same exchanges."""
    torch.set_num_threads(1)
    accelerator = join_with_an_accelerator()
    begin_run()
    world = dist.group.WORLD
    any_rank(False, "a step")
    if my_rank() == 1:
        report_failure(torch.OutOfMemoryError("no room for the batch"))
    wait_in_the_driver(accelerator)
    was_aborted = is_aborted()
    begin_run()
    total = all_reduce(torch.tensor([my_rank() + 1.0]), "the next step").item()
    note("found", [was_aborted, is_aborted(), dist.group.WORLD is world, total])


def test_after_an_abort_the_next_run_has_a_new_group(nursery: Nursery, tmp_path: Path) -> None:
    """After an abort the next run has a new group."""
    for rank in nursery.run(fail_in_one_run, 2, tmp_path):
        assert rank.code == 0, rank.stderr
        assert (rank.notes["found"], rank.notes["aborts"]) == ([True, False, False, 3.0], 1)


def end_in_order(ends: list[int]) -> list[int]:
    """How often this rank has aborted after the end of its run, and in the next one, if a run was ended."""
    accelerator, found = Accelerator(), []
    presence.known_groups = lambda: [group_of(accelerator)]  # type: ignore[attr-defined]
    for run in ends:
        here = presence.join(dist.HashStore(), my_rank(), 2)
        here.abort_failed_run()
        assert not here.end_run()
        here.heard.note({"event": "end", "run": run, "kind": "gone", "ranks": [1]})
        here.abort_failed_run()
        found.append(accelerator.aborts)
        here.begin(1)
        here.abort_failed_run()
        found.append(accelerator.aborts)
        here.leave()
    return found


def test_a_rank_that_has_come_to_the_end_of_its_run_aborts_nothing_there() -> None:
    # It has told the others that its communicators are whole. A failure of the run before is over.
    assert run_distributed(end_in_order, 2, [0, FOREVER]) == [[0, 0, 0, 1]] * 2


def launch_in_vain() -> list[str]:
    announce_join()
    says = []
    for error in (dist.DistBackendError("remote process exited"), RuntimeError("no such dtype")):
        with pytest.raises(RuntimeError) as caught, launching("a sum", resolve_group()):
            enter("a sum")
            raise error
        says.append(f"{type(caught.value).__name__}: {caught.value}")
    return says


def test_an_error_of_the_backend_is_explained_where_a_collective_is_launched() -> None:
    """Launching a collective names a lost rank."""
    for explained, other in run_distributed(launch_in_vain, 2):
        assert explained.startswith("PeerError: ") and "in vain, though every rank is alive" in explained
        assert explained.endswith("First error: remote process exited")
        assert other == "RuntimeError: no such dtype"
