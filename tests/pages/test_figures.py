"""Drawings and tables of pages are what their code makes of what was measured."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from kit.paths import ROOT

STATIC = ROOT / "docs" / "_static"
DRAWINGS: dict[str, Callable[[], str]] = runpy.run_path(str(STATIC / "drawings.py"))["DRAWINGS"]
BENCHMARKS = ROOT / "examples" / "benchmarks"
GAIN = BENCHMARKS / "gain"


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_what_the_code_draws(name: str) -> None:
    """Figures match their data."""
    drawn = DRAWINGS[name]()
    assert (STATIC / f"{name}.svg").read_text() == drawn, "draw it again: python docs/_static/drawings.py"
    assert ElementTree.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"


def test_the_tables_are_what_was_measured() -> None:
    found, benchmark = json.loads((GAIN / "gain.json").read_text()), runpy.run_path(str(GAIN / "main.py"))
    for page in benchmark["PAGES"]:
        for name, table in benchmark["tables"](found).items():
            shown = f"<!-- gain.json: {name} -->\n\n{table}\n\n<!-- end -->"
            assert shown in page.read_text(), f"{page.name}: run main.py --draw gain.json in examples/benchmarks/gain"


def _figures(page: Path) -> dict[str, set[float]]:
    """The numbers in the tables of a page, by the first cell of their row."""
    rows = re.findall(r"^\| ([^|]+) \|(.*)", page.read_text(), re.MULTILINE)
    return {first: {float(number) for number in re.findall(r"\d+\.\d+", rest)} for first, rest in rows}


def test_a_page_shows_the_figures_of_the_benchmark_of_local_sgd() -> None:
    measured = _figures(ROOT / "examples" / "benchmarks" / "local_sgd" / "README.md")
    shown = _figures(ROOT / "docs" / "how_to" / "communication.md")
    ways = [way for way in measured if way in shown and measured[way]]
    assert len(ways) == 5 and all(shown[way] <= measured[way] for way in ways)


@pytest.mark.parametrize("name", ["step_time", "cost", "scale"])
def test_the_table_of_a_benchmark_is_what_was_measured(name: str) -> None:
    folder = BENCHMARKS / name
    found = json.loads((folder / f"{name}.json").read_text())
    assert runpy.run_path(str(folder / "main.py"))["table"](found) in (folder / "README.md").read_text()
    if name == "step_time":
        drawn = re.search(rb"tEXtDescription\0(\{.*?\}\})", (folder / "step_time.png").read_bytes())
        assert drawn and json.loads(drawn[1]) == found, "draw it again: main.py --draw step_time.json"
    if name == "scale":
        assert all(case["4096"][0] < 1 and case["4096"][3] < 64 for case in found.values())  # ms for a message, MB


@pytest.mark.parametrize("name", ["cost", "local_sgd", "recovery", "step_time"])
def test_a_benchmark_draws_only_where_it_is_told(name: str) -> None:
    text = (BENCHMARKS / name / "main.py").read_text()
    assert re.search(r"""add_argument\("--plot", type=Path, help=""", text)
    assert not re.search(r"""with_name\(\S*\.png""", text)
