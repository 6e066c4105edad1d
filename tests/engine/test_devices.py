"""Which GPU a process takes, where there are none: what torch says of GPUs is made up."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.ranks import HOSTNAME, Nursery, note, run_distributed
from trainers import Net, loader, quiet, trainer

from ddp_callbacks import join_process_group, leave_process_group
from ddp_callbacks.cluster.environment import KEEP_GOING
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.lightning import CallbackStrategy
from ddp_callbacks.process_group import gpu
from ddp_callbacks.process_group.failures import announce_join
from ddp_callbacks.replicas import parameters as replicas
from ddp_callbacks.replicas.parameters import broadcast_parameters


class MadeUpGpus:
    """What torch asks of CUDA, where there is none; torch's own code decides when CUDA starts.

    Attributes:
        visible: How many GPUs there are.
        current: The GPU of this thread.
        selected: The GPUs that were selected, in order.
    """

    def __init__(self, visible: int) -> None:
        self.visible, self.current, self.selected = visible, 0, list[int]()
        cuda: Any = torch.cuda
        cuda._initialized, cuda._cached_device_count, cuda._cudart = False, None, object()
        cuda._queued_calls.clear()  # torch looks at the properties of each GPU
        cuda._lazy_seed_tracker = type(cuda._lazy_seed_tracker)()
        c: Any = torch._C
        c._cuda_init = lambda: None
        c._cuda_getDeviceCount = lambda: self.visible
        c._cuda_getDevice = lambda: self.current
        c._cuda_setDevice = self.select

    def select(self, number: int) -> None:
        torch.cuda._lazy_init()  # as in C++
        self.current = number
        self.selected.append(number)


def join_with_made_up_gpus() -> None:
    os.environ["LOCAL_RANK"] = str(1 + int(os.environ["RANK"]))
    dist.is_nccl_available = lambda: False  # which a torch for CUDA has, and which refuses made-up GPUs
    gpus = MadeUpGpus(8)
    join_process_group()
    note("has started", torch.cuda.is_initialized())
    torch.cuda.init()
    note("selected", gpus.selected)
    leave_process_group()


def train_on_cpus_beside_gpus() -> None:
    cuda: Any = torch.cuda
    cuda.is_available, cuda.device_count, selected = (lambda: True), (lambda: 8), []
    cuda.set_device = selected.append
    with quiet():
        made = trainer(CallbackStrategy(), devices=2, max_epochs=1, logger=False)
        made.fit(Net(), loader(8, 4))
    note("has started", made.strategy.root_device != torch.device("cpu"))
    note("selected", list(map(str, selected)))


@pytest.mark.parametrize(
    ("body", "selected"), [(join_with_made_up_gpus, [[1], [2]]), (train_on_cpus_beside_gpus, [[], []])]
)
def test_each_process_takes_its_own_gpu_and_a_run_on_cpus_takes_none(
    nursery: Nursery, tmp_path: Path, body: Callable[[], None], selected: list[list[int]]
) -> None:
    """Each process takes its own GPU, if any."""
    ranks = nursery.run(body, 2, tmp_path)
    assert [rank.code for rank in ranks] == [0, 0], "\n".join(rank.stderr for rank in ranks)
    assert [rank.notes for rank in ranks] == [{"has started": False, "selected": own} for own in selected]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> MadeUpGpus:
    """Four made-up GPUs in this process, which has not selected any; what is replaced comes back."""
    for name in ("_initialized", "_cached_device_count", "_cudart", "_lazy_seed_tracker"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    monkeypatch.setattr(torch.cuda, "_queued_calls", list(torch.cuda._queued_calls))
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")  # which CUDA would set when it starts
    for name in ("_cuda_init", "_cuda_getDeviceCount", "_cuda_getDevice", "_cuda_setDevice"):
        monkeypatch.setattr(torch._C, name, None, raising=False)
    return MadeUpGpus(4)


# How many GPUs there are, what happens in turn, and the GPUs that are selected: a process of that local rank joins for
# a device, the user selects a GPU, CUDA starts, or so many GPUs are left.
START = ("starts", None, None)
TURNS: dict[str, tuple[int, list[tuple[str, Any, Any]], list[int]]] = {
    "nothing on a GPU": (4, [("joins", 2, None)], []),
    "its own": (4, [("joins", 2, None), START], [2]),
    "its own, asked for": (4, [("joins", 2, "cuda"), START], [2]),
    "on the CPU": (4, [("joins", 2, "cpu"), START], []),
    "the only one": (1, [("joins", 2, None), ("joins", 2, "cuda"), START], []),
    "more processes than GPUs": (2, [("joins", 2, None), START], []),
    "by its number": (4, [("joins", 0, "cuda:3"), ("joins", 0, None)], [3]),
    "selected behind the join": (4, [("joins", 1, None), ("selects", 3, None), ("joins", 1, "cuda")], [1, 3]),
    "selected before the join": (4, [("selects", 3, None), ("joins", 1, None), ("joins", 2, "cuda")], [3]),
    "CUDA has started": (4, [START, ("joins", 2, None)], [2]),
    "joins again": (4, [("joins", 2, None), ("joins", 2, None), START, ("joins", 2, None)], [2]),
    "GPUs that have gone": (4, [("joins", 3, None), ("loses", 1, None), START], []),
}


@pytest.mark.parametrize("name", TURNS)
def test_a_gpu_that_the_user_selects_stays(gpus: MadeUpGpus, name: str) -> None:
    """A GPU that you select stays."""
    gpus.visible, turns, selected = TURNS[name]
    for what, number, device in turns:
        if what == "joins":
            gpu.select_gpu(number, None if device is None else torch.device(device))
        elif what == "selects":
            torch.cuda.set_device(number)
        elif what == "loses":
            gpus.visible = number
        else:
            torch.cuda.init()
    assert [*dict.fromkeys(gpus.selected)] == selected


@pytest.mark.parametrize(("told", "processes"), [("", "at least 5"), ("6", "6")])
def test_cuda_where_there_are_more_processes_than_gpus_is_an_error_that_counts_both(
    gpus: MadeUpGpus, monkeypatch: pytest.MonkeyPatch, told: str, processes: str
) -> None:
    if told:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    says = rf"the {processes} processes of host {HOSTNAME} have 4 GPUs to choose from \(this one has local rank 4\)"
    with pytest.raises(ConfigurationError, match=says):
        gpu.select_gpu(4, torch.device("cuda"))
    gpu.select_gpu(4, None)  # it may be a run on CPUs
    assert gpus.selected == []


def broadcast_from(gpus: list[str]) -> str:
    """The error, or the parameter of rank 0, where the models of the ranks are on these GPUs."""
    announce_join()  # so that messages can name the host
    rank, model = dist.get_rank(), torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, rank + 1.0)
    with pytest.MonkeyPatch.context() as made_up:
        made_up.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:nccl")
        made_up.setattr(replicas, "_gpus_of", lambda module: [gpus[rank]])
        try:
            broadcast_parameters(model)
        except ConfigurationError as error:
            return str(error)
    return str(model.weight.item())


def broadcast_on_gpus() -> tuple[str, ...]:
    found = [broadcast_from(gpus) for gpus in (["GPU-7", "GPU-7"], ["GPU-0", "GPU-1"])]
    os.environ[KEEP_GOING] = "1"
    return *found, broadcast_from(["GPU-0", "GPU-1"])


def test_two_processes_with_their_models_on_one_gpu_are_named_before_they_train() -> None:
    """An error names processes that share a GPU."""
    for shared, apart, keep_going in run_distributed(broadcast_on_gpus, 2):
        assert "ddprun --keep-going cannot continue" in keep_going and 'backend="gloo"' in keep_going
        assert f"every rank needs a separate GPU, but the models of rank 0 (host {HOSTNAME}" in shared
        assert "and rank 1" in shared and "on the same one, GPU-7" in shared
        assert "Start at most as many processes on a host as it has GPUs" in shared
        assert apart == "1.0"


@pytest.mark.parametrize("local_rank", [0, 3])
@pytest.mark.parametrize(("visible", "devices", "found"), [(1, 1, 0), (4, 4, None), (4, 1, "1 GPU"), (4, 2, "2 GPUs")])
def test_a_trainer_takes_the_gpu_of_its_local_rank_or_the_only_one(
    monkeypatch: pytest.MonkeyPatch, visible: int, devices: int, found: Any, local_rank: int
) -> None:
    """More processes than GPUs raise an error that counts both."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    strategy = CallbackStrategy(parallel_devices=[torch.device("cuda", number) for number in range(devices)])
    strategy._cluster_environment = SimpleNamespace(local_rank=lambda: local_rank)
    monkeypatch.setattr(type(strategy), "local_rank", local_rank)
    if isinstance(found, str):
        with pytest.raises(ConfigurationError, match='devices="auto"') as caught:
            _ = strategy.root_device
        says = f"the 4 processes of host {HOSTNAME} have {found} to choose from (this one has local rank {local_rank})"
        assert says in str(caught.value)
    else:
        assert strategy.root_device == torch.device("cuda", local_rank if found is None else found)
