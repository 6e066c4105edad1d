"""What is summed, broadcast, compared or merged is equal on all ranks, and equal to what one process has."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.compare import assert_equal
from shared_worlds import GLOO, TWO, WIDE, World, by_rank
from torch import Tensor, nn

from ddp_callbacks import GradientSynchronizer
from ddp_callbacks.comm.agreement import module_settings, optimizer_settings, require_agreement
from ddp_callbacks.comm.collectives import (
    all_gather_object,
    all_reduce,
    any_rank,
    broadcast,
    broadcast_object,
)
from ddp_callbacks.comm.topology import choose_all_reduce
from ddp_callbacks.data.global_state import get_global_state
from ddp_callbacks.data.random_state import broadcast_rng_state, seed_by_rank
from ddp_callbacks.errors import MismatchError, PeerError
from ddp_callbacks.process_group import join_process_group
from ddp_callbacks.process_group.failures import wait
from ddp_callbacks.process_group.presence import presence
from ddp_callbacks.replicas.parameters import (
    MESSAGE_NBYTES,
    broadcast_optimizer_state,
    broadcast_parameters,
    merge_buffers,
)

pytestmark = pytest.mark.shares_results()
WORLD = World(__name__)


def test_in_a_world_of_one_every_collective_is_the_identity() -> None:
    """On one process every collective returns its input."""
    tensor = torch.tensor([1.0, 2.0])
    assert all_reduce(tensor, "a test") is tensor
    assert broadcast(tensor, "a test") is tensor
    assert tensor.tolist() == [1, 2]
    assert (any_rank(True, "a test"), any_rank(False, "a test")) == (True, False)
    assert all_gather_object({"a": 1}, "a test") == [{"a": 1}]
    assert all_gather_object(("header", [tensor]), "a test") == [("header", [tensor])]
    assert broadcast_object(("header", [tensor]), "a test") == ("header", [tensor])
    require_agreement({"a": 1}, "a test", "Nothing to do.")
    model = nn.BatchNorm1d(2)
    before = [buffer.clone() for buffer in model.state_dict().values()], get_global_state()
    broadcast_parameters(model)
    merge_buffers(model, 3)
    broadcast_optimizer_state(torch.optim.SGD(model.parameters(), 0.1))
    seed_by_rank()
    broadcast_rng_state()
    assert str(([*model.state_dict().values()], get_global_state())) == str(before)


# --- messages ---------------------------------------------------------------------------------------------------------

SENT = (torch.float64, torch.bfloat16, torch.float32)  # by rank


@WORLD.on(TWO, WIDE)
def test_all_ranks_get_every_ranks_tensors_though_number_shape_and_dtype_differ() -> None:
    """Gathers, sums and broadcasts give all ranks the same values."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = [torch.full((rank, 2), rank, dtype=SENT[rank]), torch.tensor(rank == 1)][: rank + 1]
    gathered = all_gather_object(({"rank": rank, "nan": math.nan, "text": "ü" * rank}, own), "a test")
    assert [(header["rank"], header["text"]) for header, _ in gathered] == [(each, "ü" * each) for each in range(size)]
    assert all(math.isnan(header["nan"]) for header, _ in gathered)
    expected = [(SENT[0], []), (SENT[1], [[1, 1]]), (torch.bool, True), (SENT[2], [[2, 2]] * 2), (torch.bool, False)]
    found = [(tensor.dtype, tensor.tolist()) for _, tensors in gathered for tensor in tensors]
    assert found == expected[: 2 * size - 1]
    assert all_gather_object((None, []), "a test") == [(None, [])] * size
    assert all_gather_object([rank], "a test") == [[each] for each in range(size)]


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
    for value in (5, [[0.5, 0.5]], [1j], [True]):
        tensor = torch.tensor(value) if rank == 0 else torch.zeros_like(torch.tensor(value))
        assert broadcast(tensor, "a test") is tensor and tensor.tolist() == value
    header, parts = broadcast_object(({"rank": rank}, [torch.tensor(rank)] * (1 - rank)), "a test")
    assert header == {"rank": 0} and [part.tolist() for part in parts] == [0]
    assert broadcast_object(object() if rank else (), "a test") == ()  # only rank 0 sends


# --- rows and sums of the transport -----------------------------------------------------------------------------------


@WORLD.on(TWO, GLOO, WIDE)
def test_every_rank_gets_every_row() -> None:
    """Rows of numbers reach every rank bit for bit."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert all_gather_object([rank + 0.1] * rank, "a") == [[], [1.1], [2.1, 2.1]][:size]
    for _ in range(2):
        found = all_gather_object([rank / 3] * (200 * rank), "b")
        assert found == [[other / 3] * (200 * other) for other in range(size)]
    strange = [math.inf, -math.inf, 2.0**53, -0.0, 5e-324]
    first, second, *third = all_gather_object(strange if rank == 1 else [math.nan], "c")
    assert second == strange
    assert all(math.isnan(value) for (value,) in [first, *third])


@WORLD.on(WIDE, GLOO)
def test_messages_are_on_the_cpu_whatever_the_default_device() -> None:
    model, inputs, size = nn.Linear(2, 1), torch.full((1, 2), 1.0 + dist.get_rank()), dist.get_world_size()
    with torch.device("meta"):
        gradients = GradientSynchronizer(model)
        model(inputs).sum().backward()
        gradients.close()
        assert all_gather_object(inputs[0, 0], "a") == [rank + 1.0 for rank in range(size)]
        broadcast_parameters(model)
    assert model.weight.grad is not None and model.weight.grad.tolist() == [[(1 + size) / 2] * 2]


@WORLD.on(TWO, GLOO)
def test_what_an_evaluation_in_inference_mode_has_made_serves_in_training() -> None:
    """Training can use tensors made in inference mode."""
    rank, cpu, longer = dist.get_rank(), torch.device("cpu"), 200  # numbers, more than a row has room for at first
    way = choose_all_reduce(dist.new_group(), [cpu])
    with torch.inference_mode():
        memory = way.allocate(10, torch.float64, cpu).fill_(rank + 1.0)
    for is_evaluation in (True, False, True, False):
        with torch.inference_mode(is_evaluation):
            for length in (1, longer) if is_evaluation else (longer, 1):
                assert all_gather_object([rank + 1.0] * length, "the loss") == [[1.0] * length, [2.0] * length]
            total = float(sum(by_rank(float(memory[0]))))
            way.launch(memory, "a sum").wait()
            assert memory.tolist() == [total] * len(memory)


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
        for dtype in (torch.int16, torch.uint16, torch.uint32, torch.float8_e4m3fn):  # gloo knows none of them
            self.register_buffer(str(dtype).removeprefix("torch."), torch.randint(9, (3,)).to(dtype))
        self.register_buffer("hidden", torch.randn(2), persistent=False)
        # Views that torch conjugates and negates when they are read.
        self.register_buffer("conjugate", torch.randn(2, dtype=torch.complex128).conj())
        self.register_buffer("negative", torch.randn(1, dtype=torch.complex64).conj().imag)
        self.register_buffer("none", None)


def bits(tensor: Tensor) -> Tensor:
    """torch compares no float8."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


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
            patch.setattr("ddp_callbacks.replicas.parameters.MESSAGE_NBYTES", nbytes)
            broadcast_parameters(model)
        assert [(id(tensor), tensor.stride(), tensor.data_ptr()) for tensor in model.parameters()] == before
        received = contents(model)
        assert list(received) == list(expected)
        assert all(torch.equal(bits(received[name]), bits(expected[name])) for name in expected)


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


def stepped(name: str, seed: int, steps: int) -> torch.optim.Optimizer:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * (1 + seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
    return optimizer


@WORLD
def test_state_and_hyperparameters_of_the_optimizer_become_rank_0s() -> None:
    rank = dist.get_rank()
    for name, steps in itertools.product(OPTIMIZERS, (5, 0)):  # rank 1 has another state, then none
        optimizer = stepped(name, rank, (3, steps)[rank])
        broadcast_optimizer_state(optimizer)
        assert_equal(optimizer.state_dict(), stepped(name, 0, 3).state_dict(), 0.0, name)


@WORLD
def test_an_optimizer_with_other_groups_raises_as_load_state_dict_does() -> None:
    rank = dist.get_rank()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1)) for _ in range(1 + rank)], 0.1)
    says = "loaded state dict contains a parameter group that doesn't match"
    with pytest.raises(ValueError, match=says) if rank else nullcontext():
        broadcast_optimizer_state(optimizer)


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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        merge_buffers(whole := norm(), SAMPLES[rank])
        merge_buffers(other := norm(shift=math.nan if rank else 0.0), float(rank == 0))
        merge_buffers(unused := norm(), 0)
    said = [str(each.message).partition(" the ranks")[0] for each in caught]
    assert said == ([] if rank else ["buffer count differed between"] * 3)
    found = dict(whole.named_buffers())
    torch.testing.assert_close(found["0.running_mean"].tolist(), [1.3, 3.0], rtol=1e-14, atol=0)
    torch.testing.assert_close(found["0.running_var"].tolist(), [2.3, 1.0], rtol=1e-14, atol=0)
    assert found["0.num_batches_tracked"] == 40 and found["count"].tolist() == [0, 7]
    assert other[0].running_mean.tolist() == [1.0, 0.0]
    assert unused[0].running_mean.tolist() == [rank + 1.0, 10.0 * rank]


# --- agreement --------------------------------------------------------------------------------------------------------


@WORLD
def test_models_that_differ_raise_the_same_text_on_every_rank_with_parameter_ranks_and_values() -> None:
    """All ranks hear which parameter differs, where and how."""
    join_process_group()  # tells the hosts' names
    odd = dist.get_rank() == 1
    layers = [nn.Linear(2, 4 if odd else 3, bias=not odd), nn.Linear(2, 2).requires_grad_(not odd)]
    model = nn.Sequential(*layers, *(nn.Linear(1, 1, bias=False) for _ in range(1 if odd else 9)))
    with pytest.raises(MismatchError) as caught:
        require_agreement(module_settings(model), "the model", "Build it from the same code on every rank.")
    assert by_rank(str(caught.value)) == [str(caught.value)] * 2
    head, *lines, remedy, ranks = str(caught.value).splitlines()
    assert head == "the ranks disagree about the model:"
    assert lines[:4] == [
        "  parameter 0.weight: [3, 2] float32 on rank 0; [4, 2] float32 on rank 1",
        "  parameter 0.bias: [3] float32 on rank 0; (none) on rank 1",
        "  parameter 1.weight: [2, 2] float32 on rank 0; [2, 2] float32 frozen on rank 1",
        "  parameter 1.bias: [2] float32 on rank 0; [2] float32 frozen on rank 1",
    ]
    assert lines[-1] == "  ... and 8 more"  # eight weights, of which one is shown, and the order
    assert remedy == "Build it from the same code on every rank."
    assert ranks.startswith("Ranks: rank 0 (host ") and "rank 1 (host " in ranks and "pid" in ranks


@WORLD
def test_equal_settings_agree_whatever_the_values_of_parameters_and_the_addresses_of_objects() -> None:
    model = Everything(seed=dist.get_rank())
    optimizer = torch.optim.Adam([{"params": model.parameters(), "schedule": [SimpleNamespace(at=object())]}], lr=0.1)
    settings = module_settings(model) | optimizer_settings(optimizer) | {"nan": math.nan}
    require_agreement(settings, "everything", "Nothing to do.")


UNLIKE = {
    "dtypes of one size": ((3,), torch.float32, (3,), torch.int32),
    "sizes": ((3,), torch.float32, (4,), torch.float32),
    "shapes of one size": ((2, 3), torch.float32, (3, 2), torch.float32),
    "a message and more": ((3,), torch.float32, (100_000,), torch.float32),
    "large sizes": ((100_000,), torch.float32, (100_001,), torch.float32),
}


@WORLD
def test_tensors_that_differ_in_shape_or_dtype_are_named_and_left() -> None:
    # Bits of a float were taken for those of an integer; of large tensors one kept its end, or gloo aborted.
    for shape, dtype, other_shape, other_dtype in UNLIKE.values():
        mine = torch.ones(other_shape, dtype=other_dtype) if dist.get_rank() else torch.ones(shape, dtype=dtype)
        for exchange in (all_reduce, broadcast):
            with pytest.raises(MismatchError, match="the ranks disagree about the sizes") as raised:
                exchange(mine, "the sizes")
            first, second = (str(each).removeprefix("torch.") for each in (dtype, other_dtype))
            assert f"tensor: {[*shape]} {first} on cpu on rank 0; {[*other_shape]} {second}" in str(raised.value)
            assert bool((mine == 1).all())


class EndsWithAWorker:
    """torch raises this in the main thread, whatever that does."""

    def wait_slice(self, seconds: float) -> bool:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")


@WORLD
def test_the_death_of_a_loader_s_worker_during_a_wait_is_not_taken_for_that_of_a_rank() -> None:
    assert dist.group.WORLD is not None
    with pytest.raises(RuntimeError, match=r"^DataLoader worker") as raised:
        wait(EndsWithAWorker(), "the test", dist.group.WORLD)
    assert not isinstance(raised.value, PeerError)
    presence().failed = False
