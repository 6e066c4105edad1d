"""Tests that run on ranks, one after another in the same start of them; each fails for itself."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import pytest
import torch.distributed as dist
from kit.once import once
from kit.ranks import run_distributed
from ways import Failed, Way

TWO = Way()
GLOO = Way(gloo=True)
WIDE = Way(3, layout=(2, 1), tier="wide")  # on two hosts, as they believe; new groups of the three are on one
NAMES = {TWO: "2 ranks", GLOO: "gloo", WIDE: "wide"}
PATIENCE = timedelta(seconds=200)  # of a rank whose body has ended, with those whose body has not

Body = Callable[[], Any]
Test = Callable[..., None]
Kept = TypeVar("Kept", bound=Callable[..., Any])


class World:
    """Ranks for the tests of a module, which has it as ``WORLD = World(__name__)``.

    As a decorator it makes a test of a function that runs on each rank. Results are shared: let the module's tests be
    on one of pytest's workers (``shares_results``).
    """

    def __init__(self, module: str, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        """``around``: a context for each function."""
        self.module, self.around = module, around
        self.bodies: dict[str, tuple[Body, tuple[Way, ...]]] = {}

    def __call__(self, body: Body) -> Test:
        return self.on(TWO)(body)

    def on(self, *ways: Way) -> Callable[[Body], Test]:
        """For a test in each of these ways."""

        def decorator(body: Body) -> Test:
            self.add(body.__name__, body, *ways)

            def test(way: Way) -> None:
                self.results(body.__name__, way)

            return in_ways(*ways)(_named_as(body, test))

        return decorator

    def each(self, names: Iterable[str], *ways: Way) -> Callable[[Callable[[str], Any]], Test]:
        """For a test with each of these names as its argument, in each of these ways."""
        ways = ways or (TWO,)

        def decorator(body: Callable[[str], Any]) -> Test:
            for name in names:
                self.add(f"{body.__name__} {name}", partial(body, name), *ways)

            def test(way: Way, name: str) -> None:
                self.results(f"{body.__name__} {name}", way)

            return pytest.mark.parametrize("name", names)(in_ways(*ways)(_named_as(body, test)))

        return decorator

    def add(self, name: str, body: Body, *ways: Way) -> None:
        """Let the ranks run a body by that name; a test asks for its :meth:`results`."""
        self.bodies[name] = body, ways or (TWO,)

    def results(self, name: str, way: Way = TWO) -> list[Any]:
        """What that body returned, by rank, in a way that it was added for."""
        found = [results[name] for results in _run_all(self.module, way)]
        failed = [f"rank {rank}: {result.text}" for rank, result in enumerate(found) if isinstance(result, Failed)]
        assert not failed, "\n".join(failed)
        return found

    def runs(self, *ways: Way) -> Callable[[Kept], Kept]:
        """For a function whose tests ask for what each rank has :meth:`returned`."""

        def decorator(body: Kept) -> Kept:
            self.add(body.__name__, body, *ways)
            return body

        return decorator

    def returned(self, body: Callable[..., Any], way: Way = TWO) -> list[Any]:
        """By each rank."""
        return self.results(body.__name__, way)


class Bodies(World):
    """As a decorator it keeps a function, as :meth:`World.runs`."""

    def __call__(self, body: Kept) -> Kept:
        return self.runs(TWO)(body)


def in_ways(*ways: Way) -> pytest.MarkDecorator:
    """A test for each of ``ways``, as its argument ``way``, in the way's tier."""

    def marked(way: Way) -> Any:
        name = NAMES.get(way, f"{way.size} ranks")
        return pytest.param(way, id=name, marks=[getattr(pytest.mark, way.tier)] if way.tier else [])

    return pytest.mark.parametrize("way", [*map(marked, ways)])


def _named_as(body: Callable[..., Any], test: Test) -> Test:
    test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
    return test


def by_rank(value: Any) -> list[Any]:
    """In a body: what all ranks have."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@once
def _run_all(module: str, way: Way) -> list[dict[str, Any]]:
    return run_distributed(_on_rank, way.size, module, way)


def _on_rank(module: str, way: Way) -> dict[str, Any]:
    way.enter()
    ends = dist.new_group(timeout=PATIENCE)
    found: dict[str, Any] = {}
    world = importlib.import_module(module).WORLD
    for name, (body, ways) in world.bodies.items():
        if way not in ways:
            continue
        try:
            with world.around():
                found[name] = body()
        except Exception:
            found[name] = Failed(traceback.format_exc())
            print(found[name].text, file=sys.stderr, flush=True)  # for all tests, if others wait for this rank
        dist.barrier(ends)
    return found
