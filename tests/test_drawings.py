"""The drawings of the pages are what ``docs/_static/drawings.py`` draws."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

STATIC = Path(__file__).parents[1] / "docs" / "_static"
NAMES = ("two_nodes", "layers", "batch", "hierarchical")


@pytest.fixture(scope="module")
def drawings() -> dict[str, Callable[[], str]]:
    found: dict[str, Callable[[], str]] = runpy.run_path(str(STATIC / "drawings.py"))["DRAWINGS"]
    return found


def test_every_drawing_is_named(drawings: dict[str, Callable[[], str]]) -> None:
    assert tuple(drawings) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_drawing_is_what_the_code_draws(drawings: dict[str, Callable[[], str]], name: str) -> None:
    drawn = drawings[name]()
    assert (STATIC / f"{name}.svg").read_text() == drawn, "draw it again: python docs/_static/drawings.py"
    assert ElementTree.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"
