"""The figures of ``examples/benchmarks/gain`` stand on its pages as they were measured."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "benchmarks" / "gain"
FOUND = json.loads((FOLDER / "gain.json").read_text())


@pytest.fixture(scope="module")
def benchmark() -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / "main.py"))


def test_the_tables_are_what_was_measured(benchmark: dict[str, Any]) -> None:
    for page in benchmark["PAGES"]:
        for name, table in benchmark["tables"](FOUND).items():
            shown = f"<!-- gain.json: {name} -->\n\n{table}\n\n<!-- end -->"
            assert shown in page.read_text(), f"{page.name}: run main.py --draw in examples/benchmarks/gain"


def test_every_number_of_hosts_learns_alike() -> None:
    """Each epoch, to one percent: what rounding becomes in a training with float32."""
    for model in ("convolutions", "perceptron"):
        first, *others = [[right for _, right in epochs] for runs in FOUND["runs"][model].values() for epochs in runs]
        assert len(others) >= 5 and others == [pytest.approx(first, abs=0.01)] * len(others), model
