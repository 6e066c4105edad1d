"""The folders of the tests, which every rank and command has on its path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
KIT = TESTS / "kit"
FOLDERS = [TESTS, *sorted(path for path in TESTS.iterdir() if path.is_dir() and path.name != "kit")]


def find_tests() -> None:
    """Let this interpreter import what the tests import: ``kit``, and modules of all folders by their bare name."""
    sys.path[:0] = [str(folder) for folder in FOLDERS if str(folder) not in sys.path]


def python_path() -> str:
    """Return the PYTHONPATH that does the same for a new interpreter. It also finds the package if not installed."""
    return os.pathsep.join([*map(str, FOLDERS), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
