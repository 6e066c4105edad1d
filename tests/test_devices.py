"""Which GPU a process takes, where there are none: what torch says of GPUs is made up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from lightning.pytorch import LightningModule, Trainer
from nursery import HOSTNAME, Nursery, note

from ddp_callbacks import join_process_group, leave_process_group, replicas
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.lightning import CallbackStrategy
from ddp_callbacks.process_group import gpu
from ddp_callbacks.process_group.failures import announce_join
from ddp_callbacks.process_group.gpu import select_gpu
from ddp_callbacks.replicas import broadcast_parameters

# How many GPUs each process sees, the device that it asks for, and the GPU that the three processes then have: when
# they have joined, and when they have used CUDA. A list is that of what was selected, in order.
SELECTIONS: list[tuple[int, str | None, list[list[int]], list[list[int]]]] = [
    (1, None, [[], [], []], [[], [], []]),  # one GPU each (Slurm's --gpus-per-task), which is the current one
    (1, "cuda", [[], [], []], [[], [], []]),
    (2, None, [[], [], []], [[0], [1], []]),  # a run on CPUs, more processes than GPUs
    (8, None, [[], [], []], [[0], [1], [2]]),
    (8, "cuda", [[], [], []], [[0], [1], [2]]),
    (8, "cpu", [[], [], []], [[], [], []]),
    (8, "cuda:5", [[5], [5], [5]], [[5], [5], [5]]),
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
        gpu._choice = gpu._Choice()
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
    dist.is_nccl_available = lambda: False  # which a torch for CUDA has, and which refuses made-up GPUs
    for number, (visible, device, *_) in enumerate(SELECTIONS):
        gpus = MadeUpGpus(visible)
        env = join_process_group(init_method=f"file://{Path.cwd()}/store-{number}", device=device)
        note(f"joined {number}", [env.local_rank, *gpus.selected])
        note(f"started {number}", torch.cuda.is_initialized())
        torch.cuda.init()
        note(f"selected {number}", [env.local_rank, *gpus.selected])
        leave_process_group()


def test_each_process_takes_its_own_gpu_and_a_run_on_cpus_takes_none(nursery: Nursery, tmp_path: Path) -> None:
    ranks = nursery.run(join_with_made_up_gpus, 3, tmp_path)
    assert [rank.code for rank in ranks] == [0, 0, 0], [rank.stderr for rank in ranks]
    for number, (_, device, joined, used) in enumerate(SELECTIONS):
        for when, expected in (("joined", joined), ("selected", used)):
            found = [rank.notes[f"{when} {number}"] for rank in ranks]
            assert found == [[rank, *gpus] for rank, gpus in enumerate(expected)], (when, SELECTIONS[number])
        assert [rank.notes[f"started {number}"] for rank in ranks] == [device == "cuda:5"] * 3


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> MadeUpGpus:
    """Four made-up GPUs in this process; what is replaced comes back."""
    for name in ("_initialized", "_cached_device_count", "_cudart", "_lazy_seed_tracker"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    monkeypatch.setattr(torch.cuda, "_queued_calls", list(torch.cuda._queued_calls))
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")  # which CUDA would set when it starts
    monkeypatch.setattr(gpu, "_choice", gpu._choice)
    for name in ("_cuda_init", "_cuda_getDeviceCount", "_cuda_getDevice", "_cuda_setDevice"):
        monkeypatch.setattr(torch._C, name, None, raising=False)
    return MadeUpGpus(4)


def test_a_gpu_that_the_user_selects_stays(gpus: MadeUpGpus) -> None:
    select_gpu(1, None)
    torch.cuda.set_device(3)  # starts CUDA, and with it comes our choice
    assert (gpus.selected, torch.cuda.current_device()) == ([1, 3], 3)
    select_gpu(1, torch.device("cuda"))
    select_gpu(2, None)
    assert torch.cuda.current_device() == 3


def test_a_gpu_that_the_user_has_selected_before_joining_stays(gpus: MadeUpGpus) -> None:
    torch.cuda.set_device(3)
    select_gpu(1, None)
    assert gpus.selected == [3]


def test_where_cuda_has_started_with_its_first_gpu_the_own_one_is_selected_at_once(gpus: MadeUpGpus) -> None:
    torch.cuda.init()
    select_gpu(2, None)
    assert gpus.selected == [2]


def test_a_second_join_chooses_anew_and_touches_no_other_gpu(gpus: MadeUpGpus) -> None:
    select_gpu(1, None)
    select_gpu(2, None)
    assert (torch.cuda.current_device(), gpus.selected) == (2, [2])
    select_gpu(3, None)
    assert (torch.cuda.current_device(), gpus.selected) == (3, [2, 3])
    select_gpu(0, torch.device("cuda", 1))
    assert gpus.selected == [2, 3, 1]


def test_an_explicit_gpu_replaces_one_that_waits_for_cuda(gpus: MadeUpGpus) -> None:
    select_gpu(1, None)
    select_gpu(1, torch.device("cuda", 3))
    assert set(gpus.selected) == {3}


def test_gpus_that_have_gone_since_the_join_are_not_selected(gpus: MadeUpGpus, monkeypatch: pytest.MonkeyPatch) -> None:
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
    gpus: MadeUpGpus, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], processes: str
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
    made_up.setattr(torch.cuda, "device_count", lambda: 2 + rank // 2)
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
    results = run_distributed(broadcasts_on_gpus, 3, [["GPU-7"], ["GPU-1"], ["GPU-7"]])
    for shared, apart, weight in results:
        assert f"every rank needs a separate GPU, but the models of rank 0 (host {HOSTNAME}" in shared
        assert "and rank 2" in shared and "rank 1" not in shared and "on the same one, GPU-7" in shared
        assert f"3 processes on host {HOSTNAME} share 2 GPUs; each process sees 2 to 3." in shared
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
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigurationError, match='devices="auto"') as caught:
        _ = strategy_of(monkeypatch, 4, devices, local_rank).root_device
    says = f"the 4 processes of host {HOSTNAME} have {gpus} to choose from (this one has local rank {local_rank})"
    assert says in str(caught.value)


def trains_on_cpus_beside_gpus() -> None:
    cuda: Any = torch.cuda
    cuda.is_available, cuda.device_count = (lambda: True), (lambda: 8)
    cuda.set_device = lambda device: note("selected", str(device))
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=CallbackStrategy(),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), torch.utils.data.DataLoader(torch.ones(4, 1), 4))
    note("device", str(trainer.strategy.root_device))


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_trainer_on_cpus_touches_no_gpu(nursery: Nursery, tmp_path: Path) -> None:
    ranks = nursery.run(trains_on_cpus_beside_gpus, 2, tmp_path)
    assert [rank.code for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    assert [sorted(rank.notes) for rank in ranks] == [["device"], ["device"]]
    assert [rank.notes["device"] for rank in ranks] == ["cpu", "cpu"]
