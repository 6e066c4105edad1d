"""What is summed, broadcast, compared or merged is equal on all ranks, and equal to what one process has."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_worlds import TWO, WIDE, World, by_rank
from torch import Tensor, nn

from ddp_callbacks.comm.agreement import differences, module_settings, optimizer_settings, require_agreement
from ddp_callbacks.comm.collectives import (
    all_gather_json,
    all_gather_tensors,
    all_reduce,
    any_rank,
    broadcast,
    broadcast_tensors,
)
from ddp_callbacks.data.random_state import SharedRandomState, broadcast_rng_state, get_global_state, seed_by_rank
from ddp_callbacks.errors import MismatchError
from ddp_callbacks.process_group import join_process_group
from ddp_callbacks.replicas import MESSAGE_NBYTES, broadcast_optimizer_state, broadcast_parameters, merge_buffers

pytestmark = pytest.mark.shares_results()
WORLD = World(__name__)


def test_in_a_world_of_one_every_collective_is_the_identity() -> None:
    """On one process every collective returns its input."""
    tensor = torch.tensor([1.0, 2.0])
    assert all_reduce(tensor, "a test") is tensor
    assert broadcast(tensor, "a test") is tensor
    assert tensor.tolist() == [1, 2]
    assert (any_rank(True, "a test"), any_rank(False, "a test")) == (True, False)
    assert all_gather_json({"a": 1}, "a test") == [{"a": 1}]
    assert all_gather_tensors("header", [tensor], "a test") == [("header", [tensor])]
    assert broadcast_tensors("header", [tensor], "a test") == ("header", [tensor])
    require_agreement({"a": 1}, "a test", "Nothing to do.")
    model = nn.BatchNorm1d(2)
    before = [buffer.clone() for buffer in model.state_dict().values()], get_global_state(False)
    broadcast_parameters(model)
    merge_buffers(model, 3)
    broadcast_optimizer_state(torch.optim.SGD(model.parameters(), 0.1))
    seed_by_rank()
    broadcast_rng_state()
    shared = SharedRandomState([SimpleNamespace(generator=torch.Generator())])
    assert str(([*model.state_dict().values()], get_global_state(False))) == str(before)
    torch.manual_seed(5)
    with shared.drawing():
        assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(5)))


# --- messages ---------------------------------------------------------------------------------------------------------

SENT = (torch.float64, torch.bfloat16, torch.float32)  # by rank


@WORLD.on(TWO, WIDE)
def test_all_ranks_get_every_ranks_tensors_though_number_shape_and_dtype_differ() -> None:
    """Gathers, sums and broadcasts give all ranks the same values."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = [torch.full((rank, 2), rank, dtype=SENT[rank]), torch.tensor(rank == 1)][: rank + 1]
    gathered = all_gather_tensors({"rank": rank, "nan": math.nan, "text": "ü" * rank}, own, "a test")
    assert [(header["rank"], header["text"]) for header, _ in gathered] == [(each, "ü" * each) for each in range(size)]
    assert all(math.isnan(header["nan"]) for header, _ in gathered)
    expected = [(SENT[0], []), (SENT[1], [[1, 1]]), (torch.bool, True), (SENT[2], [[2, 2]] * 2), (torch.bool, False)]
    found = [(tensor.dtype, tensor.tolist()) for _, tensors in gathered for tensor in tensors]
    assert found == expected[: 2 * size - 1]
    assert all_gather_tensors(None, [], "a test") == [(None, [])] * size
    assert all_gather_json([rank], "a test") == [[each] for each in range(size)]


@WORLD.on(TWO, WIDE)
def test_sums_are_sums_over_the_ranks_at_every_size() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    total = sum(range(size))
    assert all_reduce(torch.tensor([rank + 1, 10]), "a test").tolist() == [total + size, 10 * size]
    # Above and below the size from which gloo's ring takes over from the gather.
    for n in (1000, 200_000):
        summed = all_reduce(torch.full((n,), rank + 1.5, dtype=torch.float64), "a test")
        assert (summed == total + 1.5 * size).all()
    assert all_reduce(torch.tensor([rank + 1j]), "a test").item() == total + size * 1j
    assert len(all_reduce(torch.empty(0), "a test")) == 0
    assert [any_rank(flag, "a test") for flag in (False, True, rank == 1, rank == 0)] == [False, True, True, True]


@WORLD
def test_a_broadcast_overwrites_in_place_with_the_values_of_rank_0() -> None:
    rank = dist.get_rank()
    for value, expected in (
        (torch.tensor(rank + 5), 5),
        (torch.full((2, 2), rank + 0.5), [[0.5, 0.5], [0.5, 0.5]]),
        (torch.tensor([rank + 1j]), [1j]),
        (torch.tensor([rank == 0]), [True]),
    ):
        assert broadcast(value, "a test") is value and value.tolist() == expected
    header, parts = broadcast_tensors({"rank": rank}, [torch.tensor(rank)] * (1 - rank), "a test")
    assert header == {"rank": 0} and [part.tolist() for part in parts] == [0]


# --- start equal ------------------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """Parameters and buffers of many dtypes, layouts and sizes, one shared, one buffer that is ``None``."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.linear.weight
        self.image = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(3)
        self.low = nn.Parameter(torch.randn(2, 2, dtype=torch.bfloat16), requires_grad=False)
        self.complex = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.transposed = nn.Parameter(torch.randn(2, 3).t())
        self.scalar = nn.Parameter(torch.randn((), dtype=torch.float64))
        self.empty = nn.Parameter(torch.randn(0, 2))
        self.register_buffer("flags", torch.rand(5) < 0.5)
        self.register_buffer("count", torch.randint(1000, (2,)))
        self.register_buffer("hidden", torch.randn(2), persistent=False)
        # Views that torch conjugates and negates when they are read.
        self.register_buffer("conjugate", torch.randn(2, dtype=torch.complex128).conj())
        self.register_buffer("negative", torch.randn(1, dtype=torch.complex64).conj().imag)
        self.register_buffer("none", None)


def contents(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


@WORLD
def test_every_parameter_and_buffer_becomes_rank_0s_in_place() -> None:
    """All ranks start with rank 0's model and optimizer."""
    expected = contents(Everything(seed=0))
    for nbytes in (MESSAGE_NBYTES, 40, 1):  # in common messages, with some of the tensors alone, and with all alone
        model = Everything(seed=dist.get_rank())
        before = [(id(tensor), tensor.stride(), tensor.data_ptr()) for tensor in model.parameters()]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ddp_callbacks.replicas.MESSAGE_NBYTES", nbytes)
            broadcast_parameters(model)
        assert [(id(tensor), tensor.stride(), tensor.data_ptr()) for tensor in model.parameters()] == before
        received = contents(model)
        assert list(received) == list(expected)
        assert all(torch.equal(received[name], expected[name]) for name in expected)


@WORLD
def test_large_parameters_are_broadcast_without_a_copy() -> None:
    """Large parameters travel without a copy."""
    clear_refs = Path("/proc/self/clear_refs")  # of Linux
    if not clear_refs.exists():
        return
    model = nn.Sequential(*(nn.Linear(2048, 4096) for _ in range(2)))  # 64 MiB
    broadcast_parameters(nn.Linear(8, 8))
    clear_refs.write_text("5")  # the peak starts anew
    resident = status("VmRSS")
    broadcast_parameters(model)
    assert status("VmHWM") - resident < 16 << 20


def status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9, nesterov=True),
    "Adam with a tensor as lr": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.3), foreach=False),
    "two groups": lambda parameters: torch.optim.SGD(
        [{"params": parameters[:1], "lr": 0.4, "name": "first"}, {"params": parameters[1:]}], lr=0.5
    ),
}


def stepped(name: str, seed: int, steps: int, lr_factor: float) -> torch.optim.Optimizer:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * lr_factor
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
    return optimizer


@WORLD
def test_state_and_hyperparameters_of_the_optimizer_become_rank_0s() -> None:
    rank = dist.get_rank()
    for name, steps in itertools.product(OPTIMIZERS, (5, 0)):  # rank 1 has another state, then none
        expected = stepped(name, seed=0, steps=3, lr_factor=1).state_dict()
        optimizer = stepped(name, seed=rank, steps=(3, steps)[rank], lr_factor=rank + 1)
        broadcast_optimizer_state(optimizer)
        found = optimizer.state_dict()
        assert str(found) == str(expected)
        for index, state in expected["state"].items():
            for key, value in state.items():
                assert value is None or torch.equal(found["state"][index][key], value), (index, key)


@WORLD
def test_an_optimizer_with_other_groups_raises_as_load_state_dict_does() -> None:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(1 + dist.get_rank())]
    refused = pytest.raises(ValueError, match="loaded state dict contains a parameter group that doesn't match")
    with refused if dist.get_rank() else contextlib.nullcontext():
        broadcast_optimizer_state(torch.optim.SGD(parameters, 0.1))


# --- buffers before an evaluation -------------------------------------------------------------------------------------

SAMPLES = (7, 3, 0)  # by rank


def norm(shift: float = 0.0) -> nn.Sequential:
    rank = dist.get_rank()
    model = nn.Sequential(nn.BatchNorm1d(2, dtype=torch.float64), nn.InstanceNorm1d(2), nn.Linear(2, 2))
    model[0].running_mean.copy_(torch.tensor([rank + 1.0, 10.0 * rank + shift]))
    model[0].running_var.copy_(torch.tensor([rank + 2.0, 1.0]))
    model[0].num_batches_tracked.fill_(rank + 40)
    model.register_buffer("count", torch.tensor([rank, 7]))
    return model


@WORLD.on(TWO, WIDE)
def test_running_statistics_are_averaged_by_samples_and_other_buffers_are_rank_0s() -> None:
    rank = dist.get_rank()
    merge_buffers(whole := norm(), SAMPLES[rank])
    found = dict(whole.named_buffers())
    torch.testing.assert_close(found["0.running_mean"].tolist(), [1.3, 3.0], rtol=1e-14, atol=0)
    torch.testing.assert_close(found["0.running_var"].tolist(), [2.3, 1.0], rtol=1e-14, atol=0)
    assert found["0.num_batches_tracked"] == 40 and found["count"].tolist() == [0, 7]
    merge_buffers(other := norm(shift=math.nan if rank else 0.0), float(rank == 0))
    assert other[0].running_mean.tolist() == [1.0, 0.0]
    merge_buffers(unused := norm(), 0)
    assert unused[0].running_mean.tolist() == [rank + 1.0, 10.0 * rank]


# --- agreement --------------------------------------------------------------------------------------------------------


def disagreement(settings: dict[str, Any], subject: str) -> list[str]:
    """The lines of the error, which all ranks hear alike."""
    with pytest.raises(MismatchError) as caught:
        require_agreement(settings, subject, "Build it from the same code on every rank.")
    assert by_rank(str(caught.value)) == [str(caught.value)] * 2
    return str(caught.value).splitlines()


@WORLD
def test_models_that_differ_raise_the_same_text_on_every_rank_with_parameter_ranks_and_values() -> None:
    """All ranks hear which parameter differs, where and how."""
    join_process_group()  # tells the hosts' names
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(2, 4 if rank == 1 else 3), nn.BatchNorm1d(3))
    model[0].bias.requires_grad_(rank != 1)
    head, *lines, remedy, ranks = disagreement(module_settings(model), "the model")
    assert head == "the ranks disagree about the model:"
    assert lines == [
        "  parameter 0.weight: [3, 2] float32 on rank 0; [4, 2] float32 on rank 1",
        "  parameter 0.bias: [3] float32 on rank 0; [4] float32 frozen on rank 1",
    ]
    assert remedy == "Build it from the same code on every rank."
    assert ranks.startswith("Ranks: rank 0 (host ") and "rank 1 (host " in ranks and "pid" in ranks


def test_ranks_that_agree_are_named_together() -> None:
    said = differences([{"lr": 0.1, "layers": 2}, {"lr": 0.2, "layers": 2}, {"lr": 0.1, "layers": 2}])
    assert list(said) == ["lr: 0.1 on ranks 0, 2; 0.2 on rank 1"]


@WORLD
def test_a_parameter_that_a_rank_lacks_is_named_and_a_long_list_is_cut() -> None:
    rank = dist.get_rank()
    layers = [nn.Linear(1, 1, bias=rank != 1)] + [nn.Linear(1, 1, bias=False) for _ in range(9 if rank == 0 else 1)]
    lines = disagreement(module_settings(nn.Sequential(*layers)), "the model")
    assert lines[1] == "  parameter 0.bias: [1] float32 on rank 0; (none) on rank 1"
    assert lines[2] == "  parameter 2.weight: [1, 1] float32 on rank 0; (none) on rank 1"
    assert lines[6] == "  ... and 5 more"  # seven more weights, of which four are shown, and the order


@WORLD
def test_optimizers_that_differ_raise_with_group_option_and_values() -> None:
    rank = dist.get_rank()
    parameters = list(nn.Linear(2, 2).parameters())[: 2 - (rank == 1)]
    optimizer = torch.optim.SGD(parameters, torch.tensor(0.5) if rank == 0 else 0.5, momentum=rank / 2)
    lines = disagreement(optimizer_settings(optimizer), "the optimizer")
    assert "  optimizer group 0: momentum: 0.0 on rank 0; 0.5 on rank 1" in lines
    assert "  optimizer group 0: number of parameters: 2 on rank 0; 1 on rank 1" in lines
    assert " lr:" not in "".join(lines)  # equal numbers, one of them in a tensor


@WORLD
def test_equal_settings_agree_whatever_the_values_of_parameters_and_the_addresses_of_objects() -> None:
    model = Everything(seed=dist.get_rank())
    optimizer = torch.optim.Adam([{"params": model.parameters(), "schedule": [SimpleNamespace(at=object())]}], lr=0.1)
    settings = module_settings(model) | optimizer_settings(optimizer) | {"nan": math.nan}
    require_agreement(settings, "everything", "Nothing to do.")
