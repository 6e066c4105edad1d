"""The ways in which each scenario of a table runs: on how many ranks, where they live, by what they sum.

A table is a module that maps names to scripts, see :class:`Table`; a way says what surrounds a script. What a way needs
of a Trial, Trainer or Fabric (options of the callback or the strategy, a run that is cut and resumed) is applied where
the table makes it. ``prove(table, way, name)`` is the whole test of one scenario in one way: all of them run in one
start of ranks.
"""

from __future__ import annotations

import importlib
import os
import random
import shutil
import tempfile
import traceback
import unittest.mock
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import pytest
from kit.compare import assert_equal
from kit.once import once
from kit.ranks import live_on_hosts, run_distributed

from ddp_callbacks import get_world_size
from ddp_callbacks.comm.segments import SWITCH
from ddp_callbacks.errors import Preempted
from ddp_callbacks.process_group import resolve_group

RELATIVE = 1e-10


@dataclass(frozen=True)
class Way:
    """How a script is run.

    Attributes:
        size: Ranks of the (first) run; 1 is this process.
        layout: How many of the ranks believe to be on each host, in the run that has so many ranks; empty: all are on
            this one.
        gloo: Without shared memory, by gloo alone.
        options: Of the callback or the strategy, by name.
        by_callback: A Trainer gets a ``DDPCallback``, and no strategy.
        resumed_on: A run is cut at a moment that the scenario's name chooses, and resumed on so many ranks.
        resume: Options of ``Resume``, by name.
        after_failure: Behind a run that has failed on all ranks, and was caught.
        tier: The marker of its tests; empty: part of ``make test``.
        part: ``(1, 3)``: every third scenario, from the second one. A part of whole runs also has what cannot be cut.
    """

    size: int = 2
    layout: tuple[int, ...] = ()
    gloo: bool = False
    options: tuple[tuple[str, Any], ...] = field(default=())
    by_callback: bool = False
    resumed_on: int = 0
    resume: tuple[tuple[str, Any], ...] = field(default=())
    after_failure: bool = False
    tier: str = ""
    part: tuple[int, int] = (0, 1)

    def enter(self) -> None:
        """On a rank that has joined its group: let it live in this way."""
        os.environ[SWITCH] = "0" if self.gloo else "1"
        if self.layout and sum(self.layout) == get_world_size():
            live_on_hosts(self.layout, resolve_group())

    @property
    def keeps_its_size(self) -> bool:
        """Whether a run that is resumed has the bits of one that was not cut."""
        return self.resumed_on == self.size


class Table(Protocol):
    """What a module of scenarios has.

    Attributes:
        SCENARIOS: Have the numbers of one process on any number of ranks.
        APART: Those that depend on the number of ranks, which draw for themselves, say. On as many ranks a run that is
            resumed has the bits of one that was not cut.

    ``ROUNDED``, if there is one, names the scenarios whose bits a cut may change.
    """

    SCENARIOS: Mapping[str, Any]
    APART: Mapping[str, Any]

    def names(self, way: Way) -> list[str]:
        """The scenarios that this way applies to."""

    def run(self, name: str, way: Way | None, folder: str = "", cut: int | None = None) -> tuple[Any, int]:
        """The result of a scenario on this rank, and the number of moments at which it could have been cut.

        Args:
            way: ``None``: without the library.
            folder: Where a run that is resumed keeps its files; called again with the same one, it goes on.
            cut: The moment, counted from 1, at which the run is asked to stop. It raises ``Preempted`` then, or
                returns what ``joined`` needs.
        """

    def joined(self, first: Any, second: Any) -> Any:
        """The result of the two halves of a run; the first is ``None`` if it raised ``Preempted``."""

    def fail(self) -> None:
        """A run that fails on all ranks, and is caught."""


@dataclass(frozen=True)
class Failed:
    """In place of a result: the text of the exception."""

    text: str


def table_of(name: str) -> Any:
    return importlib.import_module(name)


def names_in(table: str, way: Way) -> list[str]:
    """The scenarios that are run in this way."""
    first, step = way.part
    names = list(table_of(table).names(way))
    never_cut = set(names) - set(names if way.resumed_on else table_of(table).names(replace(way, resumed_on=1)))
    return [name for index, name in enumerate(names) if index % step == first or name in never_cut]


def in_each(table: str, ways: Mapping[str, Way]) -> pytest.MarkDecorator:
    """A test for each way and scenario, as its arguments ``way`` and ``name``, in the way's tier."""
    marks = {text: [getattr(pytest.mark, way.tier)] if way.tier else [] for text, way in ways.items()}
    params = [
        pytest.param(way, name, id=f"{text}-{name}", marks=marks[text])
        for text, way in ways.items()
        for name in names_in(table, way)
    ]
    return pytest.mark.parametrize(("way", "name"), params)


def run_each(
    table: str, way: Way | None, names: Sequence[str], folder: str = "", cuts: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """On a rank: the scenarios one after another; one that fails does not end the others."""
    if way is not None:
        way.enter()
        if way.after_failure:
            table_of(table).fail()
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = table_of(table).run(name, way, str(Path(folder, name)), (cuts or {}).get(name))
        except Preempted:
            found[name] = None, 0
        except Exception:
            found[name] = Failed(traceback.format_exc()), 0
    return found


def on_ranks(size: int, table: str, *args: Any) -> list[dict[str, Any]]:
    if size > 1:
        return run_distributed(run_each, size, table, *args)
    with unittest.mock.patch.dict(os.environ):
        return [run_each(table, *args)]


def new_folder(names: Sequence[str]) -> str:
    """One for each scenario in it; it goes with pytest's own."""
    folder = tempfile.mkdtemp()
    for name in names:
        Path(folder, name).mkdir()
    return folder


def cut_at_every_moment(run: Callable[..., tuple[Any, int]], name: str) -> None:
    """Each run that resumes on one process ends as one that is not cut, to the last bit."""
    whole, moments = run(name, None)
    for cut in range(1, moments):
        folder = new_folder([])
        with pytest.raises(Preempted):
            run(name, Way(1, resumed_on=1), folder, cut)
        assert_equal(run(name, Way(1, resumed_on=1), folder)[0], whole, 0.0, f"cut at {cut}")


@once
def alone(table: str, name: str) -> tuple[Any, int]:
    """A scenario in this process, without the library; and the number of its moments."""
    result, moments = on_ranks(1, table, None, [name], new_folder([name]))[0][name]
    return result, moments


@once
def cut(table: str, way: Way, names: tuple[str, ...], seed: str) -> tuple[list[dict[str, Any]], str]:
    """What each rank says of runs that are cut at moments of choice; and where they have left their files."""
    moments = {name: random.Random(f"{seed}{name}").randint(1, max(1, alone(table, name)[1])) for name in names}
    folder = new_folder(names)
    found = on_ranks(way.size, table, way, names, folder, moments)
    shutil.move(folder, f"{folder}-cut")
    return found, folder


@once
def results(table: str, way: Way, seed: str = "") -> list[dict[str, Any]]:
    """What each rank has found, by scenario. ``seed`` chooses the cuts."""
    names = names_in(table, way)
    if not way.resumed_on:
        found = on_ranks(way.size, table, way, names, new_folder(names))
        return [{name: of_rank[name][0] for name in names} for of_rank in found]
    firsts, folder = cut(table, replace(way, resumed_on=-1), tuple(names), seed)
    shutil.rmtree(folder, ignore_errors=True)  # of another number of ranks that have gone on
    shutil.copytree(f"{folder}-cut", folder)
    seconds = on_ranks(way.resumed_on, table, way, names, folder)
    return [
        {name: _joined(table, firsts[rank % way.size][name][0], second[name][0]) for name in names}
        for rank, second in enumerate(seconds)
    ]


def _joined(table: str, first: Any, second: Any) -> Any:
    return first if isinstance(first, Failed) else table_of(table).joined(first, second)  # the first failure explains


def prove(table: str, way: Way, name: str, seed: str = "") -> None:
    """A scenario in this way has the numbers of one process; resumed on as many ranks, the bits of one not cut."""
    wanted = results(table, replace(way, resumed_on=0, resume=(), part=(0, 1))) if way.keeps_its_size else []
    for rank, found in enumerate(results(table, way, seed)):
        where = f"rank {rank}"
        assert not isinstance(found[name], Failed), f"{where}: {found[name].text}"
        if way.keeps_its_size and name not in getattr(table_of(table), "ROUNDED", ()):
            assert_equal(found[name], wanted[rank][name], 0.0, where)
        if name in table_of(table).SCENARIOS:
            assert_equal(found[name], alone(table, name)[0], RELATIVE, where)
