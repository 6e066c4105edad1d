"""A loader that was cut goes on at the next sample, on any number of processes, and loads nothing that was done."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.commands import run
from kit.once import once
from kit.paths import FOLDERS
from kit.ranks import run_distributed
from loaders import LOADERS, OTHERS, PASSES, PLAIN, WORKERS, draw, draw_plainly, go_on
from torch.utils.data import DataLoader
from ways import Way

from ddp_callbacks import resumable_loader
from ddp_callbacks.errors import ConfigurationError

pytestmark = pytest.mark.shares_results

# In one way a run is cut, in another it goes on.
ONE, TWO, GLOO, HOSTS, FOUR = Way(1), Way(2), Way(2, gloo=True), Way(3, layout=(2, 1)), Way(4)
NAMES = {ONE: "one", TWO: "two", GLOO: "two by gloo", HOSTS: "three on two hosts", FOUR: "four"}


def _pairs(*ways: tuple[Way, ...], tier: str = "") -> list[Any]:
    marks = [getattr(pytest.mark, tier)] if tier else []
    return [pytest.param(before, after, marks=marks, id=f"{NAMES[before]}-{NAMES[after]}") for before, after in ways]


in_pairs = pytest.mark.parametrize(
    ("before", "after"),
    [
        *_pairs((ONE, ONE), (TWO, TWO), (ONE, TWO), (TWO, ONE)),
        *_pairs((GLOO, GLOO), (HOSTS, HOSTS), (HOSTS, TWO), (ONE, HOSTS), tier="wide"),
    ],
)
in_all_pairs = pytest.mark.parametrize(
    ("before", "after"), _pairs(*itertools.product((ONE, TWO, HOSTS, FOUR), repeat=2), (GLOO, GLOO), tier="night")
)


@once
def drawn(way: Way, augments: bool, seed: str = "") -> list[dict[str, Any]]:
    """What each rank draws if nothing is cut, and the states at the cuts."""
    return run_distributed(draw, way.size, way, list(PLAIN | WORKERS | OTHERS), augments, seed)


@once
def plainly(augments: bool) -> dict[str, Any]:
    return run_distributed(draw_plainly, 1, [*PLAIN, "workers"], augments)[0]


def joined(ranks: list[Any]) -> list[list[int]]:
    """The numbers of the samples in each batch, of all ranks' parts."""
    return [[int(row[0]) for part in parts for row in part] for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize("name", PLAIN)
def test_on_one_process_batches_are_those_of_the_plain_loader(name: str) -> None:
    assert drawn(ONE, False)[0][name][0] == plainly(False)[name]


def test_with_workers_the_order_is_that_of_the_plain_loader() -> None:
    found, expected = drawn(ONE, True)[0]["workers"][0], plainly(True)["workers"]
    assert [joined([rows]) for rows in found] == [joined([rows]) for rows in expected]


@pytest.mark.parametrize("way", [TWO, pytest.param(HOSTS, marks=pytest.mark.wide)], ids=NAMES.get)
def test_all_ranks_together_draw_what_one_process_draws(way: Way) -> None:
    """All processes together get one process's batches."""
    for name in PLAIN | WORKERS | OTHERS:
        one, several = drawn(ONE, False)[0][name][0], [rank[name][0] for rank in drawn(way, False)]
        for number, rows in enumerate(one):
            assert joined([rank[number] for rank in several]) == joined([rows]), name


def rows_with_draws(ranks: list[Any]) -> list[Any]:
    """The samples in each batch, of all ranks' parts, with what each has drawn."""
    return [[tuple(row) for part in parts for row in part] for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize("name", ["shuffle", "generator", "lazy", "batches as samples", "workers", "persistent"])
@pytest.mark.parametrize("way", [TWO, pytest.param(HOSTS, marks=pytest.mark.wide)], ids=NAMES.get)
def test_each_sample_draws_what_it_draws_on_one_process(way: Way, name: str) -> None:
    """Augmentation depends on neither processes nor workers."""
    one, several = drawn(ONE, True)[0][name][0], [rank[name][0] for rank in drawn(way, True)]
    for number, rows in enumerate(one):
        found = rows_with_draws([rank[number] for rank in several])
        assert found == rows_with_draws([rows])
        assert len({draw for batch in found for row in batch for draw in row[1:]}) > sum(map(len, found))


@in_pairs
def test_a_cut_pass_goes_on_at_the_next_sample(before: Way, after: Way) -> None:
    """A loader resumes at the next sample."""
    assert_goes_on(before, after)


@in_all_pairs
@pytest.mark.parametrize("seed", range(5))
def test_a_pass_cut_anywhere_goes_on_at_the_next_sample(before: Way, after: Way, seed: int) -> None:
    assert_goes_on(before, after, str(seed))


def assert_goes_on(before: Way, after: Way, seed: str = "") -> None:
    is_same = before == after
    ranks = drawn(before, is_same, seed)
    cuts = [
        (name, index, *cut)
        for name in (PLAIN | WORKERS | OTHERS if before != ONE else PLAIN | OTHERS)
        for index, cut in enumerate(ranks[0][name][1])
    ]
    calls = [(name, [rank[name][2][index] for rank in ranks], PASSES - number - 1) for name, index, number, _ in cuts]
    results = run_distributed(go_on, after.size, after, calls, is_same)
    for place, (name, _, number, used) in enumerate(cuts):
        where = f"{name}, pass {number}, after batch {used}"
        found = [rank[place][0] for rank in results]
        left = [[rows[number][used:], *rows[number + 1 :]] for rows in (rank[name][0] for rank in ranks)]
        for turn in range(len(left[0])):
            assert joined([rank[turn] for rank in found]) == joined([rank[turn] for rank in left]), where
        assert found == left or not is_same, where  # with what the samples have drawn
        assert [rank[place][1] for rank in results] == [rank[place][2] for rank in results], f"{where}: loaded anew"


BOUND = [
    ("distributed", "global"),
    *((name, "per_process") for name in ("shuffle", "one by one", "one by one, workers")),
]


@pytest.mark.parametrize(("name", "how"), BOUND)
def test_batches_of_each_process_go_on_with_as_many_alone(name: str, how: str) -> None:
    """Per-process batches resume on as many processes alone."""
    ranks = run_distributed(draw, 2, TWO, [name], True, "", how)
    cuts = ranks[0][name][1]
    states = [[rank[name][2][index] for rank in ranks] for index in range(len(cuts))]
    calls = [(name, of_ranks, PASSES - cut[0] - 1) for cut, of_ranks in zip(cuts, states, strict=True)]
    results = run_distributed(go_on, 2, TWO, calls, True, how)
    for index, (number, used) in enumerate(cuts):
        for rank, found in zip(ranks, results, strict=True):
            rows = rank[name][0]
            assert found[index][0] == [rows[number][used:], *rows[number + 1 :]]
            assert found[index][1] == found[index][2]
    message = "the number of processes must be 2, as in the run that was saved in the middle of a pass, got 1"
    with pytest.raises(ConfigurationError, match=message):
        resumable_loader(LOADERS[name](), how).load_state_dict(states[-1][0][0])  # type: ignore[arg-type]


# --- workers ----------------------------------------------------------------------------------------------------------


def outlive_signals(start: str) -> None:
    """Signals to the workers alone, as to all processes of a job."""
    options: Any = {"num_workers": 2, "multiprocessing_context": start}
    loader = resumable_loader(DataLoader(range(400), 4, **options))  # type: ignore[arg-type]
    batches = iter(loader)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for name in ("USR1", "TERM", "TERM"):
        subprocess.run(["kill", f"-{name}", *(str(worker.pid) for worker in workers)], check=True)
    assert [batch.tolist() for batch in batches] == [list(range(first, first + 4)) for first in range(0, 400, 4)]
    assert [worker.is_alive() for worker in workers] == [True, True] or not any(worker.exitcode for worker in workers)
    batches = iter(loader)
    workers = multiprocessing.active_children()
    loader.end()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_a_signal_to_all_processes_of_a_job_does_not_end_workers() -> None:
    """Signals to a job spare its loaders' workers."""
    outlive_signals("fork")


SIGNALLED = f"""
import sys
sys.path[:0] = {list(map(str, FOLDERS))!r}
if __name__ == "__main__":
    from test_resumable_loaders import outlive_signals
    outlive_signals(sys.argv[1])
"""


@pytest.mark.night
@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_a_signal_does_not_end_workers_of_other_kinds(tmp_path: Path, start: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SIGNALLED)
    assert run([sys.executable, script, start], tmp_path, cold=True) == ""
