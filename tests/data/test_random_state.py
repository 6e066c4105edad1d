"""Draws that all ranks share are those of one process; outside of them each rank draws its own."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from loaders import seed_all
from shared_worlds import World, by_rank
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from ddp_callbacks import resumable_loader, shard_loader
from ddp_callbacks.data.global_state import digest_of, get_global_state, is_same_state, seed_cpu, set_global_state
from ddp_callbacks.data.random_state import (
    OwnRandomState,
    RunRandomState,
    SharedRandomState,
    broadcast_rng_state,
    seed_by_rank,
)
from ddp_callbacks.data.sample_seeds import Loading, SeededIndices, generators_of

pytestmark = pytest.mark.shares_results()
WORLD = World(__name__)


def draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), float(np.random.rand()), torch.randn(()).item(), random.gauss(0, 1)]


def draws(seed: int, count: int) -> list[list[float]]:
    """What one process draws."""
    before = get_global_state()
    seed_all(seed)
    found = [draw() for _ in range(count)]
    set_global_state(before)
    return found


def test_a_library_from_which_nothing_draws_outside_continues_what_was_drawn_inside() -> None:
    # As loading by NumPy, with dropout in the steps: else the next pass would load the same once more.
    seed_all(5)
    expected = [np.random.rand() for _ in range(4)]
    seed_all(5)
    found = []
    for _ in range(2):
        own = OwnRandomState()
        for _ in range(2):
            with own.drawing():
                found.append(np.random.rand())
            torch.rand(3)
    assert found == expected


@WORLD
def test_inside_all_ranks_draw_what_one_process_draws_and_outside_each_its_own() -> None:
    """Shared draws give all ranks one process's numbers."""
    rank, one_process = dist.get_rank(), draws(100, 5)
    seed_all(100 + rank)
    draw()
    shared = SharedRandomState()
    with shared.drawing():
        assert draw() == one_process[1]
    own = [draw()]
    with shared.drawing():
        assert draw() == one_process[2]
    own.append(draw())
    with pytest.raises(ZeroDivisionError), shared.drawing():
        draw()
        raise ZeroDivisionError
    assert rank == 0 or draw() == draws(101, 4)[3]
    # Rank 0 draws from the shared state, which is its own; from then on they go apart.
    assert own == (draws(101, 3)[1:] if rank else one_process[2:4])


@WORLD
def test_generators_of_the_sources_get_rank_0s_state_for_good() -> None:
    """Generators of loaders get rank 0's state."""
    rank = dist.get_rank()
    sampler = SimpleNamespace(generator=torch.Generator().manual_seed(rank), python=random.Random(rank), other="text")
    dataset = SimpleNamespace(new=np.random.default_rng(rank), old=np.random.RandomState(rank))
    SharedRandomState([sampler, dataset, object()])
    own = torch.Generator().manual_seed(0)
    assert torch.equal(torch.rand(2, generator=sampler.generator), torch.rand(2, generator=own))
    assert sampler.python.random() == random.Random(0).random()
    assert dataset.new.random() == np.random.default_rng(0).random()
    assert dataset.old.rand() == np.random.RandomState(0).rand()


@WORLD
def test_a_shuffled_loader_leaves_torchs_state_equal_where_only_torch_was_seeded() -> None:
    seed_all(450)
    random.seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    rows = DataLoader(TensorDataset(torch.arange(8)), batch_size=4, shuffle=True)
    found = []
    for loader in (rows, shard_loader(rows)):
        torch.manual_seed(450)
        found.append([torch.rand(1).item() for _ in loader])
    assert found[0] == found[1]
    first, second = by_rank(found)
    assert first == second


@WORLD
def test_distinct_states_differ_repeat_themselves_and_leave_rank_0s_alone() -> None:
    """`seed_by_rank` makes each process draw apart."""
    found = []
    for _ in range(2):
        seed_all(500)
        seed_by_rank()
        found.append(draw())
    assert found[0] == found[1]
    first, second = by_rank(found[0])
    assert first == draws(500, 1)[0] and not set(first) & set(second)


@WORLD
def test_equal_states_are_rank_0s() -> None:
    seed_all(600 + dist.get_rank())
    draw()
    broadcast_rng_state()
    assert draw() == draws(600, 2)[1]


@WORLD
def test_a_generator_that_differs_on_some_ranks_gets_rank_0s_state() -> None:
    run = RunRandomState()
    for seed_one in (torch.manual_seed, random.seed, np.random.seed):
        seed_all(650)
        seed_one(dist.get_rank())
        run.synchronize()
        first, second = by_rank([run.checksums(), draw()])
        assert first == second


@WORLD
def test_a_state_that_was_saved_on_any_rank_continues_on_all() -> None:
    seed_all(700 + dist.get_rank())
    run = RunRandomState()
    run.synchronize()
    state = run.state_dict()
    expected = draw()
    seed_all(dist.get_rank())
    run.load_state_dict(state)
    assert draw() == expected == draws(700, 1)[0]


class Slotted:
    __slots__ = ("own",)

    def __init__(self) -> None:
        self.own = np.random.default_rng()

    def add(self, x: float) -> float:
        return x + self.own.random()


class OfItsClass(Dataset[float]):
    own = random.Random()

    def __getitem__(self, index: int) -> float:
        return index + self.own.random()


def add(x: float, own: torch.Generator) -> float:
    return x + torch.rand((), generator=own).item()


def closure(own: np.random.RandomState) -> Any:
    return lambda x: x + own.rand()


def by_name(x: float) -> float:
    return x + MADE_HERE.random()


MADE_HERE = random.Random()
HOLDERS: dict[str, Any] = {
    "partial": [functools.partial(add, own=torch.Generator())],
    "argument of a partial": functools.partial(random.Random.uniform, random.Random(), 0.0),
    "slots": {"change": Slotted()},
    "bound method": (Slotted().add,),
    "closure": closure(np.random.RandomState()),
    "global of a function": by_name,
    "global of a function without a module": eval("lambda x: x + own.random()", {"own": random.Random()}),
    "global of a comprehension": lambda x: [x + MADE_HERE.random() for _ in range(2)],
    "global of a function inside": lambda x: (lambda: x + MADE_HERE.random())(),
    "attribute of a class": OfItsClass(),
    "of a data set within": Subset(OfItsClass(), range(3)),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_generator_is_found_wherever_a_data_set_or_its_transform_has_it(holder: str) -> None:
    dataset = TensorDataset()
    dataset.transform = HOLDERS[holder]
    assert len(generators_of(dataset)) == 1
    assert generators_of(TensorDataset()) == []


class Lazily(Dataset[float]):
    own: np.random.Generator | None = None

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        if self.own is None:
            self.own = np.random.default_rng(5)
        return index + self.own.random()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_generator_that_is_made_with_the_first_sample_is_named(workers: int) -> None:
    with pytest.raises(UserWarning, match="the data set makes a random generator while it loads a sample"):
        [*resumable_loader(DataLoader(Lazily(), 2, num_workers=workers))]  # warnings are errors, also in a worker


def mask(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) * torch.rand(len(samples))


@WORLD
def test_a_collate_fn_that_draws_is_named() -> None:
    numbers: Any = torch.zeros(4)
    with pytest.warns(UserWarning, match="the collate_fn for Tensor draws random numbers: .* or in the step"):
        [*shard_loader(DataLoader(numbers, 2, collate_fn=mask))]
    [*shard_loader(DataLoader(numbers, 2, collate_fn=torch.stack))]


class Augments(Dataset[list[float]]):
    augments = False

    def __getitem__(self, index: int) -> list[float]:
        return draw() if self.augments and index == 8 else []


def test_a_data_set_that_begins_to_draw_draws_under_seeds_from_the_first_sample_on() -> None:
    dataset = Augments()
    loading = Loading(dataset)
    seed_all(800)
    before = get_global_state()
    for number, dataset.augments in enumerate((False, False, True, True, False)):
        samples = [dataset[index] for index in SeededIndices([7, 8], (5, number), 3, loading)]
        samples = loading.load_again() or samples
        loading.end()
        assert is_same_state(before, get_global_state())
        if dataset.augments:
            seed_cpu(digest_of(5, number, 4))
            assert samples == [[], draw()]
            seed_all(800)


def test_the_generators_of_a_sample_draw_apart() -> None:
    dataset, own = TensorDataset(), [torch.Generator(), torch.Generator()]
    dataset.transform, loading = own, Loading(dataset)
    for _ in SeededIndices([0], (5, 1), 0, loading):
        drawn = {torch.rand((), generator=each).item() for each in (*own, None)}
    loading.end()
    assert len(drawn) == 3
