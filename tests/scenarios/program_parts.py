"""What programs are made of: a part is one function, which changes a :class:`Build` as a user would write the script.

Here are the parts that both hosts have, the loaders; those of Trainers and Trials are in modules of their own.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, WeightedRandomSampler, get_worker_info


@dataclass(frozen=True)
class Part:
    """
    Attributes:
        kind: Of several parts of a kind a program has one.
        without: The kinds, or names of functions, that it does not go with.
        can_be_cut: Its state is in a checkpoint, by the rules of the documentation.
        samples_draw: When they are loaded. One process does so as several do if it is told.
    """

    function: Callable[..., None]
    variant: str
    kind: str
    without: tuple[str, ...]
    can_be_cut: bool
    samples_draw: bool

    @property
    def name(self) -> str:
        return self.function.__name__ + (f"={self.variant}" if self.variant else "")

    def add_to(self, build: Build) -> None:
        build.rng = random.Random(f"{build.seed} {self.name}")
        self.function(build, *([self.variant] if self.variant else []))

    def goes_with(self, other: Part) -> bool:
        names = (self.kind, self.function.__name__), (other.kind, other.function.__name__)
        is_same = self.kind == other.kind or self.function is other.function
        return not is_same and not {*self.without} & {*names[1]} and not {*other.without} & {*names[0]}


PARTS: dict[str, dict[str, Part]] = {"trainer": {}, "trial": {}}
Function = Callable[..., None]
Change = Callable[[torch.Tensor], torch.Tensor]


def part(
    hosts: str = "trainer trial",
    kind: str = "",
    without: str = "",
    each: Iterable[str] = ("",),
    can_be_cut: bool = True,
    samples_draw: bool = False,
) -> Callable[[Function], Function]:
    """Make a part of a function; with ``each``, one for each of these arguments."""

    def decorator(function: Function) -> Function:
        for variant in each:
            made = Part(function, variant, kind or function.__name__, tuple(without.split()), can_be_cut, samples_draw)
            for host in hosts.split():
                PARTS[host][made.name] = made
        return function

    return decorator


class Build:
    """A program while its parts are put together.

    Attributes:
        rng: For the part's own choices, which depend on no other part.
        data: Makes a data set of so many samples, by a seed.
        goes_on: This is a run that is resumed.
        given: Options of the strategy or the callback, which one process does not need.
        before, after: What is called before and after the run; what they return is compared, too.
        allowed: Patterns of messages of errors that may stand in place of one process's numbers.
    """

    rng: random.Random

    def __init__(self, seed: int, data: Callable[..., Any], goes_on: bool) -> None:
        self.seed, self.data, self.goes_on = seed, data, goes_on
        self.train: Any = DataLoader(data(29), 8, shuffle=True)
        self.validation: Any = DataLoader(data(13, 9), 5)
        self.epochs = 2
        self.allowed: list[str] = []
        self.given: dict[str, Any] = {}
        self.callbacks: list[Any] = []
        self.before: list[Callable[[], Any]] = []
        self.after: list[Callable[[], Any]] = []

    def maybe(self, chance: float = 0.5) -> bool:
        return self.rng.random() < chance

    def insert(self, layer: Callable[[], nn.Module], is_first: bool) -> None:
        """Let the model have a layer in front, or near its end."""
        raise NotImplementedError

    def change_batches(self, change: Change) -> None:
        """In a hook."""
        raise NotImplementedError

    def change_predictions(self, change: Change) -> None:
        """In the loss."""
        raise NotImplementedError

    def change_gradients(self, change: Callable[[Iterable[nn.Parameter]], None]) -> None:
        """Once they are those of the whole batch."""
        raise NotImplementedError


def of_parts(host: str, make: Callable[[Any], Build], *programs: str) -> Callable[[Any], Any]:
    """A scenario: these programs, one after the other, each by the names of its parts."""

    def built(within: Any, names: str) -> Any:
        build: Any = make(within)
        for name in names.split():
            PARTS[host][name].add_to(build)
        return build.run()

    return lambda within: [built(within, names) for names in programs]


# --- state ------------------------------------------------------------------------------------------------------------


@dataclass
class Calls:
    count: int = 0


class Meter:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self) -> None:
        self.count += 1


def add(kept: Any) -> None:
    """Let a container know of one more call."""
    if isinstance(kept, list | deque):
        kept.append(1)
    elif isinstance(kept, dict):
        kept["calls"] = kept.get("calls", 0) + 1
    elif isinstance(kept, set):
        kept.add(len(kept))
    elif isinstance(kept, torch.Tensor):
        kept += 1
    else:
        kept.count += 1


def calls_in(kept: Any) -> int:
    if isinstance(kept, dict):
        return int(kept.get("calls", 0))
    if isinstance(kept, torch.Tensor):
        return int(kept)
    return len(kept) if isinstance(kept, list | deque | set) else int(kept.count)


OTHER_AMOUNT = "has drawn another amount than rank 0|when, how often or how much it draws depends on the samples"
PLAIN: dict[str, Callable[[], Any]] = {"list": list, "dict": dict, "tensor": lambda: torch.zeros(1)}
CONTAINERS = PLAIN | {
    "set": set,
    "deque": deque,
    "Counter": Counter,
    "defaultdict": lambda: defaultdict(int),
    "OrderedDict": OrderedDict,
    "dataclass": Calls,
    "object": Meter,
}

# --- loaders ----------------------------------------------------------------------------------------------------------


@part(kind="train")
def shuffled(p: Build) -> None:
    own = torch.Generator().manual_seed(3) if p.maybe() else None
    p.train = DataLoader(p.data(p.rng.randint(18, 40)), p.rng.randint(3, 9), True, drop_last=p.maybe(), generator=own)


@part(kind="train", without="batchnorm")
def batches_smaller_than_the_world(p: Build) -> None:
    p.train = DataLoader(p.data(p.rng.randint(5, 9)), p.rng.randint(1, 2), shuffle=p.maybe())


@part(kind="train")
def weighted_sampler(p: Build) -> None:
    samples = p.rng.randint(12, 30)
    sampler = WeightedRandomSampler([1.0 + index % 3 for index in range(samples)], samples + p.rng.randint(-5, 5))
    p.train = DataLoader(p.data(samples), p.rng.randint(3, 7), sampler=sampler)


class Counting(Sampler[int]):
    """Counts its epochs itself, or is told by ``set_epoch``."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.epoch += 1
        return iter(order)


class Told(Counting):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Buckets(Counting):
    """Batches of sizes that differ."""

    def sizes(self) -> list[int]:
        return [3, 7, 1, 4, 6, self.size - 21]

    def __len__(self) -> int:
        return len(self.sizes())

    def __iter__(self) -> Iterator[Any]:
        order = super().__iter__()
        yield from (list(itertools.islice(order, size)) for size in self.sizes())


@part(kind="train", each=("counting", "told"))
def sampler_with_epochs(p: Build, how: str) -> None:
    samples = p.rng.randint(14, 30)
    sampler = (Told if how == "told" else Counting)(samples)
    p.train = DataLoader(p.data(samples), p.rng.randint(3, 7), sampler=sampler)


@part(kind="train")
def batch_sampler_with_epochs(p: Build) -> None:
    samples = p.rng.randint(22, 30)
    p.train = DataLoader(p.data(samples), batch_sampler=Buckets(samples))


class Stream(IterableDataset[Any]):
    """Each worker has every n-th sample."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.epoch = list(rows), 0

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        turned = self.rows[self.epoch :] + self.rows[: self.epoch]  # each epoch begins one sample later
        self.epoch += 1
        return iter(turned if worker is None else turned[worker.id :: worker.num_workers])


class Shuffled(Stream):
    def __iter__(self) -> Iterator[Any]:
        rows = list(super().__iter__())
        return iter([rows[index] for index in torch.randperm(len(rows)).tolist()])


class Sized(Shuffled):
    def __len__(self) -> int:
        return len(self.rows)


def drawn_by(library: str, count: int) -> list[int]:
    """Some numbers below ``count``, from a library's global generator."""
    if library == "torch":
        return torch.randperm(count)[:6].tolist()
    if library == "python":
        return random.sample(range(count), random.randint(4, 6))
    return [int(each) for each in numpy.random.choice(count, 5, replace=False)]


class DrawnStream(Sized):
    def __init__(self, rows: Any, library: str) -> None:
        super().__init__(rows)
        self.library = library

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[drawn_by(self.library, len(self.rows))[0]] for _ in self.rows)


class DrawnBatches(Sampler[list[int]]):
    def __init__(self, samples: int, library: str) -> None:
        self.samples, self.library = samples, library

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        return (drawn_by(self.library, self.samples) for _ in range(len(self)))


class CountedStream(Stream):
    """What a sample is depends on how many there were. Without a length: hosts draw a batch ahead."""

    def __init__(self, rows: Any) -> None:
        super().__init__(rows)
        self.seen = 0

    def __iter__(self) -> Iterator[Any]:
        for _ in self.rows:
            self.seen += 1
            yield self.rows[self.seen % 7 % len(self.rows)]


@part("trainer", kind="train")
def iterable_that_counts(p: Build) -> None:
    p.train = DataLoader(CountedStream(p.data(p.rng.randint(12, 26))), p.rng.randint(3, 7))


DRAWN = ("torch", "python", "numpy")
TURNS = "draws from a copy"  # in a run that may stop anywhere


@part(kind="train", each=DRAWN)
def iterable_that_draws(p: Build, library: str) -> None:
    p.allowed.append(TURNS)
    p.train = DataLoader(DrawnStream(p.data(p.rng.randint(12, 26)), library), p.rng.randint(3, 7))


@part(kind="train", each=DRAWN)
def batch_sampler_that_draws(p: Build, library: str) -> None:
    p.allowed.append(TURNS)
    samples = p.rng.randint(14, 26)
    workers = p.rng.choice([0, 0, 1])
    p.train = DataLoader(p.data(samples), batch_sampler=DrawnBatches(samples, library), num_workers=workers)


@part("trainer", kind="train")
def iterable_without_length(p: Build) -> None:
    p.train = DataLoader((Shuffled if p.maybe() else Stream)(p.data(p.rng.randint(12, 26))), p.rng.randint(3, 7))


@part(kind="train")
def iterable(p: Build) -> None:
    p.train = DataLoader(Sized(p.data(p.rng.randint(12, 26))), p.rng.randint(3, 7))


@part(kind="train", each=("1", "2"))
def workers(p: Build, count: str) -> None:
    persists = p.maybe()
    p.train = DataLoader(
        p.data(p.rng.randint(12, 26)), p.rng.randint(3, 7), True, num_workers=int(count), persistent_workers=persists
    )


@part(kind="validation")
def validation_of_single_samples(p: Build) -> None:
    p.validation = DataLoader(p.data(p.rng.randint(3, 5), 9), 1)


@part(kind="validation")
def validation_shuffled(p: Build) -> None:
    p.validation = DataLoader(p.data(p.rng.randint(7, 17), 9), p.rng.randint(2, 6), True, drop_last=p.maybe())


@part(kind="validation")
def validation_stream(p: Build) -> None:
    p.validation = DataLoader(Sized(p.data(p.rng.randint(7, 17), 9)), p.rng.randint(2, 6))


@part(kind="validation")
def no_validation(p: Build) -> None:
    p.validation = None
