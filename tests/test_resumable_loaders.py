"""A loader that was cut goes on at the next sample, on any number of processes, and loads nothing that was done."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import run_distributed
from machine import Slowness
from resumable_scenarios import (
    LOADERS,
    OTHERS,
    PASSES,
    PLAIN,
    SAMPLES,
    WORKERS,
    Endless,
    Lazy,
    draw,
    draw_plainly,
    go_on,
    seed_all,
)
from torch.utils.data import DataLoader, Dataset, RandomSampler, WeightedRandomSampler

from ddp_callbacks import LazyRandomSampler, RunRandomState, get_rank, get_world_size, resumable_loader, with_shares
from ddp_callbacks.comm.checksums import checksum_of
from ddp_callbacks.data.random_state import get_global_state, set_global_state
from ddp_callbacks.errors import ConfigurationError

WORLD_SIZES = (1, 2, 3, 4)
PAIRS = [
    pytest.param(before, after, marks=[pytest.mark.wide] if max(before, after) > 2 else [])
    for before in WORLD_SIZES
    for after in WORLD_SIZES
]
WITH_WORKERS = ((1, 1), (2, 2), (1, 2), (2, 1), (3, 2), (1, 3), (4, 1), (2, 4), (3, 3))
pytestmark = pytest.mark.shares_results


@functools.cache
def uncut(world_size: int, augments: bool) -> list[dict[str, Any]]:
    """What each rank draws, and the states at the cuts, as a checkpoint has them."""
    ranks = run_distributed(draw, world_size, list(PLAIN | WORKERS | OTHERS), augments)
    for results in ranks:
        for name, (whole, cuts, states) in results.items():
            results[name] = whole, cuts, [through_a_file(state) for state in states]
    return ranks


@functools.cache
def plainly() -> dict[str, Any]:
    return run_distributed(draw_plainly, 1, [*PLAIN, "workers"])[0]


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def joined(ranks: list[Any]) -> list[list[int]]:
    """The numbers of the samples in each batch, of all ranks' parts."""
    return [[int(row[0]) for part in parts for row in part] for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize("name", PLAIN)
def test_on_one_process_batches_are_those_of_the_plain_loader(name: str) -> None:
    assert uncut(1, True)[0][name][0] == plainly()[name]


def test_with_workers_the_order_is_that_of_the_plain_loader() -> None:
    found, expected = uncut(1, True)[0]["workers"][0], plainly()["workers"]
    assert [joined([rows]) for rows in found] == [joined([rows]) for rows in expected]


@pytest.mark.parametrize(
    "world_size", [2, pytest.param(3, marks=pytest.mark.wide), pytest.param(4, marks=pytest.mark.wide)]
)
def test_all_ranks_together_draw_what_one_process_draws(world_size: int) -> None:
    for name in PLAIN | WORKERS | OTHERS:
        one, several = uncut(1, False)[0][name][0], [rank[name][0] for rank in uncut(world_size, False)]
        for number, rows in enumerate(one):
            assert joined([rank[number] for rank in several]) == joined([rows]), name


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_cut_pass_goes_on_at_the_next_sample(before: int, after: int) -> None:
    names = [name for name in PLAIN | WORKERS | OTHERS if name not in WORKERS or (before, after) in WITH_WORKERS]
    ranks, calls, expected = uncut(before, before == after), [], []
    for name in names:
        whole, cuts, _ = ranks[0][name]
        for index, (number, used) in enumerate(cuts):
            calls.append((name, [rank[name][2][index] for rank in ranks], len(whole) - number - 1))
            expected.append((name, number, used))
    results = run_distributed(go_on, after, calls, before == after)
    for index, (name, number, used) in enumerate(expected):
        found = [rank[index][0] for rank in results]
        whole = [rank[name][0] for rank in ranks]
        left = [[rows[number][used:], *rows[number + 1 :]] for rows in whole]
        for turn in range(len(left[0])):
            assert joined([rank[turn] for rank in found]) == joined([rank[turn] for rank in left]), (name, number, used)
        if before == after:
            assert found == left, (name, number, used)  # bit for bit, with what the samples have drawn
        assert [rank[index][1] for rank in results] == [rank[index][2] for rank in results], name


@pytest.mark.parametrize("how", ["global", "per_process"])
def test_batches_of_each_process_go_on_with_as_many_alone(how: str) -> None:
    name = "distributed" if how == "global" else "shuffle"
    ranks = run_distributed(draw, 2, [name], True, how)
    _, cuts, _ = ranks[0][name]
    states = [[through_a_file(rank[name][2][index]) for rank in ranks] for index in range(len(cuts))]
    calls = [(name, of_ranks, PASSES - cut[0] - 1) for cut, of_ranks in zip(cuts, states, strict=True)]
    results = run_distributed(go_on, 2, calls, True, how)
    for index, (number, used) in enumerate(cuts):
        for rank, found in zip(ranks, results, strict=True):
            rows = rank[name][0]
            assert found[index][0] == [rows[number][used:], *rows[number + 1 :]]
            assert found[index][1] == found[index][2]
    message = "the number of processes must be 2, as in the run that was saved in the middle of a pass, got 1"
    with pytest.raises(ConfigurationError, match=message):
        resumable_loader(LOADERS[name](), how).load_state_dict(states[0][0][0])  # type: ignore[arg-type]


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


@pytest.mark.parametrize("name", ["shuffle", "lazy", "stream", "one by one", "stateful stream", "workers"])
def test_a_host_may_draw_a_batch_ahead(name: str) -> None:
    def loader() -> Any:
        seed_all(0)
        return resumable_loader(LOADERS[name]())

    expected = joined([[(batch if batch.dim() == 2 else batch[None]).tolist() for batch in loader()]])
    drawn = loader()
    batches = iter(drawn)
    for _ in range(6):
        next(batches)
    state = through_a_file(drawn.state_dict(5))
    drawn.end()
    assert (
        joined([[(batch if batch.dim() == 2 else batch[None]).tolist() for batch in left(loader(), state)]])
        == expected[5:]
    )


def test_a_state_of_batches_that_were_not_handed_out_is_refused() -> None:
    torch.manual_seed(0)
    loader = resumable_loader(DataLoader(range(SAMPLES), 4, shuffle=True))  # type: ignore[arg-type]
    next(iter(loader))
    with pytest.raises(ConfigurationError, match="at most 1, which were handed out, and at least 0, got 2"):
        loader.state_dict(2)


def test_between_passes_the_next_one_begins_afresh() -> None:
    generator = torch.Generator().manual_seed(1)
    loader = resumable_loader(DataLoader(range(SAMPLES), 4, shuffle=True, generator=generator))  # type: ignore[arg-type]
    first = [batch.tolist() for batch in loader]
    state = loader.state_dict()
    second = [batch.tolist() for batch in loader]
    assert state["pass"] is None and first != second
    assert [batch.tolist() for batch in left(loader, state)] == second
    state = loader.state_dict()
    third = [batch.tolist() for batch in loader]
    state_in_pass = cut(loader, 3)
    loader.load_state_dict(state_in_pass)
    assert loader.state_dict()["pass"]["batches"] == 3  # nothing has been drawn since
    loader.load_state_dict(state)
    loader.start_afresh()
    assert [batch.tolist() for batch in loader] == third
    loader.load_state_dict(state_in_pass)
    loader.start_afresh()
    assert len(list(loader)) == len(third)


def test_a_pass_cut_twice_goes_on() -> None:
    torch.manual_seed(0)
    loader = resumable_loader(DataLoader(range(SAMPLES), batch_sampler=Lazy()))  # type: ignore[arg-type]
    state = loader.state_dict()
    before = get_global_state(False)
    whole = [batch.tolist() for batch in left(loader, state)]
    set_global_state(before)
    batches, state = iter(loader), None
    for used in (2, 3, 1):
        for _ in range(used):
            whole.remove(next(batches).tolist())
            torch.rand(2)
        loader.load_state_dict(loader.state_dict())
        random_state = get_global_state(False)
        batches = iter(loader)
        assert repr(get_global_state(False)) == repr(random_state)
    assert [batch.tolist() for batch in batches] == whole


def test_two_loaders_may_share_a_generator() -> None:
    def passes(cut_after: int | None) -> list[Any]:
        generator = torch.Generator().manual_seed(1)
        options: Any = {"batch_size": 4, "shuffle": True, "generator": generator}
        one, other = (resumable_loader(DataLoader(range(SAMPLES), **options)) for _ in range(2))
        drawn, batches = [], iter(one)
        for number in range(10):
            if number == 4:
                drawn += [batch.tolist() for batch in other]
            if number == cut_after:
                states = one.state_dict(), other.state_dict()
                generator.manual_seed(17)
                one.load_state_dict(states[0])
                other.load_state_dict(states[1])
                batches = iter(one)
            drawn.append(next(batches).tolist())
        return drawn + [batch.tolist() for batch in one]

    for cut_after in (0, 1, 4, 5, 9):
        assert passes(cut_after) == passes(None), cut_after


def test_another_order_or_data_set_is_refused() -> None:
    generator = torch.Generator().manual_seed(1)
    dataset: Any = range(SAMPLES)
    state = cut(resumable_loader(DataLoader(dataset, 4, shuffle=True, generator=generator)), 3)
    other = resumable_loader(DataLoader(dataset, 4, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)))
    message = "WeightedRandomSampler does not draw the batches of the run that was saved: batch 2 of the pass"
    with pytest.raises(ConfigurationError, match=message):
        left(other, state)
    by_epoch = DataLoader(dataset, 4, sampler=LazyRandomSampler(dataset, seed=1))
    state = cut(resumable_loader(by_epoch), 3)
    by_epoch.sampler.set_epoch(1)  # type: ignore[attr-defined]
    with pytest.raises(
        ConfigurationError, match=r"LazyRandomSampler does not .* If it depends on the epoch, call set_"
    ):
        left(resumable_loader(by_epoch), state)
    with pytest.raises(ConfigurationError, match=r"samples in the data set must be 37, .* got 36"):
        left(resumable_loader(DataLoader(range(SAMPLES - 1), 4, shuffle=True)), state)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"samples in a batch must be 4, .* got 5"):
        left(resumable_loader(DataLoader(dataset, 5, shuffle=True)), state)
    state = cut(resumable_loader([torch.ones(3), torch.zeros(3)]), 1)
    with pytest.raises(ConfigurationError, match="list does not draw the batches"):
        left(resumable_loader([torch.zeros(3), torch.ones(3)]), state)


def test_an_endless_stream_goes_on() -> None:
    def loader() -> Any:
        seed_all(0)
        return resumable_loader(DataLoader(Endless(), 4))

    expected = [batch.tolist() for batch in itertools.islice(loader(), 12)]
    state, resumed = cut(loader(), 7), loader()
    torch.rand(3)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in itertools.islice(resumed, 5)] == expected[7:]


def test_shares_of_a_loop_go_on() -> None:
    def loader() -> Any:
        torch.manual_seed(0)
        return resumable_loader(DataLoader(range(SAMPLES), 4, shuffle=True))  # type: ignore[arg-type]

    expected = [(batch.tolist(), share) for batch, share in with_shares(loader())]
    resumed = loader()
    resumed.load_state_dict(cut(loader(), 8))
    assert [(batch.tolist(), share) for batch, share in with_shares(resumed)] == expected[8:]
    assert [share.total for _, share in expected] == [4] * 9 + [1]


class Slow(Dataset[int]):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> int:
        return index


def outlive_signals(start: str) -> None:
    """Signals to the workers alone, as to all processes of a job."""
    loader = resumable_loader(DataLoader(Slow(), 4, num_workers=2, multiprocessing_context=start))
    batches = iter(loader)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for name in ("USR1", "TERM", "TERM"):
        subprocess.run(["kill", f"-{name}", *(str(worker.pid) for worker in workers)], check=True)
    assert [batch.tolist() for batch in batches] == [list(range(first, first + 4)) for first in range(0, 400, 4)]
    assert [worker.is_alive() for worker in workers] == [True, True] or not any(worker.exitcode for worker in workers)
    batches = iter(loader)
    workers = multiprocessing.active_children()
    for worker in workers:
        worker.terminate()  # SIGTERM by the process that has started it
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    loader.end()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_a_signal_to_all_processes_of_a_job_does_not_end_workers() -> None:
    outlive_signals("fork")


@pytest.mark.cold
@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_a_signal_does_not_end_workers_of_other_kinds(tmp_path: Path, start: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "if __name__ == '__main__':\n"
        "    from test_resumable_loaders import outlive_signals\n"
        f"    outlive_signals({start!r})\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    ended = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_what_a_data_set_draws_from_a_generator_of_its_own_goes_on() -> None:
    class Noisy(Dataset[float]):
        def __init__(self) -> None:
            self.generator = np.random.default_rng(4)

        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> float:
            return float(index + self.generator.random())

    expected = [batch.tolist() for batch in resumable_loader(DataLoader(Noisy(), 4))]
    state = cut(resumable_loader(DataLoader(Noisy(), 4)), 6)
    assert [batch.tolist() for batch in left(resumable_loader(DataLoader(Noisy(), 4)), state)] == expected[6:]


@pytest.mark.parametrize("size", [1, 2, 3, 10, 4096, 5001])
def test_a_lazy_shuffle_yields_each_index_once(size: int) -> None:
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
    """How often index i comes at position j, over 40 x 40 cells: chi square as for random permutations."""
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


def test_the_first_batch_after_a_million_of_a_huge_data_set_comes_at_once() -> None:
    """In less than two seconds, with 10^8 samples that are shuffled lazily."""
    huge: Any = range(10**8)
    state = cut(resumable_loader(DataLoader(huge, 64, sampler=LazyRandomSampler(huge, seed=1))), 1)
    order = LazyRandomSampler(huge, seed=1)
    last, expected = (list(itertools.islice(order.iterate_from(64 * batch), 64)) for batch in (999_999, 10**6))
    state["pass"] |= {"batches": 10**6, "drawn": 10**6, "checksum": checksum_of(last)}
    loader = resumable_loader(DataLoader(huge, 64, sampler=LazyRandomSampler(huge, seed=1)))
    with Slowness() as slowness:
        loader.load_state_dict(state)
        first = next(iter(loader)).tolist()
    assert first == expected
    assert slowness.took < 2 * slowness.factor


def test_torchs_sampler_takes_as_long_as_torch_needs_to_draw() -> None:
    """10^6 samples: what is left out costs at most what drawing and listing the order costs."""
    size = 10**6
    torch.manual_seed(0)
    loader = resumable_loader(DataLoader(range(size), 8, shuffle=True))  # type: ignore[arg-type]
    state = cut(loader, 2)
    start = time.perf_counter()
    order = list(RandomSampler(range(size), generator=torch.Generator().manual_seed(0)))
    to_draw = time.perf_counter() - start
    torch.manual_seed(0)
    seed = [torch.empty((), dtype=torch.int64).random_().item() for _ in range(2)][1]  # the first is for workers
    order = list(RandomSampler(range(size), generator=torch.Generator().manual_seed(int(seed))))
    state["pass"] |= {"batches": 10**5, "drawn": 10**5, "checksum": checksum_of(order[8 * 10**5 - 8 : 8 * 10**5])}
    start = time.perf_counter()
    loader.load_state_dict(state)
    first = next(iter(loader)).tolist()
    taken = time.perf_counter() - start
    assert first == order[8 * 10**5 : 8 * 10**5 + 8]
    assert taken < 3 * to_draw + 0.5


@functools.cache
def random_states() -> list[Any]:
    return [run_distributed(save_random_state, world_size) for world_size in (1, 2)]


def save_random_state() -> Any:
    """The state while drawing, alike, and alike in a batch; what is drawn after it, apart and alike."""
    seed_all(get_rank())
    run = RunRandomState()
    run.synchronize()
    torch.rand(3)
    results = []
    for context in (contextlib.nullcontext, run.alike, run.alike_in_batch, functools.partial(apart_in_batch, run)):
        with context():
            torch.rand(2)
            state = run.state_dict()
        results.append((state, numbers(run)))
    return results


@contextlib.contextmanager
def apart_in_batch(run: RunRandomState) -> Iterator[None]:
    with run.alike_in_batch():
        torch.rand(1)
        with run.apart():
            yield


def numbers(run: RunRandomState) -> list[list[float]]:
    """Drawn by this rank, by all alike, and by all alike in a batch."""
    drawn = []
    for context in (contextlib.nullcontext, run.alike, run.alike_in_batch):
        with context():
            drawn.append([torch.rand(()).item(), random.random(), np.random.rand()])
    return drawn


def load_random_states(states: Any) -> Any:
    results = []
    for of_ranks in states:
        seed_all(7)
        run = RunRandomState()
        run.synchronize()
        own = of_ranks[get_rank() if len(of_ranks) == get_world_size() else 0]
        for context in (contextlib.nullcontext, run.alike, run.alike_in_batch, functools.partial(apart_in_batch, run)):
            with context():
                run.load_state_dict(own)
            results.append(numbers(run))
    return results


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (1, 2), (2, 1)])
def test_the_random_state_of_a_run_goes_on(before: int, after: int) -> None:
    saved = random_states()[before - 1]
    states = [[through_a_file(rank[index][0]) for rank in saved] for index in range(4)]
    results = run_distributed(load_random_states, after, states)
    for rank, found in enumerate(results):
        for index in range(4):
            for loaded_in in range(4):
                drawn = found[4 * index + loaded_in]
                if before == after:
                    assert drawn == saved[rank][index][1]
                assert after == 1 or drawn[1:] == results[0][4 * index + loaded_in][1:]  # alike on all ranks
                if rank == 0:
                    assert drawn[0] == saved[0][index][1][0]
                else:
                    assert drawn[0] != results[0][4 * index + loaded_in][0]
