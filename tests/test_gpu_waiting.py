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
from ddp_callbacks.process_group.failures import of_device, wait

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


class GpuWork(dist.Work):
    """As NCCL's: to wait orders the stream, and with a timeout it would block the host and abort."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks, self.waits = looks, 0

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        assert timeout == timedelta(0) and self.looks < 0, "nothing waits for a GPU without looking up"
        self.waits += 1
        return True


def test_work_on_a_gpu_is_looked_at_until_it_is_done_and_then_orders_the_stream() -> None:
    work: Any = GpuWork(looks=5)
    wait(of_device(work, CUDA), "a sum", None)  # type: ignore[arg-type]
    assert work.waits == 1
    stuck: Any = of_device(GpuWork(looks=10**9), CUDA)
    assert not stuck.wait_slice(0.05)


class GpuEvent:
    looks = 3

    def record(self) -> None:
        """In the current stream."""

    def query(self) -> bool:
        GpuEvent.looks -= 1
        return GpuEvent.looks < 0


def test_the_future_of_a_hook_on_a_gpu_is_awaited_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a future is done for the host when the sum is in a stream."""
    monkeypatch.setattr(torch.cuda, "Event", GpuEvent)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(torch.ones(1))
    wait(of_device(future, CUDA), "the gradients of bucket 0", None)  # type: ignore[arg-type]
    assert GpuEvent.looks < 0


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
