"""Waiting and ending where there are GPUs, without one: by the device of the work, not by what the process has used."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nursery import HOSTNAME, Nursery, note, noting_errors

from ddp_callbacks import join_process_group
from ddp_callbacks.comm.collectives import broadcast
from ddp_callbacks.process_group import runs
from ddp_callbacks.process_group.failures import Launched, of_device, wait

CUDA = torch.device("cuda", 0)


def fail_beside_cuda() -> None:
    torch.cuda.is_initialized = lambda: True
    join_process_group()
    if os.environ["RANK"] == "1":
        note("happens")
        raise ValueError("the data of rank 1 are gone")
    with noting_errors():
        broadcast(torch.ones(3), "a broadcast by gloo")


def test_a_failure_is_known_in_seconds_where_cuda_is_initialized(nursery: Nursery, tmp_path: Path) -> None:
    first, second = nursery.run_watched(fail_beside_cuda, 2, tmp_path)
    kind, text = first.notes["error"]
    assert kind == "PeerError"
    assert f"rank 1 (host {HOSTNAME}, pid {second.pid}) failed with ValueError: the data of rank 1 are gone" in text
    assert first.noted_at["error"] - second.noted_at["happens"] < 4 * first.slowness


class NcclWork(dist.Work):
    """As NCCL's: to wait orders the stream, and with a timeout it would block the host and abort."""

    waits = 0

    def is_completed(self) -> bool:
        return False  # the GPU has not come to it

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        assert timeout == timedelta(0), "the host waits for its GPU"
        self.waits += 1
        return True


def group_by(backend: str) -> Any:
    return SimpleNamespace(_get_backend=lambda device: SimpleNamespace(name=lambda: backend))


def test_the_host_does_not_wait_for_a_sum_in_a_stream() -> None:
    work: Any = NcclWork()
    wait(of_device(work, CUDA, group_by("nccl")), "a sum", None)  # type: ignore[arg-type]
    assert work.waits == 1


@pytest.mark.parametrize(("backend", "device"), [("gloo", CUDA), ("nccl", torch.device("cpu"))])
def test_the_host_waits_in_slices_for_a_sum_by_gloo(backend: str, device: torch.device) -> None:
    work: Any = NcclWork()
    assert of_device(work, device, group_by(backend)) is work


def test_a_hook_is_launched_when_its_future_is_done_for_the_host() -> None:
    """On a GPU, to wait for the future itself would let backward wait for the sum."""

    class Future(torch.futures.Future):  # type: ignore[type-arg]
        def wait(self) -> Any:
            raise AssertionError("backward waits for the sum")

    future = Future()
    assert not Launched(future).wait_slice(0.01)
    future.set_result(torch.ones(1))
    wait(Launched(future), "the gradients of bucket 0", None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("failed", "aborted"), [(True, [CUDA]), (False, [])])
def test_after_a_failure_the_communicators_of_gpus_are_aborted(
    monkeypatch: pytest.MonkeyPatch, failed: bool, aborted: list[torch.device]
) -> None:
    calls: list[Any] = []
    group = SimpleNamespace(
        _device_types=[torch.device("cpu"), CUDA],
        _get_backend=lambda device: SimpleNamespace(abort=lambda: calls.append(device)),
    )
    monkeypatch.setattr(runs, "known_groups", lambda: [group])
    monkeypatch.setattr(runs.dist, "destroy_process_group", lambda: calls.append("destroyed"))
    monkeypatch.setattr(runs, "presence", lambda: SimpleNamespace(failed=failed))
    runs.destroy_groups()
    assert calls == [*aborted, "destroyed"]
