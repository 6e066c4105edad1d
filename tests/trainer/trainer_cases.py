"""Functions of a Trainer that run on the ranks of a file, compared with one process; a file has them in ``WORLD``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import shared_worlds
from kit.compare import assert_equal
from shared_worlds import GLOO, TWO, WIDE, Test, in_ways
from trainers import quiet
from ways import Way

import ddp_callbacks.lightning  # noqa: F401

__all__ = ["GLOO", "OURS", "PLAIN", "RELATIVE", "TWO", "WIDE", "Bodies", "message_of", "on_one", "quiet"]

OURS, PLAIN = "ddp_callbacks", "auto"
RELATIVE = 1e-10


def on_one(body: Callable[..., Any]) -> Any:
    """What it returns on one process, without the library."""
    with quiet():
        return body(PLAIN)


class Bodies(shared_worlds.Bodies):
    """A function of a strategy, under :meth:`as_on_one`, is a whole test: each rank has the numbers of one process."""

    def as_on_one(self, *ways: Way, relative: float = RELATIVE) -> Callable[[Callable[[str], Any]], Test]:
        ways = ways or (TWO,)

        def decorator(body: Callable[[str], Any]) -> Test:
            self.add(body.__name__, partial(body, OURS), *ways)

            @in_ways(*ways)
            def test(way: Way) -> None:
                expected = on_one(body)
                for rank, found in enumerate(self.results(body.__name__, way)):
                    assert_equal(found, expected, relative, f"rank {rank}")

            test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
            return test

        return decorator


def message_of(run: Callable[[], Any]) -> str:
    """Of the exception that it raises, behind its class."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
