"""Loaders that are cut in one process, states that are refused, and ``LazyRandomSampler``."""

from __future__ import annotations

import functools
import io
import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from loaders import LOADERS, SAMPLES, Endless, Lazy, seed_all
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from ddp_callbacks import resumable_loader
from ddp_callbacks.data.global_state import get_global_state, set_global_state
from ddp_callbacks.data.samplers import LazyRandomSampler
from ddp_callbacks.data.sharding import ShardedDataLoader
from ddp_callbacks.errors import ConfigurationError

NUMBERS: Any = range(SAMPLES)


def cut(loader: Any, used: int) -> Any:
    """The state after a number of batches of the first pass."""
    batches = iter(loader)
    for _ in range(used):
        next(batches)
    state = loader.state_dict()
    loader.end()
    return state


def left(loader: Any, state: Any) -> list[Any]:
    """What is left of the pass."""
    loader.load_state_dict(state)
    return list(loader)


def lists(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("name", ["shuffle", "lazy", "stream", "one by one", "stateful stream"])
def test_a_host_may_draw_a_batch_ahead(name: str) -> None:
    def loader() -> Any:
        seed_all(0)
        return resumable_loader(LOADERS[name]())

    def samples(batches: list[Any]) -> list[Any]:
        return [(batch if batch.dim() == 2 else batch[None])[:, 0].tolist() for batch in batches]

    expected = samples(list(loader()))
    drawn = loader()
    batches = iter(drawn)
    for _ in range(6):
        next(batches)
    state = drawn.state_dict(5)
    with pytest.raises(ConfigurationError, match=r"of which 6 were handed out, got 7"):
        drawn.state_dict(7)
    drawn.end()
    assert samples(left(loader(), state)) == expected[5:]


def test_between_passes_the_next_one_begins_afresh() -> None:
    generator = torch.Generator().manual_seed(1)
    loader = resumable_loader(DataLoader(NUMBERS, 4, shuffle=True, generator=generator))
    first = lists(loader)
    state = loader.state_dict()
    second = lists(loader)
    assert state["pass"] is None and first != second
    assert lists(left(loader, state)) == second
    state = loader.state_dict()
    third = lists(loader)
    loader.load_state_dict(cut(loader, 3))
    assert loader.state_dict()["pass"]["batches"] == 3  # nothing has been drawn since
    loader.load_state_dict(state)
    loader.start_afresh()
    assert lists(loader) == third


class Augmented(Dataset[float]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> float:
        return index + random.random()


def test_in_each_pass_samples_draw_alike_with_a_state_and_without() -> None:
    def passes(make: Callable[[Any], Any]) -> list[Any]:
        seed_all(0)
        loader = make(DataLoader(Augmented(), 4))
        return [lists(loader) for _ in range(2)]

    divided = passes(lambda loader: ShardedDataLoader(loader, "global", None, 1))
    assert divided == passes(resumable_loader) and divided[0] != divided[1]


@pytest.mark.parametrize("steps", [3, 10])
def test_what_is_saved_after_a_break_begins_the_next_pass(steps: int) -> None:
    def shuffled() -> Any:
        return resumable_loader(DataLoader(NUMBERS, 4, shuffle=True, generator=torch.Generator().manual_seed(1)))

    loader = shuffled()
    for number, _ in enumerate(loader, 1):
        if number == steps:
            break
    state = loader.state_dict()
    expected = lists(loader)
    assert len(expected) == 10 and lists(left(shuffled(), state)) == expected


def test_a_pass_cut_twice_goes_on() -> None:
    torch.manual_seed(0)
    loader = resumable_loader(DataLoader(NUMBERS, batch_sampler=Lazy()))
    state = loader.state_dict()
    before = get_global_state()
    whole = lists(left(loader, state))
    set_global_state(before)
    batches, state = iter(loader), None
    for used in (2, 3, 1):
        for _ in range(used):
            whole.remove(next(batches).tolist())
            torch.rand(2)
        loader.load_state_dict(loader.state_dict())
        random_state = get_global_state()
        batches = iter(loader)
        assert repr(get_global_state()) == repr(random_state)
    assert lists(batches) == whole


@pytest.mark.parametrize("cut_after", [0, 1, 4, 5, 9])
def test_two_loaders_may_share_a_generator(cut_after: int) -> None:
    def passes(cut_after: int | None) -> list[Any]:
        generator = torch.Generator().manual_seed(1)
        one, other = (resumable_loader(DataLoader(NUMBERS, 4, shuffle=True, generator=generator)) for _ in range(2))
        drawn, batches = [], iter(one)
        for number in range(10):
            if number == 4:
                drawn += lists(other)
            if number == cut_after:
                states = one.state_dict(), other.state_dict()
                generator.manual_seed(17)
                one.load_state_dict(states[0])
                other.load_state_dict(states[1])
                batches = iter(one)
            drawn.append(next(batches).tolist())
        return drawn + lists(one)

    assert passes(cut_after) == passes(None)


def test_an_endless_stream_goes_on() -> None:
    def loader() -> Any:
        seed_all(0)
        return resumable_loader(DataLoader(Endless(), 4))

    expected = lists(itertools.islice(loader(), 12))
    state, resumed = cut(loader(), 7), loader()
    torch.rand(3)
    resumed.load_state_dict(state)
    assert lists(itertools.islice(resumed, 5)) == expected[7:]


class Noisy(Dataset[float]):
    def __init__(self) -> None:
        self.generator = np.random.default_rng(4)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> float:
        return float(index + self.generator.random())


def test_what_a_data_set_draws_from_a_generator_of_its_own_goes_on() -> None:
    def loader() -> Any:
        seed_all(0)
        return resumable_loader(DataLoader(Noisy(), 4))

    expected, state = lists(loader()), cut(loader(), 6)
    torch.rand(3)
    assert lists(left(resumable_loader(DataLoader(Noisy(), 4)), state)) == expected[6:]


class Orders(Sampler[int]):
    """Another order in each pass, which it counts in one of the ways in which people do."""

    def __init__(self, kind: str) -> None:
        self.kind, self.epoch, self.orders, self.weights = kind, 0, list(NUMBERS), np.ones(SAMPLES)
        self.inner = Counted()

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        if self.kind == "list":
            random.Random(self.epoch).shuffle(self.orders)
        if self.kind == "array":
            self.weights *= 1.1
        seeds = {"number": self.epoch, "array": int(self.weights[0] * 1e6), "held": self.inner.count()}
        yield from seeded(seeds[self.kind]) if self.kind in seeds else self.orders


class Counted:
    def __init__(self) -> None:
        self.counts = {"passes": 0}

    def count(self) -> int:
        self.counts["passes"] += 1
        return self.counts["passes"]


class Wrapped(Sampler[Any]):
    def __init__(self, inner: Any) -> None:
        self.inner = [inner]

    def __len__(self) -> int:
        return len(self.inner[0])

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner[0])


class Epochs(IterableDataset[int]):
    epoch = 0

    def __iter__(self) -> Iterator[int]:
        yield from seeded(self.epoch)
        self.epoch += 1


class Hidden(IterableDataset[int]):
    """It counts where nobody can look."""

    def __init__(self) -> None:
        self.passes = itertools.count()

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        yield from seeded(next(self.passes))


def seeded(seed: int) -> list[int]:
    return random.Random(seed).sample(list(NUMBERS), SAMPLES)


BY_PASS: dict[str, Callable[[], Any]] = {
    **{
        kind: functools.partial(lambda kind: DataLoader(NUMBERS, 4, sampler=Orders(kind)), kind)
        for kind in ("number", "list", "array", "held")
    },
    "batch sampler": lambda: DataLoader(NUMBERS, batch_sampler=Wrapped(BatchSampler(Orders("number"), 5, False))),
    "wrapped generator": lambda: DataLoader(
        NUMBERS, 4, sampler=Wrapped(RandomSampler(NUMBERS, generator=torch.Generator().manual_seed(1)))
    ),
    "iterable": lambda: DataLoader(Epochs(), 4),
    "chained": lambda: DataLoader(ChainDataset([Epochs(), Epochs()]), 4),
}


@pytest.mark.parametrize("name", BY_PASS)
def test_an_order_that_depends_on_the_pass_goes_on(name: str) -> None:
    """Samplers and iterable data sets that count their passes go on."""
    whole = resumable_loader(BY_PASS[name]())
    passes = [lists(whole) for _ in range(4)]
    assert all(one != other for one, other in itertools.combinations(passes, 2))
    first = resumable_loader(BY_PASS[name]())
    for number in range(3):
        between = plainly_saved(first.state_dict())
        loader = resumable_loader(BY_PASS[name]())
        loader.load_state_dict(between)
        assert [lists(loader) for _ in range(4 - number)] == passes[number:]
        within = plainly_saved(cut(first, 3))
        loader = resumable_loader(BY_PASS[name]())
        assert lists(left(loader, within)) == passes[number][3:]
        assert lists(loader) == passes[number + 1]
        first.load_state_dict(between)
        assert lists(first) == passes[number]


@pytest.mark.parametrize("loader", [lambda: DataLoader(Hidden(), 4), lambda: DataLoader(NUMBERS, 4, sampler=Hidden())])
def test_a_count_of_passes_that_cannot_be_saved_is_an_error(loader: Callable[[], Any]) -> None:
    """An order that cannot go on raises an error."""
    first = resumable_loader(loader())
    state = [list(first), list(first), first.state_dict()][-1]
    with pytest.raises(
        ConfigurationError, match=r"does not (yield|draw) the batches of the run .* in plain attributes"
    ):
        left(resumable_loader(loader()), state)
    batches = resumable_loader(iter([torch.ones(2)] * 3))
    state = [list(batches), batches.state_dict()][-1]
    with pytest.raises(
        ConfigurationError, match=r"a list_iterator cannot begin a pass again: it .* give an iterable whose"
    ):
        left(resumable_loader(iter([torch.ones(2)] * 3)), state)


def plainly_saved(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_long_attributes_and_those_that_stay_are_not_in_the_state() -> None:
    sampler = Orders("number")
    sampler.longer, sampler.weights = list(range(200_000)), np.ones(100_000)
    loader = resumable_loader(DataLoader(NUMBERS, 4, sampler=sampler))
    list(loader)
    sampler.longer.reverse()
    assert loader.state_dict()["attributes"].keys() == {"sampler.sampler.epoch", "sampler.sampler.inner.counts"}


SHUFFLED = DataLoader(NUMBERS, 4, shuffle=True, generator=torch.Generator().manual_seed(1))
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "order": (
        SHUFFLED,
        DataLoader(NUMBERS, 4, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)),
        "WeightedRandomSampler does not yield the batches of the run that was saved: batch",
    ),
    "epoch": (
        DataLoader(NUMBERS, 4, sampler=LazyRandomSampler(NUMBERS, seed=1)),
        DataLoader(NUMBERS, 4, sampler=LazyRandomSampler(NUMBERS, seed=2)),
        r"LazyRandomSampler does not .* or be set before the pass, as by set_epoch",
    ),
    "data": (
        SHUFFLED,
        DataLoader(range(SAMPLES - 1), 4, shuffle=True),  # type: ignore[arg-type]
        r"samples in the data set must be 37, .* got 36",
    ),
    "batch size": (SHUFFLED, DataLoader(NUMBERS, 5, shuffle=True), r"samples in a batch must be 4, .* got 5"),
    "workers": (
        DataLoader(Epochs(), 4, num_workers=2),
        DataLoader(Epochs(), 4, num_workers=1),
        r"num_workers of an iterable data set must be 2, as in the run .* got 1\. Resume with 2, or from a state that",
    ),
    "batches": (
        [torch.ones(3), torch.zeros(3), torch.ones(3), torch.ones(3)],
        [torch.zeros(3), torch.zeros(3), torch.ones(3), torch.ones(3)],
        "list does not yield the batches",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_state_of_another_order_or_data_set_is_refused(name: str) -> None:
    """A loader refuses the state of other data."""
    saved, other, message = REFUSED[name]
    state = cut(resumable_loader(saved), 3)
    with pytest.raises(ConfigurationError, match=message):
        left(resumable_loader(other), state)


# --- LazyRandomSampler ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 10, 4096, 5001])
def test_a_lazy_shuffle_yields_each_index_once(size: int) -> None:
    """`LazyRandomSampler` yields each index once, evenly spread."""
    sampler = LazyRandomSampler(range(size), seed=3)
    whole = list(sampler)
    assert sorted(whole) == list(range(size)) and len(sampler) == size
    assert list(sampler.iterate_from(size // 2)) == whole[size // 2 :]
    sampler.set_epoch(1)
    assert size < 10 or list(sampler) != whole
    torch.manual_seed(1)
    drawn = list(LazyRandomSampler(range(size)))
    assert size < 10 or drawn != list(LazyRandomSampler(range(size)))  # each pass its own
    torch.manual_seed(1)
    assert list(LazyRandomSampler(range(size))) == drawn


def test_a_lazy_shuffle_spreads_evenly() -> None:
    # How often index i comes at position j, over 40 x 40 cells: chi square as for random permutations.
    size, cells, epochs = 400, 40, 200
    counts = torch.zeros(cells, cells, dtype=torch.float64)
    sampler = LazyRandomSampler(range(size), seed=0)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        places = torch.tensor(list(sampler)) * cells // size
        counts.view(-1).index_add_(0, torch.arange(size) * cells // size * cells + places, torch.ones(size).double())
    expected = epochs * size / cells**2
    chi_square, freedom = float(((counts - expected) ** 2 / expected).sum()), (cells - 1) ** 2
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5


LAZY = LazyRandomSampler(range(10**8), seed=1)
TORCHS = RandomSampler(range(10**6), generator=torch.Generator().manual_seed(1))
HUGE: dict[str, tuple[Any, int, Any]] = {  # sampler, batches, and the order from a sample on
    "lazy": (LAZY, 10**6, LAZY.iterate_from),
    "torch": (TORCHS, 10**5, lambda first: torch.randperm(10**6, generator=torch.Generator().manual_seed(1))[first:]),
}


@pytest.mark.parametrize("name", HUGE)
def test_the_first_batch_after_many_of_a_huge_data_set_comes_at_once(name: str) -> None:
    """After a million batches it goes on at once."""
    (sampler, batches, order), size = HUGE[name], 8
    both = [int(index) for index in itertools.islice(order((batches - 1) * size), 2 * size)]
    last, expected = both[:size], both[size:]
    loader = resumable_loader(DataLoader(range(len(sampler)), size, sampler=sampler))  # type: ignore[arg-type]
    running = iter(loader)
    next(running)
    state = loader.state_dict()
    state["pass"] |= {"batches": batches, "drawn": batches, "last": last}
    begin = time.thread_time()
    loader.load_state_dict(state)
    assert next(iter(loader)).tolist() == expected
    assert time.thread_time() - begin < 2
