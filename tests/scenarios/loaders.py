"""Loaders of every kind, what ranks draw from them, and what they draw after a cut."""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)
from ways import Way

from ddp_callbacks import get_rank, get_world_size, resumable_loader
from ddp_callbacks.data.iterator import ShardedIterator
from ddp_callbacks.data.random_state import RunRandomState
from ddp_callbacks.data.samplers import LazyRandomSampler

SAMPLES = 37  # nine batches of four, and one sample, of which most ranks have none
BATCH_SIZE = 4
PASSES = 2
SEED = 5

Rows = list[list[list[float]]]  # of each batch, this rank's samples


class Noise:
    """A transform with generators of its own."""

    def __init__(self) -> None:
        self.generator, self.python = torch.Generator(), random.Random()
        self.others: dict[str, list[Any]] = {"numpy": [np.random.default_rng(), np.random.RandomState()]}

    def __call__(self) -> list[float]:
        drawn = [torch.rand((), generator=self.generator).item(), self.python.random()]
        return [*drawn, *(each.random() for each in self.others["numpy"])]


class Data(Dataset[Any]):
    """A sample: its number, and what it has drawn. It counts how often each was loaded, in all processes."""

    augments = True

    def __init__(self, *transforms: Noise) -> None:
        self.transforms = transforms
        self.loaded = torch.zeros(SAMPLES, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: Any) -> torch.Tensor:
        if isinstance(index, list):
            return torch.stack([self[number] for number in index])
        self.loaded[index] += 1
        if not self.augments:
            return torch.tensor([index], dtype=torch.float64)
        drawn = [torch.rand(()).item(), random.random(), np.random.rand()]
        return torch.tensor([index, *drawn, *(own for each in self.transforms for own in each())], dtype=torch.float64)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        for number in torch.randperm(SAMPLES).tolist():
            if worker is None or number % worker.num_workers == worker.id:
                yield torch.tensor([number, random.random()], dtype=torch.float64)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.tensor([torch.randint(1000, ()).item(), random.random()], dtype=torch.float64)


class Lazy(Sampler[list[int]]):
    """Draws each batch when it is asked for: from the global random state, or from a generator of its own."""

    def __init__(self, own: np.random.Generator | None = None) -> None:
        self.own = own

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            if self.own is None:
                yield np.random.randint(0, SAMPLES, size=random.randint(2, 7)).tolist()
            else:
                yield self.own.integers(0, SAMPLES, size=5).tolist()


class AtOnce(Sampler[list[int]]):
    """Draws all batches when a pass begins: torch calls its ``__iter__`` before it draws a seed for workers."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[list[int]]:
        return iter([part.tolist() for part in torch.randperm(SAMPLES).chunk(len(self))])


def weighted() -> Any:
    weights = torch.arange(1, SAMPLES + 1, dtype=torch.float64)
    sampler = WeightedRandomSampler(weights.tolist(), SAMPLES, generator=torch.Generator().manual_seed(3))
    return DataLoader(Data(), BATCH_SIZE, sampler=sampler)


def stateful(data: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    warnings.filterwarnings("ignore", "'set_vital'")  # torchdata calls it, torch 2.13 deprecates it
    return StatefulDataLoader(data, BATCH_SIZE, shuffle=isinstance(data, Data))


PLAIN: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: DataLoader(Data(Noise()), BATCH_SIZE, shuffle=True),
    "generator": lambda: DataLoader(Data(), BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(7)),
    "replacement": lambda: DataLoader(Data(), BATCH_SIZE, sampler=RandomSampler(range(SAMPLES), True, 30)),
    "weighted": weighted,
    "drop_last": lambda: DataLoader(Data(), BATCH_SIZE, shuffle=True, drop_last=True),
    "in order": lambda: DataLoader(Data(), BATCH_SIZE),
    "small batches": lambda: DataLoader(Data(), 2, shuffle=True),
    "at once": lambda: DataLoader(Data(), batch_sampler=AtOnce()),
}
"""With torch's samplers, which draw the order first: on one process, the numbers of the plain loader."""

WORKERS: dict[str, Callable[[], Any]] = {
    "workers": lambda: DataLoader(Data(Noise()), BATCH_SIZE, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(Data(Noise()), BATCH_SIZE, shuffle=True, num_workers=2, persistent_workers=True),
    "at once, workers": lambda: DataLoader(Data(Noise()), batch_sampler=AtOnce(), num_workers=2),
    "stream, workers": lambda: DataLoader(Stream(), BATCH_SIZE, num_workers=2, persistent_workers=True),
}

OTHERS: dict[str, Callable[[], Any]] = {
    "lazily shuffled": lambda: DataLoader(Data(), BATCH_SIZE, sampler=LazyRandomSampler(range(SAMPLES))),
    "lazy": lambda: DataLoader(Data(), batch_sampler=Lazy()),
    "lazy, own generator": lambda: DataLoader(Data(), batch_sampler=Lazy(np.random.default_rng(2))),
    "stream": lambda: DataLoader(Stream(), BATCH_SIZE),
    "batches as samples": lambda: DataLoader(
        Data(Noise()), batch_size=None, sampler=BatchSampler(RandomSampler(range(SAMPLES)), BATCH_SIZE, False)
    ),
    "list": lambda: [torch.full((3, 2), float(number), dtype=torch.float64) for number in range(6)],
    "stateful": lambda: stateful(Data()),
    "stateful stream": lambda: stateful(Stream()),
}
BOUND: dict[str, Callable[[], Any]] = {
    "one by one": lambda: DataLoader(Data(), batch_size=None, shuffle=True),
    "one by one, workers": lambda: DataLoader(Data(), None, shuffle=True, num_workers=1),
    "distributed": lambda: DataLoader(
        data := Data(), BATCH_SIZE, sampler=DistributedSampler(data, get_world_size(), get_rank()), num_workers=1
    ),
}
"""They go on with as many processes alone."""

LOADERS = PLAIN | WORKERS | OTHERS | BOUND
COUNTED = ("shuffle", "lazy", "workers", "persistent", "one by one", "distributed")


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def use(batch: torch.Tensor) -> None:
    """Compute with a batch: dropout draws."""
    torch.rand(3)
    random.random()
    np.random.rand()


def rows_of(batches: Any, number: int | None = None) -> tuple[Rows, int]:
    """This rank's samples of the next batches, all that are left if there is no number; how many had to be loaded."""
    rows: Rows = []
    loaded = 0
    while number is None or len(rows) < number:
        batch = next(batches, None)
        if batch is None:
            break
        share = batches.take_share() if isinstance(batches, ShardedIterator) else None
        of_batch = batch if batch.dim() == 2 else batch[None]
        loaded += len(of_batch)
        rows.append(of_batch.tolist() if share is None or share.local else [])
        use(batch)
    return rows, loaded


def begin(name: str, how: Any, seed: int) -> tuple[Any, RunRandomState]:
    warnings.filterwarnings("ignore", ".*global generator, and the steps or other")
    seed_all(seed)
    loader, run = resumable_loader(LOADERS[name](), how), RunRandomState()
    run.synchronize()
    return loader, run


def state_at(name: str, cut: tuple[int, int], how: str) -> Any:
    """The states of the loader and of the random numbers in a pass after a number of batches, as a file has them."""
    loader, run = begin(name, how, SEED)
    for _ in range(cut[0]):
        rows_of(iter(loader))
    running = iter(loader)
    rows_of(running, cut[1])
    file = io.BytesIO()
    torch.save((loader.state_dict(), run.state_dict()), file)
    loader.end()
    file.seek(0)
    return torch.load(file, weights_only=True)


def draw(way: Way, names: list[str], augments: bool, seed: str, how: str = "global") -> dict[str, Any]:
    """Of each loader: this rank's samples of all passes; the cuts (pass, batches used), and the states there."""
    way.enter()
    Data.augments = augments
    results = {}
    for name in names:
        loader, _ = begin(name, how, SEED)
        whole = [rows_of(iter(loader))[0] for _ in range(PASSES)]
        loader.end()
        choice = random.Random(name + seed)
        number = choice.randrange(PASSES)
        cuts = [(number, choice.randint(0, len(whole[number])))]
        if name == "shuffle":  # at the beginning, at the end of a pass, and before the last batch, of one sample
            cuts += [(0, 0), (0, len(whole[0])), (1, len(whole[1]) - 1)]
        results[name] = whole, cuts, [state_at(name, cut, how) for cut in cuts]
    return results


def go_on(way: Way, cuts: list[tuple[str, Any, int]], augments: bool, how: str = "global") -> list[Any]:
    """After each cut (loader, states of the ranks, passes that follow): this rank's samples of the rest and of these.

    Also how many samples were loaded for the rest, and how many had to be.
    """
    way.enter()
    Data.augments = augments
    return [_go_on(name, states, passes, how) for name, states, passes in cuts]


def _go_on(name: str, states: Any, passes: int, how: str) -> Any:
    loader, run = begin(name, how, 100)  # this run has drawn other numbers before
    of_loader, of_run = states[get_rank() if len(states) == get_world_size() else 0]
    loader.load_state_dict(of_loader)
    batches = iter(loader)
    run.load_state_dict(of_run)
    rest, needed = rows_of(batches)
    loaded = int(loader.dataset.loaded.sum()) if name in COUNTED else needed
    rows = [rest, *(rows_of(iter(loader))[0] for _ in range(passes))]
    loader.end()
    return rows, loaded, needed


def draw_plainly(names: list[str], augments: bool) -> dict[str, list[Rows]]:
    """The samples of the plain loader, on one process."""
    Data.augments, results = augments, {}
    for name in names:
        seed_all(SEED)
        loader = LOADERS[name]()
        results[name] = [rows_of(iter(loader))[0] for _ in range(PASSES)]
    return results
