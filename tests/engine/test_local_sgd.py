"""Local steps and averaging, against simulations of all ranks in one process, in float64."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diloco import OuterStep, vector
from kit.compare import assert_equal
from shared_worlds import GLOO, TWO, WIDE, World, by_rank
from torch import nn
from torch.nn import functional as F

from ddp_callbacks import DiLoCo, LocalSGD, ParameterAverager, get_rank, get_world_size
from ddp_callbacks.comm.segments import SWITCH
from ddp_callbacks.errors import ConfigurationError, MismatchError
from ddp_callbacks.local_sgd import OUTER_MOMENTUM, check_sync

pytestmark = pytest.mark.shares_results()
WORLD = World(__name__)
each_way = WORLD.on(TWO, GLOO, WIDE)
FEATURES, CLASSES, SAMPLES = 5, 4, 40
Optimizer = Callable[[Any], torch.optim.Optimizer]


# --- what is trained --------------------------------------------------------------------------------------------------


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, FEATURES, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, CLASSES, (SAMPLES,), generator=generator)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, CLASSES)).double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def share_of(step: int, rank: int, size: int) -> slice:
    """Samples of a rank in a step: ragged, and in every fourth step fewer than ranks."""
    begin, count = (step * 5) % (SAMPLES - 7), (7, 5, 4, 2)[step % 4]
    bounds = [begin + count * index // size for index in range(size + 1)]
    return slice(bounds[rank], bounds[rank + 1])


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, part: slice) -> float:
    """A step on a part of the data; the number of its samples. Nothing happens where there are none."""
    x, y = data()
    optimizer.zero_grad()
    if part.stop > part.start:
        F.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()
    return float(part.stop - part.start)


def train(
    sync: Any,
    steps: int,
    make: Optimizer = sgd,
    close_after: tuple[int, ...] = (),
    compress: Any = None,
    cut: int = -1,
    inference: bool = False,
) -> list[torch.Tensor]:
    """On this rank: the parameters after each step. Before step ``cut`` all goes on from what was saved.

    Args:
        close_after: Steps after which a window is closed early, as for an evaluation.
        inference: Whether that is in inference mode.
    """
    states: list[Any] = []
    path = []
    for step in range(steps):
        if step in (0, cut):
            model = network()
            optimizer = make(model.parameters())
            if states:
                model.load_state_dict(states[0])
                optimizer.load_state_dict(states[1])
            averager = ParameterAverager(model, sync, optimizer, compress=compress)
            if states:
                averager.load_state_dict(states[2])
        averager.step(train_step(model, optimizer, share_of(step, get_rank(), get_world_size())))
        if step in close_after:
            with torch.inference_mode(inference):
                averager.outer_step()
        path.append(vector(model))
        if step == cut - 1:
            window = copy.deepcopy(averager.state_dict())
            averager.outer_step()  # as for a checkpoint that other numbers of ranks can read
            states = [*copy.deepcopy([model.state_dict(), optimizer.state_dict()]), window]
    averager.outer_step()
    return [*path, vector(model)]


def simulate(
    closes: set[int],
    steps: int,
    make: Optimizer,
    outer_lr: float,
    outer_momentum: float,
    size: int,
    sent_as: torch.dtype = torch.float64,
) -> list[torch.Tensor]:
    """The same by the paper's algorithm, with all replicas in this process: the model after each window."""
    replicas = [network() for _ in range(size)]
    optimizers = [make(replica.parameters()) for replica in replicas]
    outer_step = OuterStep(vector(replicas[0]), outer_lr, outer_momentum, sent_as)
    weights = [0.0] * size
    models = []
    for step in range(steps):
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            weights[rank] += train_step(replica, optimizer, share_of(step, rank, size))
        if step in closes:
            outer_step(replicas, weights)
            weights = [0.0] * size
            models.append(outer_step.anchor)
    return models


# --- windows ----------------------------------------------------------------------------------------------------------

# How a rank trains, after which steps its windows close, and what the outer step is.
WINDOWS: dict[str, Any] = {
    "local sgd": ((LocalSGD(4), 10, sgd), {3, 7, 9}, 1.0, 0.0),
    "local adamw": ((LocalSGD(4), 10, adamw), {3, 7, 9}, 1.0, 0.0),
    "diloco": ((DiLoCo(3), 11, adamw), {2, 5, 8, 10}, 0.7, 0.9),
    "other settings": ((DiLoCo(3, outer_lr=0.4, outer_momentum=0.5), 11, adamw), {2, 5, 8, 10}, 0.4, 0.5),
    "closed early": ((DiLoCo(4), 11, adamw, (1, 7)), {1, 5, 7, 10}, 0.7, 0.9),
}


@each_way
def test_windows_are_those_of_a_simulation_of_all_ranks() -> None:
    """`LocalSGD` and `DiLoCo` are the papers' algorithms."""
    size = dist.get_world_size()
    for name, ((sync, steps, make, *early), closes, lr, momentum) in WINDOWS.items():
        path = train(sync, steps, make, *early)
        # An uneven last window is closed after the last step: the entry behind it.
        ends = [path[close if close + 1 < steps else steps] for close in sorted(closes)]
        assert_equal(ends, simulate(closes, steps, make, lr, momentum, size), 1e-10, name)
        assert all(map(torch.equal, by_rank(ends)[0], ends)), name
        assert not torch.equal(*by_rank(path[0])[:2]), "inside a window ranks differ"


@each_way
def test_a_window_of_one_step_of_sgd_is_the_step_of_one_process() -> None:
    """`LocalSGD(every=1)` with SGD gives one process's numbers."""
    assert_equal(train(LocalSGD(1), 12)[:-1], simulate(set(range(12)), 12, sgd, 1.0, 0.0, size=1), 1e-10)


@WORLD
def test_a_window_that_is_cut_goes_on_with_the_same_bits() -> None:
    for sync in (LocalSGD(4), DiLoCo(3)):
        whole = train(sync, 9, adamw)
        for cut in (2, 4, 5, 6):
            assert_equal(train(sync, 9, adamw, cut=cut), whole, 0.0, f"{sync} {cut}")


def closed_in_inference_mode() -> None:
    options: dict[str, Any] = {"close_after": (1, 6)}
    assert_equal(train(DiLoCo(3), 9, inference=True, **options), train(DiLoCo(3), 9, **options), 0.0)


@WORLD
def test_a_window_is_closed_in_inference_mode_and_the_next_outside_on_two_ranks() -> None:
    closed_in_inference_mode()


def test_a_window_is_closed_in_inference_mode_and_the_next_outside_on_one_process() -> None:
    closed_in_inference_mode()


# --- kinds of parameters ----------------------------------------------------------------------------------------------


def halves(rank: int) -> torch.Tensor:
    return torch.randn(1000, generator=torch.Generator().manual_seed(rank)).bfloat16()


class Kinds(nn.Module):
    """Half precision, double, complex, channels last, shared, frozen and integer parameters."""

    def __init__(self) -> None:
        super().__init__()
        rank = dist.get_rank()
        self.of_double = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.of_half = nn.Parameter(halves(9))
        self.complex = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex128))
        self.last = nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.shared = self.of_double
        self.frozen = nn.Parameter(torch.full((3,), 0.1), requires_grad=False)
        self.count = nn.Parameter(torch.tensor([7 + rank]), requires_grad=False)
        self.embedding = nn.Embedding(5, 2, sparse=True)
        nn.init.zeros_(self.embedding.weight)
        self.empty = nn.Parameter(torch.zeros(0))
        self.register_buffer("steps", torch.tensor(rank))


@each_way
def test_every_kind_of_parameter_is_averaged_in_place() -> None:
    """They average every parameter in place, halves in float32."""
    module, rank, size = Kinds(), dist.get_rank(), dist.get_world_size()
    averager, mean = ParameterAverager(module, LocalSGD(1), bucket_cap_mb=1e-4), (size - 1) / 2
    strides = module.last.stride()
    with torch.no_grad():
        module.of_double += rank
        module.of_half.copy_(halves(rank))
        module.complex += complex(rank, -rank)
        module.last += torch.arange(120.0).view(2, 3, 4, 5) * rank
        module.embedding.weight[rank] = 3.0
    averager.step(1.0)
    values = module.state_dict()
    assert_equal(values["of_double"], [mean] * 3, 1e-12)
    exact = sum(halves(other).double() for other in range(size)) / size
    half_a_unit = 2 ** (exact.abs().log2().floor() - 8)
    assert ((values["of_half"].double() - exact).abs() <= half_a_unit * 1.001 + 1e-7).all()
    torch.testing.assert_close(values["complex"], mean * torch.full((2, 2), 1 - 1j, dtype=torch.complex128))
    torch.testing.assert_close(values["last"], mean * torch.arange(120.0).view(2, 3, 4, 5))
    embedded = torch.tensor([[3 / size] * 2] * size + [[0.0] * 2] * (5 - size))
    torch.testing.assert_close(values["embedding.weight"], embedded)
    assert module.last.stride() == strides == (60, 1, 15, 3) and module.shared is module.of_double
    assert torch.equal(values["frozen"], torch.full((3,), 0.1))  # not so much as rounded
    assert values["count"].tolist() == [7 + rank] and values["steps"].item() == rank


@WORLD
def test_a_frozen_parameter_stays_whatever_its_momentum() -> None:
    """Frozen parameters stay."""
    # One that is frozen once it has momentum stays; one that is unfrozen is averaged.
    module = nn.ParameterList([torch.zeros(1), torch.zeros(1)])
    module[1].requires_grad_(False)
    averager = ParameterAverager(module, DiLoCo(1))
    seen = []
    for trained in (0, 1, 1):
        for index, parameter in enumerate(module):
            parameter.requires_grad_(index == trained)
        with torch.no_grad():
            module[trained] += 1.0
        averager.step()
        seen.append([parameter.item() for parameter in module])
    first, second, third = seen
    assert first == [pytest.approx(0.7 * 1.9), 0.0] and second[1] == pytest.approx(0.7 * 1.9)
    assert first[0] == second[0] == third[0]


@WORLD.on(WIDE)
def test_a_process_group_averages_for_itself() -> None:
    """A process group averages separately."""
    # Ranks 0 and 2 average; rank 1 is not asked.
    rank, group = dist.get_rank(), dist.new_group([0, 2])
    module = nn.ParameterList([torch.zeros(1)])
    if rank != 1:
        averager = ParameterAverager(module, LocalSGD(1), process_group=group)
        with torch.no_grad():
            module[0] += 4.0 * rank
        averager.step([1.0, 0.0, 3.0][rank])
    assert module[0].item() == [6.0, 0.0, 6.0][rank]


# --- weights ----------------------------------------------------------------------------------------------------------


@each_way
def test_ranks_count_by_the_weights_of_the_window() -> None:
    """Ranks count by their samples in the window."""
    module, rank, last = nn.ParameterList([torch.zeros(1)]), dist.get_rank(), dist.get_world_size() - 1
    averager = ParameterAverager(module, LocalSGD(2))
    with torch.no_grad():
        module[0] += float("nan") if rank == last else [1.0, 5.0][rank]
    averager.step(0.0 if rank == last else [3.0, 0.5][rank])
    averager.step(0.5 if 0 < rank < last else 0.0)
    assert module[0].item() == float(last)  # 1 of rank 0 alone, or (3 * 1 + 1 * 5) / 4
    with torch.no_grad():
        module[0] += rank
    averager.step(0.0)
    averager.step(0.0)
    assert module[0].item() == last + last / 2  # nobody counts: all alike


@WORLD
def test_parameters_that_something_else_exchanges_are_the_next_anchor() -> None:
    """Parameters that something else exchanges are `DiLoCo`'s next anchor."""
    module = nn.ParameterList([torch.zeros(1)])
    averager = ParameterAverager(module, DiLoCo(1, outer_lr=0.5, outer_momentum=0.0))
    with torch.no_grad():
        module[0].fill_(10.0)
        averager.outer_step()
        module[0] += 2.0
        averager.step()
    assert module[0].item() == 11.0


# --- the outer optimizer's state --------------------------------------------------------------------------------------


def test_a_checkpoint_with_outer_momentum_loads_where_nobody_knows_it() -> None:
    """A checkpoint with it loads without this library."""
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop):
        model = network()
        optimizer = kind(model.parameters(), lr=0.01)
        averager = ParameterAverager(model, DiLoCo(1), optimizer)
        averager.step(train_step(model, optimizer, slice(0, 8)))
        assert set(optimizer.state[OUTER_MOMENTUM]) == set(model.state_dict())
        torch.save(optimizer.state_dict(), file := io.BytesIO())
        twin = copy.deepcopy(model)
        other = kind(twin.parameters(), lr=0.01)
        other.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
        train_step(model, optimizer, slice(8, 16))
        train_step(twin, other, slice(8, 16))
        assert_equal(vector(twin), vector(model), 0.0, kind.__name__)


def test_the_outer_momentum_of_another_model_is_refused() -> None:
    """`DiLoCo` refuses the momentum of another model."""
    model = network()
    optimizer = sgd(model.parameters())
    optimizer.state[OUTER_MOMENTUM] = {"0.weight": torch.zeros(2, 2)}
    averager = ParameterAverager(model, DiLoCo(1), optimizer)
    train_step(model, optimizer, slice(0, 8))
    with pytest.raises(ConfigurationError, match=r"shape \[2, 2\] for 0.weight, which has \[7, 5\]"):
        averager.step()


def test_a_replaced_parameter_begins_without_momentum_whether_or_not_an_optimizer_keeps_it() -> None:
    # Kept by the averager itself, it stayed, and a parameter of another shape ended the run.
    for keeps in (True, False):
        module = nn.ParameterList([torch.zeros(2)])
        averager = ParameterAverager(module, DiLoCo(1, outer_lr=0.5), sgd(module.parameters()) if keeps else None)
        for size in (2, 3):
            module[0] = nn.Parameter(torch.ones(size))
            averager.follow()
            with torch.no_grad():
                module[0] += 1.0
            averager.step()
            assert module[0].tolist() == pytest.approx([1.95] * size, rel=1e-6)  # Nesterov: 1 + 0.5 * 1.9


# --- a world of one ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [LocalSGD(2), DiLoCo(3)], ids=str)
def test_in_a_world_of_one_local_sgd_changes_nothing_and_diloco_has_one_worker(sync: Any) -> None:
    """On one process `LocalSGD` changes nothing."""
    model, plain = network(), network()
    optimizer, other = adamw(model.parameters()), adamw(plain.parameters())
    averager = ParameterAverager(model, sync, optimizer)
    for step in range(7):
        averager.step(train_step(model, optimizer, share_of(step, 0, 1)))
        train_step(plain, other, share_of(step, 0, 1))
    averager.outer_step()
    if isinstance(sync, DiLoCo):
        assert_equal(vector(model), simulate({2, 5, 6}, 7, adamw, 0.7, 0.9, size=1)[-1], 1e-10)
    else:
        assert torch.equal(vector(model), vector(plain))


@WORLD.on(TWO, GLOO)
def test_compressed_outer_gradients_are_rounded_where_they_are_sent() -> None:
    # As the simulation whose parts are rounded: one bit of bfloat16 more, or once more, would be an error of 1e-3.
    sent_as, relative = (torch.bfloat16, 1e-6) if os.environ[SWITCH] == "0" else (torch.float64, 1e-10)
    path = train(DiLoCo(3), 12, adamw, compress="bf16")
    ends = [path[step] for step in (2, 5, 8, 11)]
    assert_equal(ends, simulate({2, 5, 8, 11}, 12, adamw, 0.7, 0.9, size=2, sent_as=sent_as), relative)
    assert all(map(torch.equal, by_rank(ends)[0], ends))


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LocalSGD(0), "every must be a positive number of steps, got 0"),
        (lambda: LocalSGD(True), "every must be a positive number of steps, got True"),
        (lambda: DiLoCo(5, outer_lr=float("nan")), "outer_lr must be positive, got nan"),
        (lambda: DiLoCo(5, outer_momentum=1), "outer_momentum must be at least 0 and below 1, got 1"),
        (lambda: DiLoCo(5, outer_momentum="0.9"), "outer_momentum must be at least 0 and below 1, got '0.9'"),
        (lambda: check_sync("sometimes"), 'sync must be "every_step", LocalSGD'),
        (lambda: check_sync(DiLoCo(8), sync_batchnorm=True), "sync_batchnorm=True exchanges statistics in every step"),
        (lambda: check_sync(LocalSGD(8), comm_hook=print), "sums gradients, but sync=LocalSGD.every=8. sends none"),
        (lambda: ParameterAverager(network(), DiLoCo(5)).step(float("nan")), "must be 0 or more, got nan"),
        (lambda: ParameterAverager(network(), DiLoCo(5), bucket_cap_mb=0), "bucket_cap_mb must be positive"),
    ],
)
def test_wrong_settings_are_refused(make: Callable[[], Any], message: str) -> None:
    """`sync` refuses wrong settings."""
    with pytest.raises(ConfigurationError, match=message):
        make()


@WORLD
def test_ranks_that_disagree_hear_of_it() -> None:
    rank, averager = dist.get_rank(), ParameterAverager(network(), LocalSGD(8))
    with pytest.raises(MismatchError, match=r"sync: LocalSGD\(every=8\) on rank 0; LocalSGD\(every=9\) on rank 1"):
        ParameterAverager(network(), LocalSGD(8 + rank))
    for _ in range(2 + rank):
        averager.step()
    with pytest.raises(MismatchError, match=r"2 on rank 0.*3 on rank 1") as caught:
        averager.outer_step()
    assert "weight 0" in str(caught.value)
