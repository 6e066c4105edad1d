"""Functions of a Trainer that run on the ranks of a file, compared with one process; a file has them in ``WORLD``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from kit.compare import assert_equal
from shared_worlds import GLOO, TWO, WIDE, Bodies
from trainers import quiet

import ddp_callbacks.lightning  # noqa: F401

__all__ = ["GLOO", "OURS", "PLAIN", "RELATIVE", "TWO", "WIDE", "Bodies", "assert_as_on_one", "on_one", "quiet"]

OURS, PLAIN = "ddp_callbacks", "auto"
RELATIVE = 1e-10


def on_one(body: Callable[..., Any]) -> Any:
    """What it returns on one process, without the library."""
    with quiet():
        return body(PLAIN)


def assert_as_on_one(body: Callable[..., Any], relative: float = RELATIVE) -> None:
    """Each rank has seen the numbers of one process."""
    expected = on_one(body)
    for rank, found in enumerate(sys.modules[body.__module__].WORLD.returned(body)):
        assert_equal(found, expected, relative, f"rank {rank}")
