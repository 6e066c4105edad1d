"""tests/README.md names each test beside the promise that it proves, and no test that is not there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_each_test_stands_beside_a_promise_and_each_that_is_named_is_there() -> None:
    text = (TESTS / "README.md").read_text()
    named = set(re.findall(r"`(test_\w+\.py::test_\w+)`", text[text.index("## Promises") :]))
    there = {
        f"{path.name}::{node.name}"
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert (sorted(named - there), sorted(there - named)) == ([], [])
