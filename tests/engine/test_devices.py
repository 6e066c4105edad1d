"""Which GPU a process takes, where there are none: what torch says of GPUs is made up."""

from __future__ import annotations

import importlib.util
import multiprocessing
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

from ddp_callbacks import join_process_group, leave_process_group, replicas
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.lightning import CallbackStrategy
from ddp_callbacks.process_group import gpu
from ddp_callbacks.process_group.failures import announce_join
from ddp_callbacks.replicas import broadcast_parameters

Select = Callable[..., None]
LOCAL_RANKS = (1, 2)
# How many GPUs each process sees, the device that it asks for, and the GPUs that the two processes have then selected:
# when they have joined, and when they have used CUDA.
SELECTIONS: list[tuple[int, str | None, list[list[int]], list[list[int]]]] = [
    (1, None, [[], []], [[], []]),  # one GPU each (Slurm's --gpus-per-task), which is the current one
    (1, "cuda", [[], []], [[], []]),
    (2, None, [[], []], [[1], []]),  # a run on CPUs, more processes than GPUs
    (8, None, [[], []], [[1], [2]]),
    (8, "cuda", [[], []], [[1], [2]]),
    (8, "cpu", [[], []], [[], []]),
    (8, "cuda:5", [[5], [5]], [[5], [5]]),
]


class MadeUpGpus:
    """What torch asks of CUDA, where there is none; torch's own code decides when CUDA starts.

    Attributes:
        current: The GPU of this thread.
        selected: The GPUs that were selected, in order.
    """

    def __init__(self, visible: int) -> None:
        self.current, self.selected = 0, list[int]()
        cuda: Any = torch.cuda
        cuda._initialized, cuda._cached_device_count, cuda._cudart = False, None, object()
        cuda._queued_calls.clear()  # torch looks at the properties of each GPU
        cuda._lazy_seed_tracker = type(cuda._lazy_seed_tracker)()
        c: Any = torch._C
        c._cuda_init = lambda: None
        c._cuda_getDeviceCount = lambda: visible
        c._cuda_getDevice = lambda: self.current
        c._cuda_setDevice = self.select

    def select(self, number: int) -> None:
        torch.cuda._lazy_init()  # as in C++
        self.current = number
        self.selected.append(number)


def join_with_made_up_gpus() -> None:
    """Each time in a process of its own: what it has selected stays."""
    os.environ["LOCAL_RANK"] = str(LOCAL_RANKS[int(os.environ["RANK"])])
    dist.is_nccl_available = lambda: False  # which a torch for CUDA has, and which refuses made-up GPUs
    for number in range(len(SELECTIONS)):
        process = multiprocessing.get_context("fork").Process(target=select, args=(number,))
        process.start()
        process.join(60)
        assert process.exitcode == 0, SELECTIONS[number]


def select(number: int) -> None:
    visible, device, *_ = SELECTIONS[number]
    gpus = MadeUpGpus(visible)
    join_process_group(init_method=f"file://{Path.cwd()}/store-{number}", device=device)
    note(f"joined {number}", gpus.selected)
    note(f"started {number}", torch.cuda.is_initialized())
    torch.cuda.init()
    note(f"selected {number}", gpus.selected)
    leave_process_group()


def test_each_process_takes_its_own_gpu_and_a_run_on_cpus_takes_none(nursery: Nursery, tmp_path: Path) -> None:
    """Each process takes its own GPU, if any."""
    ranks = nursery.run(join_with_made_up_gpus, 2, tmp_path)
    assert [rank.code for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    for number, (_, device, joined, used) in enumerate(SELECTIONS):
        for when, expected in (("joined", joined), ("selected", used)):
            assert [rank.notes[f"{when} {number}"] for rank in ranks] == expected, (when, SELECTIONS[number])
        assert [rank.notes[f"started {number}"] for rank in ranks] == [device == "cuda:5"] * 2


@pytest.fixture
def select_gpu() -> Select:
    """As in a process that has not selected any GPU."""
    spec = importlib.util.spec_from_file_location("a_gpu_of_its_own", gpu.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.select_gpu


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> MadeUpGpus:
    """Four made-up GPUs in this process; what is replaced comes back."""
    for name in ("_initialized", "_cached_device_count", "_cudart", "_lazy_seed_tracker"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    monkeypatch.setattr(torch.cuda, "_queued_calls", list(torch.cuda._queued_calls))
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")  # which CUDA would set when it starts
    for name in ("_cuda_init", "_cuda_getDeviceCount", "_cuda_getDevice", "_cuda_setDevice"):
        monkeypatch.setattr(torch._C, name, None, raising=False)
    return MadeUpGpus(4)


def test_a_gpu_that_the_user_selects_stays(gpus: MadeUpGpus, select_gpu: Select) -> None:
    """A GPU that you select stays."""
    select_gpu(1, None)
    torch.cuda.set_device(3)  # starts CUDA, and with it comes our choice
    assert (gpus.selected, torch.cuda.current_device()) == ([1, 3], 3)
    select_gpu(1, torch.device("cuda"))
    select_gpu(2, None)
    assert torch.cuda.current_device() == 3


def test_a_gpu_that_the_user_has_selected_before_joining_stays(gpus: MadeUpGpus, select_gpu: Select) -> None:
    torch.cuda.set_device(3)
    select_gpu(1, None)
    assert gpus.selected == [3]


def test_where_cuda_has_started_with_its_first_gpu_the_own_one_is_selected_at_once(
    gpus: MadeUpGpus, select_gpu: Select
) -> None:
    torch.cuda.init()
    select_gpu(2, None)
    assert gpus.selected == [2]


def test_a_second_join_chooses_anew_and_touches_no_other_gpu(gpus: MadeUpGpus, select_gpu: Select) -> None:
    select_gpu(1, None)
    select_gpu(2, None)
    assert (torch.cuda.current_device(), gpus.selected) == (2, [2])
    select_gpu(3, None)
    assert (torch.cuda.current_device(), gpus.selected) == (3, [2, 3])
    select_gpu(0, torch.device("cuda", 1))
    assert gpus.selected == [2, 3, 1]


def test_an_explicit_gpu_replaces_one_that_waits_for_cuda(gpus: MadeUpGpus, select_gpu: Select) -> None:
    select_gpu(1, None)
    select_gpu(1, torch.device("cuda", 3))
    assert set(gpus.selected) == {3}


def test_gpus_that_have_gone_since_the_join_are_not_selected(
    gpus: MadeUpGpus, select_gpu: Select, monkeypatch: pytest.MonkeyPatch
) -> None:
    select_gpu(3, None)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 1)  # CUDA_VISIBLE_DEVICES is another
    torch.cuda.init()
    assert gpus.selected == []


OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": "8" for name in ("SIZE", "LOCAL_SIZE")} | {
    f"OMPI_COMM_WORLD_{name}": "4" for name in ("RANK", "LOCAL_RANK")
}


@pytest.mark.parametrize(
    ("environ", "processes"), [({}, "at least 5"), ({"LOCAL_WORLD_SIZE": "6"}, "6"), (OPEN_MPI, "8")]
)
def test_cuda_where_there_are_more_processes_than_gpus_is_an_error_that_counts_both(
    gpus: MadeUpGpus, select_gpu: Select, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], processes: str
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    says = rf"the {processes} processes of host {HOSTNAME} have 4 GPUs to choose from \(this one has local rank 4\)"
    with pytest.raises(ConfigurationError, match=says):
        select_gpu(4, torch.device("cuda"))
    select_gpu(4, None)  # it may be a run on CPUs
    assert gpus.selected == []


def broadcasts_on_gpus(gpus: list[list[str]]) -> list[str]:
    """The error of each attempt, the first with GPUs as given, the second with others; the parameters of the last."""
    announce_join()  # so that messages can name the host
    rank, made_up = dist.get_rank(), pytest.MonkeyPatch()
    made_up.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:nccl")
    made_up.setattr(torch.cuda, "device_count", lambda: 1 + rank)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, rank + 1.0)
    errors = []
    for own in (gpus[rank], [f"GPU-{rank}"]):
        made_up.setattr(replicas, "_gpus_of", lambda module, own=own: own)
        try:
            broadcast_parameters(model)
            errors.append("")
        except ConfigurationError as error:
            errors.append(str(error))
    made_up.undo()
    return [*errors, str(model.weight.item())]


def test_two_processes_with_their_models_on_one_gpu_are_named_before_they_train() -> None:
    """An error names processes that share a GPU."""
    for shared, apart, weight in run_distributed(broadcasts_on_gpus, 2, [["GPU-7"], ["GPU-7"]]):
        assert f"every rank needs a separate GPU, but the models of rank 0 (host {HOSTNAME}" in shared
        assert "and rank 1" in shared and "on the same one, GPU-7" in shared
        assert f"2 processes on host {HOSTNAME} share 1 GPU; each process sees 1 to 2." in shared
        assert "at most as many processes on a host as it has GPUs" in shared
        assert (apart, weight) == ("", "1.0")


def strategy_of(monkeypatch: pytest.MonkeyPatch, visible: int, devices: int, local_rank: int) -> CallbackStrategy:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    strategy = CallbackStrategy(parallel_devices=[torch.device("cuda", number) for number in range(devices)])
    strategy._cluster_environment = SimpleNamespace(local_rank=lambda: local_rank)
    monkeypatch.setattr(type(strategy), "local_rank", local_rank)
    return strategy


def test_a_trainer_takes_the_one_gpu_that_its_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert strategy_of(monkeypatch, 1, 1, 3).root_device == torch.device("cuda", 0)


@pytest.mark.parametrize("local_rank", [0, 3])
def test_a_trainer_takes_the_gpu_of_its_local_rank(local_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert strategy_of(monkeypatch, 4, 4, local_rank).root_device == torch.device("cuda", local_rank)


@pytest.mark.parametrize("local_rank", [0, 3])
@pytest.mark.parametrize(("devices", "gpus"), [(1, "1 GPU"), (2, "2 GPUs")])
def test_a_trainer_with_more_processes_than_gpus_is_an_error_on_all_of_them(
    local_rank: int, devices: int, gpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More processes than GPUs raise an error that counts both."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigurationError, match='devices="auto"') as caught:
        _ = strategy_of(monkeypatch, 4, devices, local_rank).root_device
    says = f"the 4 processes of host {HOSTNAME} have {gpus} to choose from (this one has local rank {local_rank})"
    assert says in str(caught.value)


def trains_on_cpus_beside_gpus() -> None:
    cuda: Any = torch.cuda
    cuda.is_available, cuda.device_count = (lambda: True), (lambda: 8)
    cuda.set_device = lambda device: note("selected", str(device))
    with quiet():
        made = trainer(CallbackStrategy(), devices=2, max_epochs=1, logger=False)
        made.fit(Net(), loader(8, 4))
    note("device", str(made.strategy.root_device))


def test_a_trainer_on_cpus_touches_no_gpu(nursery: Nursery, tmp_path: Path) -> None:
    ranks = nursery.run(trains_on_cpus_beside_gpus, 2, tmp_path)
    assert [rank.code for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    assert [sorted(rank.notes) for rank in ranks] == [["device"], ["device"]]
    assert [rank.notes["device"] for rank in ranks] == ["cpu", "cpu"]
