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
from ddp_callbacks.process_group.failures import announce_join
from ddp_callbacks.replicas import broadcast_parameters

# How many GPUs each process sees, the device that it asks for, and which GPUs the three processes then select.
SELECTIONS: list[tuple[int, str | None, list[list[int]]]] = [
    (1, None, [[], [], []]),  # one GPU each (Slurm's --gpus-per-task), or CPUs: it is the current one already
    (2, None, [[0], [1], []]),  # CPUs, more processes than GPUs
    (8, None, [[0], [1], [2]]),
    (8, "cpu", [[], [], []]),
    (8, "cuda:5", [[5], [5], [5]]),
]


def join_with_made_up_gpus() -> None:
    selected: list[int] = []
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    dist.is_nccl_available = lambda: False  # which a torch for CUDA has, and which refuses made-up GPUs
    cuda.set_device = lambda device: selected.append(device.index)
    for number, (visible, device, _) in enumerate(SELECTIONS):
        selected.clear()
        cuda.device_count = lambda visible=visible: visible
        env = join_process_group(init_method=f"file://{Path.cwd()}/store-{number}", device=device)
        note(f"selected {number}", [env.local_rank, *selected])
        leave_process_group()


def test_each_process_takes_its_own_gpu_and_a_run_on_cpus_takes_none(nursery: Nursery, tmp_path: Path) -> None:
    ranks = nursery.run(join_with_made_up_gpus, 3, tmp_path)
    assert [rank.code for rank in ranks] == [0, 0, 0], [rank.stderr for rank in ranks]
    for number, (*_, expected) in enumerate(SELECTIONS):
        found = [rank.notes[f"selected {number}"] for rank in ranks]
        assert found == [[rank, *gpus] for rank, gpus in enumerate(expected)], SELECTIONS[number]


def broadcasts_on_gpus(gpus: list[list[str]]) -> list[str]:
    """The error of each attempt, the first with GPUs as given, the second with others; the parameters of the last."""
    announce_join()  # so that messages can name the host
    rank, made_up = dist.get_rank(), pytest.MonkeyPatch()
    made_up.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:nccl")
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
        assert "at most as many processes on a host as it has GPUs" in shared
        assert (apart, weight) == ("", "1.0")


@pytest.mark.parametrize("visible", [1, 4])
def test_a_trainer_takes_the_one_gpu_that_its_process_sees(visible: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    strategy = CallbackStrategy(parallel_devices=[torch.device("cuda", 0)])
    strategy._cluster_environment = SimpleNamespace(local_rank=lambda: 3)
    monkeypatch.setattr(type(strategy), "local_rank", 3)
    if visible == 1:
        assert strategy.root_device == torch.device("cuda", 0)
    else:
        with pytest.raises(ConfigurationError, match="got local_rank 3 and 1 devices"):
            _ = strategy.root_device


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
