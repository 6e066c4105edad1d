"""The pairs of ways in which a run is cut in one and goes on in the other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from ways import Way

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
