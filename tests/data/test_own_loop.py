"""A loop of one's own, without a host framework: what each process computes is its part of the same batches."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.commands import run, start
from kit.machine import Slowness
from shared_worlds import TWO, WIDE, World, by_rank
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler, TensorDataset
from torch.utils.data._utils import MP_STATUS_CHECK_INTERVAL

from ddp_callbacks import GradientSynchronizer, WholeDraws, get_rank, get_world_size, shard_loader, with_shares
from ddp_callbacks.data.shares import Share
from ddp_callbacks.errors import ConfigurationError, MismatchError

WORLD = World(__name__)
BATCH_SIZE = 8
SAMPLES = 25  # three batches, and one of a single sample, which most processes don't have
SIZES = (8, 8, 8, 1)
pytestmark = pytest.mark.shares_results()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(samples())


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 5, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))


LOADERS = {
    "map-style": lambda: DataLoader(samples(), BATCH_SIZE, shuffle=True),
    "stream": lambda: DataLoader(Stream(), BATCH_SIZE),
}


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()


@WORLD.each(LOADERS, TWO, WIDE)
def test_the_processes_of_a_loop_train_as_one(name: str) -> None:
    """Your own loop trains as on one process."""
    train_beside_plain_torch(name, 1e-12)


def test_one_process_has_the_whole_of_each_batch_bit_for_bit() -> None:
    """On one process your own loop keeps every bit."""
    train_beside_plain_torch("map-style", 0.0)


def train_beside_plain_torch(name: str, relative: float) -> None:
    alone, optimizer = network()
    loader = LOADERS[name]()
    for batch in (drawn for _ in range(2) for drawn in loader):
        step(alone, optimizer, *batch)
    model, optimizer = network()
    part, shares = with_shares(shard_loader(LOADERS[name]())), []  # kept over epochs
    with closing(GradientSynchronizer(model)) as synchronizer:
        for batch, share in (drawn for _ in range(2) for drawn in part):
            synchronizer.weigh(share.local, share.total)
            step(model, optimizer, *batch)
            shares.append(share)
    torch.testing.assert_close([*model.parameters()], [*alone.parameters()], rtol=relative, atol=0)
    rank, count = get_rank(), get_world_size()
    assert shares == [Share((size - rank + count - 1) // count, size) for size in SIZES] * 2


def dropping_out(makes: Callable[[DataLoader[Any]], Iterator[Any]], model: nn.Module, step: Callable[..., Any]) -> Any:
    torch.manual_seed(4)
    loader = DataLoader(samples(), BATCH_SIZE, shuffle=True)
    for drawn in (drawn for _ in range(2) for drawn in makes(loader)):
        step(*drawn)
    return [*model.parameters(), torch.rand(2)] if get_rank() == 0 else [*model.parameters()]


@WORLD.on(TWO, WIDE)
def test_the_dropout_of_a_loop_is_that_of_one_process() -> None:
    models = []
    for _ in range(2):
        model, optimizer = network()
        models.append((nn.Sequential(nn.Dropout(0.2), model, nn.Dropout(0.5)), optimizer))
    (alone, its), (model, optimizer) = models
    expected = dropping_out(iter, alone, lambda *batch: step(alone, its, *batch))
    draws = WholeDraws(model)
    with closing(GradientSynchronizer(model)) as synchronizer:

        def step_whole(batch: Any, share: Share) -> None:
            synchronizer.weigh(share.local, share.total)
            with draws.batch(share.rows):
                step(model, optimizer, *batch)

        found = dropping_out(lambda loader: with_shares(shard_loader(loader), draws), model, step_whole)
    torch.testing.assert_close(found, expected[: len(found)], rtol=1e-10, atol=1e-12)


@WORLD
def test_what_the_body_of_a_loop_draws_beside_its_batches_is_named() -> None:
    def run(draws_inside: bool, draws_outside: bool) -> None:
        draws = WholeDraws(nn.Identity())
        for (x, *_), share in with_shares(shard_loader(DataLoader(samples(), BATCH_SIZE)), draws):
            with draws.batch(share.rows):
                nn.functional.dropout(x) if draws_inside else x
            torch.rand(2) if draws_outside else None

    run(True, False)
    run(False, True)
    with pytest.warns(UserWarning, match=r"code of the loop draws outside of `with draws\.batch\(share\.rows\)`"):
        run(True, True)


class Drawing(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.randn(3) for _ in range(4 * BATCH_SIZE))


@WORLD
def test_a_loader_that_would_take_turns_with_the_batches_of_a_loop_is_named() -> None:
    def run(draws_inside: bool) -> None:
        draws = WholeDraws(nn.Identity())
        for x, share in with_shares(shard_loader(DataLoader(Drawing(), BATCH_SIZE)), draws):
            with draws.batch(share.rows):
                nn.functional.dropout(x) if draws_inside else x

    run(False)
    match = (
        "the loop's sampler, loader or iterable data set draws from torch's global generator, and the batches do, too"
    )
    with pytest.warns(UserWarning, match=match) if get_rank() == 0 else contextlib.nullcontext():
        run(True)


@WORLD
def test_unequal_parts_without_weights_are_named_once_and_equal_ones_are_not() -> None:
    def said_of(batch_size: int) -> list[list[str]]:
        model, optimizer = network()
        with warnings.catch_warnings(record=True) as caught, closing(GradientSynchronizer(model)):
            warnings.simplefilter("always")
            for batch in shard_loader(DataLoader(samples(), batch_size, drop_last=True)):
                step(model, optimizer, *batch)
        return by_rank([str(each.message) for each in caught if "unequal" in str(each.message)])

    (text,), of_others = said_of(5)
    assert text.startswith("the processes have unequal parts of batch 1 (3 of 5 samples here), but their losses count")
    assert of_others == [] and said_of(8) == [[], []]


@WORLD
def test_unequal_parts_without_weights_are_named_of_the_second_synchronizer_too() -> None:
    pairs = [network(), network()]
    with contextlib.ExitStack() as stack:
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        first, _ = [stack.enter_context(closing(GradientSynchronizer(model))) for model, _ in pairs]
        for batch, share in with_shares(shard_loader(DataLoader(samples(), 5, drop_last=True))):
            first.weigh(share.local, share.total)
            for model, optimizer in pairs:
                step(model, optimizer, *batch)
    said, of_others = by_rank([str(each.message) for each in caught if "unequal" in str(each.message)])
    assert len(said) == 1 and of_others == []


@WORLD
def test_a_rank_leaves_out_the_backward_of_a_batch_and_another_that_of_a_later_one() -> None:
    for weighs_all in (True, False):
        model, optimizer = network()
        part, drawn = shard_loader(LOADERS["map-style"]()), []
        with (
            closing(GradientSynchronizer(model)) as synchronizer,
            pytest.raises(MismatchError, match=r"batches 1 to 2 on rank 0; batch 1 on ranks? 1[^$]*loss \* 0"),
        ):
            for batch, share in with_shares(part):
                drawn.append(share)
                is_left_out = get_rank() == len(drawn) - 1
                if weighs_all or not is_left_out:
                    synchronizer.weigh(share.local, share.total)
                if not is_left_out:
                    step(model, optimizer, *batch)


@WORLD
def test_the_total_of_a_distributed_sampler_s_batches_is_not_known() -> None:
    own = DataLoader(samples(), BATCH_SIZE, sampler=DistributedSampler(samples(), shuffle=False))
    shares = [share for _, share in with_shares(shard_loader(own, "per_process"))]
    assert shares == [Share(8, None), Share(5, None)]


class Reacting:
    """Yields what the loop has asked for after the batch before."""

    def __init__(self) -> None:
        self.next = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            yield [self.next, self.next + 1, self.next + 2]


class Counting:
    """Shuffles by the number of its passes. torch's loader begins two for each pass for which it starts workers."""

    def __init__(self) -> None:
        self.passes = 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        self.passes += 1
        order = torch.randperm(20, generator=torch.Generator().manual_seed(self.passes)).tolist()
        return iter([order[first : first + 4] for first in range(0, 20, 4)])


class FromSystem(Sampler[int]):
    """No seed makes two processes draw the same."""

    def __iter__(self) -> Iterator[int]:
        return iter([int.from_bytes(os.urandom(4), "little") % SAMPLES for _ in range(len(self))])

    def __len__(self) -> int:
        return 24


NUMBERS: Any = range(SAMPLES)
ORDERS = {
    "seeded": lambda: DataLoader(NUMBERS, 4, shuffle=True, generator=torch.Generator().manual_seed(1)),
    "replacement": lambda: DataLoader(
        NUMBERS, 4, sampler=RandomSampler(NUMBERS, True, 40, torch.Generator().manual_seed(1))
    ),
    "reacts": lambda: DataLoader(NUMBERS, batch_sampler=Reacting()),
    "counts": lambda: DataLoader(NUMBERS, batch_sampler=Counting()),
    "counts, workers": lambda: DataLoader(NUMBERS, batch_sampler=Counting(), num_workers=1),
    "counts, same workers": lambda: DataLoader(
        NUMBERS, batch_sampler=Counting(), num_workers=1, persistent_workers=True
    ),
}


def stop_early(name: str, divide: Any) -> list[list[int]]:
    """The batches of three passes that end after four; all ranks' parts, if they are divided."""
    loader = ORDERS[name]()
    part, seen = divide(loader), []
    for _ in range(3):
        for number, (batch, share) in enumerate(with_shares(part)):
            seen.append(batch.tolist()[: share.local])
            loader.batch_sampler.next = 3 * number  # type: ignore[union-attr]
            if number == 3:
                break
    return seen


class Replay(IterableDataset[Any]):
    """Yields what the loop has put into its buffer."""

    def __init__(self) -> None:
        self.buffer = [*samples()]

    def __iter__(self) -> Iterator[Any]:
        return (self.buffer[number % SAMPLES] for number in range(4 * SAMPLES))


@WORLD
def test_a_stream_whose_later_batches_depend_on_the_process_is_refused() -> None:
    model, optimizer = network()
    synchronizer = GradientSynchronizer(model)
    data = Replay()
    with pytest.raises(MismatchError, match="content of the batches:\n  checksum up to batch 4: ") as caught:
        for batch, share in with_shares(shard_loader(DataLoader(data, BATCH_SIZE))):
            synchronizer.weigh(share.local, share.total)
            step(model, optimizer, *batch)
            data.buffer[0] = (data.buffer[0][0] * (1 + get_rank()), data.buffer[0][1])
    assert "Let them depend neither on what the training step draws" in str(caught.value)


@WORLD.each(ORDERS, TWO)
def test_a_sampler_is_asked_for_batches_when_one_process_would_ask(name: str) -> None:
    """Samplers may react to your loop."""
    torch.manual_seed(0)
    expected = stop_early(name, lambda loader: loader)
    parts = zip(*by_rank(stop_early(name, shard_loader)), strict=True)
    assert [[index for part in step for index in part] for step in parts] == expected


@WORLD
def test_a_sampler_that_draws_from_the_system_is_asked_by_rank_0_alone() -> None:
    parts = by_rank([part.tolist() for part in shard_loader(DataLoader(NUMBERS, 4, sampler=FromSystem()))])
    assert [[len(part) for part in of_rank] for of_rank in parts] == [[2] * 6] * 2


def time_first(rows: list[Any]) -> torch.Tensor:
    return torch.stack([torch.stack([row[0], row[0], row[0]]) for row in rows], dim=1)


def ragged(rows: list[Any]) -> Any:
    return torch.zeros(len(rows)), torch.zeros(3)


UNDIVIDED: dict[str, dict[str, Any]] = {
    r"^samples must lie along the first dimension of a batch, which is divided, .*"
    r"with batch_size=8\. Let collate_fn put the samples first": {"collate_fn": time_first},
    r"^DataLoader\(in_order=False\) must be in_order=True here": {"num_workers": 1, "in_order": False},
    r"^a batch of Stream \(.*\) has no common first dimension, so it cannot be divided among the processes\. "
    r'Yield tensors that all have the samples in front, .*batch_size="per_process"': {"collate_fn": ragged},
}


@WORLD
def test_batches_that_cannot_be_divided_are_refused_with_the_remedy() -> None:
    """Loaders refuse batches that they can't divide, and unordered streams."""
    for says, options in UNDIVIDED.items():
        with pytest.raises(ConfigurationError, match=f"(?s){says}"):
            next(iter(shard_loader(DataLoader(Stream(), BATCH_SIZE, **options))))
    for one_by_one in (DataLoader(samples(), batch_size=None), samples()):
        with pytest.raises(ConfigurationError, match=r"is taken for one sample.* a batch_size\. Or let"):
            next(iter(shard_loader(one_by_one)))


class Repeats(DataLoader[Any]):
    """Changes each batch after loading it, in one pass over the samples or in several."""

    passes = 1

    def __iter__(self) -> Any:
        for _ in range(self.passes):
            for batch in super().__iter__():
                yield batch + 100


@WORLD
def test_a_loader_with_an_iter_of_its_own_is_divided_and_one_that_repeats_its_pass_there_is_refused() -> None:
    loader = Repeats(NUMBERS, 4)
    parts = by_rank([batch.tolist()[: share.local] for batch, share in with_shares(shard_loader(loader))])
    assert [first + second for first, second in zip(*parts, strict=True)] == [batch.tolist() for batch in loader]
    loader.passes = 2
    with pytest.raises(ConfigurationError, match=r"Repeats\.__iter__ begins several passes over its samples in one"):
        list(shard_loader(loader))


class FromAnother(DataLoader[Any]):
    def __init__(self, *args: Any) -> None:
        self.inner = DataLoader(*args, shuffle=True)
        super().__init__(self.inner.dataset, 2)

    def __iter__(self) -> Any:
        return iter(self.inner)


@WORLD
def test_a_loader_that_takes_batches_from_another_one_is_divided_after_loading() -> None:
    torch.manual_seed(0)
    parts = by_rank(
        [batch.tolist()[: share.local] for batch, share in with_shares(shard_loader(FromAnother(NUMBERS, 4)))]
    )
    torch.manual_seed(0)
    batches = [batch.tolist() for batch in FromAnother(NUMBERS, 4)]
    assert [first + second for first, second in zip(*parts, strict=True)] == batches


class Reorders(DataLoader[Any]):
    way = slice(None)

    def __iter__(self) -> Any:
        return iter(list(super().__iter__())[self.way])


@WORLD
def test_a_loader_that_reorders_or_skips_batches_in_its_iter_is_refused() -> None:
    loader = Reorders(NUMBERS, 4)
    for loader.way in (slice(None, None, -1), slice(None, None, 2)):
        with pytest.raises(ConfigurationError, match=r"Reorders\.__iter__ yields other batches than its sampler draws"):
            list(shard_loader(loader))
    loader.way = slice(None)
    assert len(list(shard_loader(loader))) == len(loader)


class Drops(DataLoader[Any]):
    def __iter__(self) -> Any:
        return (batch[1:] for batch in super().__iter__())


class InAThread(threading.Thread):
    def __init__(self, batches: Iterator[Any]) -> None:
        super().__init__(daemon=True)
        self.batches = batches

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self.batches)


class LoadsInAThread(DataLoader[Any]):
    def __iter__(self) -> Any:
        return InAThread(super().__iter__())


@WORLD
def test_a_loader_that_drops_rows_or_loads_in_a_thread_in_its_iter_is_named() -> None:
    with pytest.warns(UserWarning, match=r"Drops\.__iter__ yields a batch of 1 rows for 2 samples"):
        list(shard_loader(Drops(NUMBERS, 4)))
    with pytest.raises(ConfigurationError, match=r"LoadsInAThread\.__iter__ loads in a thread.* num_workers=1 instead"):
        list(shard_loader(LoadsInAThread(NUMBERS, 4)))


@WORLD
def test_a_loop_without_shares_does_not_keep_its_batches() -> None:
    part = shard_loader([torch.zeros(4, 2) for _ in range(9)])
    assert len(list(part)) == 9 and sum(len(step.batches) for step in part.steps) == 2


def leave_a_loop(dataset: Any) -> int:
    """How many workers it had."""
    part: Any = shard_loader(DataLoader(dataset, BATCH_SIZE, num_workers=2))
    batches = iter(part)
    next(batches)
    dataset.loop = {"batches": batches, "part": part}  # as a Trial, its callbacks and its data refer to each other
    return len(multiprocessing.active_children())


@WORLD
def test_the_workers_of_a_loop_that_was_left_end_at_once() -> None:
    """A loader's workers end with your loop."""
    gc.collect()  # those of other tests
    for kind in (Stream, samples):
        assert leave_a_loop(kind()) == 2
        with Slowness() as slowness:
            gc.collect()
        assert not multiprocessing.active_children()
        assert slowness.took / slowness.factor < MP_STATUS_CHECK_INTERVAL, "torch waits so long for each lost worker"


# --- where the time goes ----------------------------------------------------------------------------------------------

# Its parts take a known time, by sleeping.
LOOP = """
import time, torch
from torch.utils.data import DataLoader, TensorDataset
from ddp_callbacks import GradientSynchronizer, join_process_group, leave_process_group, shard_loader

class Slow(TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.004)
        return super().__getitem__(index)

env = join_process_group()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
synchronizer = GradientSynchronizer(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = Slow(torch.randn(40, 4), torch.zeros(40, 1))
training, validation = (shard_loader(DataLoader(data, 2 * (1 + turn))) for turn in range(2))
for epoch in range(2):
    for x, y in training:
        time.sleep(0.08 if env.rank == 1 else 0.01)
        synchronizer.weigh(1, 2)
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.005)
    with torch.no_grad():
        for x, y in validation:
            time.sleep(0.01)
time.sleep(1)  # a checkpoint
leave_process_group()
time.sleep(1)
"""
STEPS = 40
# The least seconds of each part, which nothing shortens; a busy machine only adds to them.
SLEPT = {"loading": 0.004, "between steps": 0.005, "validation": 0.009}  # per step; a validation has half the batches


@pytest.mark.slow
def test_the_report_of_a_loop_says_which_rank_is_slow(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    said = run(["ddprun", "--nproc-per-node", 2, "--trace", 5, "train.py"], tmp_path)
    (folder,) = (tmp_path / "ddprun-logs").iterdir()
    assert "; rank 1 sets the pace; at most 1." in said and f"; {folder}/report.html" in said
    ranks = json.loads((folder / "report.json").read_text())["ranks"]
    assert [rank["steps"] for rank in ranks] == [STEPS, STEPS]
    for rank, delay in zip(ranks, (0.01, 0.08), strict=True):
        least = {**SLEPT, "in forward": delay, "waiting": 0.03 if delay == 0.01 else 0.0}
        found = {part: rank["seconds"][part] / STEPS for part in least}
        assert all(found[part] > 0.95 * least[part] for part in least), (rank["rank"], found)
        assert 1 < rank["seconds"]["between steps"] - SLEPT["between steps"] * STEPS < 2
    assert ranks[1]["seconds"]["waiting"] < ranks[0]["seconds"]["waiting"] / 2
    assert f"the trace of 5 steps, for ui.perfetto.dev: {folder}/trace.json" in said
    check_trace(json.loads((folder / "trace.json").read_text())["traceEvents"])


def check_trace(events: list[dict[str, Any]]) -> None:
    """Steps 4 to 8 of both ranks: rank 0 waits for its sum while rank 1 sleeps in forward."""
    assert {(event["pid"], event["args"]["step"]) for event in events if event["ph"] != "M"} == {
        (rank, step) for rank in range(2) for step in range(4, 9)
    }
    for step in range(4, 9):
        own = [[each for each in events if each["pid"] == rank and each["args"].get("step") == step] for rank in (0, 1)]
        (begins, ends), (slow, _) = ([next(e["ts"] for e in each if e["ph"] == kind) for kind in "be"] for each in own)
        assert ends - begins > 30_000 and begins < slow < ends
        (forward,) = [each for each in own[1] if each["name"] == "in forward"]
        assert forward["dur"] > 78_000 and begins < forward["ts"] + forward["dur"] <= slow


@pytest.mark.slow
def test_a_run_that_was_stopped_says_where_its_time_went_before_it_says_by_what(tmp_path: Path) -> None:
    endless = "for epoch in range(1000):\n    print('epoch', epoch, flush=True)"  # each takes more than a second
    (tmp_path / "train.py").write_text(LOOP.replace("for epoch in range(2):", endless))
    with start(["ddprun", "--nproc-per-node", 2, "train.py"], tmp_path) as process:
        assert process.stdout is not None and any("epoch 2" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        *_, course, stopped = process.communicate(timeout=60)[0].splitlines()
    assert " of training: " in course and course.endswith("/report.html")
    assert stopped == "ddprun: stopped by SIGINT"
