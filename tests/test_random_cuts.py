"""Runs that are cut at random moments on 1 to 4 processes and go on on 1 to 4: ``make check-cuts``.

``CUTS`` is the number of cuts of each scenario, ``SEED`` chooses them. The scenarios are those of the tests of
``Resume``, which cut each of them a few times in ``make test`` and ``make check``.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import tempfile
import unittest.mock
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import resume_lightning_scenarios as of_lightning
import resume_torchbearer_scenarios as of_torchbearer
from comparing import assert_equal
from distributed import run_distributed

from ddp_callbacks.errors import Preempted

CUTS = int(os.environ.get("CUTS", "0"))
SEED = int(os.environ.get("SEED", "0"))
SIZES = (1, 2, 3, 4)
RELATIVE = 1e-10
DEADLINE = 3 * 3600.0

pytestmark = [
    pytest.mark.skipif(not CUTS, reason="takes long: make check-cuts"),
    pytest.mark.timeout(DEADLINE),
    pytest.mark.shares_results("host"),
]


@dataclass(frozen=True)
class Cut:
    """A run on ``before`` processes, stopped at ``moment`` (``None``: not at all), and gone on with on ``after``."""

    name: str
    moment: int | None
    before: int
    after: int
    number: int = 0

    @property
    def file(self) -> str:
        return f"{self.name}-{self.before}-{self.after}-{self.number}"


class Torchbearer:
    NAMES = tuple(of_torchbearer.SCENARIOS)

    @staticmethod
    def run(name: str, moment: int | None, path: str, apart: bool) -> dict[str, Any] | None:
        """The result; ``None`` if it was cut. ``apart``: each process draws its own dropout and augmentation."""
        known = of_torchbearer.LOCAL if apart else of_torchbearer.SCENARIOS
        try:
            return known.get(name, of_torchbearer.SCENARIOS[name])(moment, path)
        except Preempted:
            return None

    @staticmethod
    def moments(name: str, whole: dict[str, Any]) -> int:
        return of_torchbearer.MOMENTS[name]

    @staticmethod
    def comparable(first: dict[str, Any] | None, second: dict[str, Any], apart: bool) -> dict[str, Any]:
        return second if apart else of_torchbearer.without_running(second)


class Lightning:
    NAMES = tuple(of_lightning.SCENARIOS)

    @staticmethod
    def run(name: str, moment: int | None, path: str, apart: bool) -> dict[str, Any] | None:
        return of_lightning.SCENARIOS[name](moment, path, random=apart)

    @staticmethod
    def moments(name: str, whole: dict[str, Any]) -> int:
        return int(whole["moments"])

    @staticmethod
    def comparable(first: dict[str, Any] | None, second: dict[str, Any], apart: bool) -> dict[str, Any]:
        return of_lightning.comparable(second if first is None else of_lightning.joined(first, second))


HOSTS: dict[str, Any] = {"torchbearer": Torchbearer, "lightning": Lightning}
Results = list[dict[Cut, Any]]  # by rank


def run_all(host: str, cuts: list[Cut], folder: str, is_second: bool) -> dict[Cut, Any]:
    """On a rank: one run after another, until it is cut or, as the second part, to its end."""
    run = HOSTS[host].run
    return {
        cut: run(cut.name, None if is_second else cut.moment, f"{folder}/{cut.file}/run.pt", cut.before == cut.after)
        for cut in cuts
    }


def on_ranks(size: int, host: str, cuts: list[Cut], folder: str, is_second: bool = False) -> Results:
    for cut in cuts:
        Path(folder, cut.file).mkdir(exist_ok=True)
    arguments = (host, cuts, folder, is_second)
    if size > 1:
        return run_distributed(run_all, size, *arguments, deadline=DEADLINE)
    with unittest.mock.patch.dict(os.environ):  # Lightning leaves its seed there
        return [run_all(*arguments)]


@functools.cache
def uncut(host: str) -> dict[Cut, list[Any]]:
    """The results by rank of all scenarios without a cut: those of one process, and those that go on on as many."""
    found: dict[Cut, list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in SIZES:
            whole = [Cut(name, None, size, size) for name in HOSTS[host].NAMES]
            whole += [Cut(name, None, 1, 0) for name in HOSTS[host].NAMES if size == 1]
            results = on_ranks(size, host, whole, folder)
            found |= {cut: [result[cut] for result in results] for cut in whole}
    return found


def choose(host: str) -> list[Cut]:
    chosen = random.Random(f"{SEED} {host}")
    cuts = []
    for name in HOSTS[host].NAMES:
        moments = HOSTS[host].moments(name, uncut(host)[Cut(name, None, 1, 0)][0])
        for number in range(CUTS):
            sizes = chosen.choice(SIZES), chosen.choice(SIZES)
            cuts.append(Cut(name, chosen.randint(1, moments), *sizes, number))
    return cuts


@functools.cache
def gone_on(host: str) -> dict[Cut, list[Any]]:
    """Both parts of each run that was cut, by rank of the second one."""
    cuts, found = choose(host), {}
    with tempfile.TemporaryDirectory() as folder:
        first: dict[Cut, Any] = {}
        for size in SIZES:
            mine = [cut for cut in cuts if cut.before == size]
            first |= on_ranks(size, host, mine, folder)[0]
        for size in SIZES:
            mine = [cut for cut in cuts if cut.after == size]
            for results in on_ranks(size, host, mine, folder, is_second=True):
                for cut in mine:
                    found.setdefault(cut, []).append((first[cut], results[cut]))
        for cut in cuts:
            shutil.rmtree(Path(folder, cut.file))
    return found


@pytest.fixture(params=[(host, name) for host in HOSTS for name in HOSTS[host].NAMES], ids="-".join)
def scenario(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    return request.param


def test_runs_that_are_cut_at_random_go_on_with_the_numbers_of_those_that_are_not(scenario: tuple[str, str]) -> None:
    host, name = scenario
    comparable = HOSTS[host].comparable
    wrong, largest = [], 0
    for cut, parts in gone_on(host).items():
        if cut.name != name:
            continue
        largest += 1
        apart = cut.before == cut.after
        expected = uncut(host)[Cut(name, None, cut.after, cut.after) if apart else Cut(name, None, 1, 0)]
        for rank, (first, second) in enumerate(parts):
            try:
                assert_equal(
                    comparable(first, second, apart),
                    comparable(None, expected[rank if apart else 0], apart),
                    0.0 if apart else RELATIVE,
                )
            except AssertionError as error:
                wrong.append(f"{cut}, rank {rank}: {error}")
    assert not wrong, f"{len(wrong)} results differ:\n" + "\n".join(wrong[:10])
    assert largest == CUTS
