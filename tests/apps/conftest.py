"""Applications of others: where one is not installed, its file is skipped by name, before it is imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

_NEEDS = {
    "test_chemprop.py": "chemprop",
    "test_mlflow.py": "mlflow",
    "test_neuralforecast.py": "neuralforecast",
    "test_pytorch_forecasting.py": "pytorch_forecasting",
    "test_wandb.py": "wandb",
}


class _WithoutApp(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip(f"needs {_NEEDS[self.path.name]}: make check-apps", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Without its application a file is not imported."""
    needed = _NEEDS.get(module_path.name)
    there = needed is None or importlib.util.find_spec(needed) is not None
    return None if there else _WithoutApp.from_parent(parent, path=module_path)


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.apps)
