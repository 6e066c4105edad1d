"""The house stays small: lines of code by folder, the list of promises, and no large binaries."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest
from kit.budget import NUMBERS, exceeded
from kit.paths import ROOT, TESTS
from kit.promises import PAGE, generate, promises

PACKAGE = ROOT / "ddp_callbacks"
NOT_CODE = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"}
MEGABYTE = 1 << 20


def code_lines(text: str) -> int:
    """Without blank lines, comments and docstrings."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            docs.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if tokenize.tok_name[token.type] not in NOT_CODE:
            used.update(range(token.start[0], token.end[0] + 1))
    return len(used - docs)


def files_of(folder: str) -> list[Path]:
    """Of a folder of the package, with those below it that have no number of their own."""
    others = [PACKAGE / name for name in NUMBERS["lines"] if name != folder and Path(name).is_relative_to(folder)]
    paths = (PACKAGE / folder).rglob("*.py")
    return [path for path in paths if not any(path.is_relative_to(other) for other in others)]


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git repository")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


@pytest.mark.parametrize("folder", NUMBERS["lines"])
def test_a_folder_of_the_package_has_no_more_code_than_its_budget(folder: str) -> None:
    """Each folder's code stays within `tests/budget.toml`."""
    lines = sum(code_lines(path.read_text()) for path in files_of(folder))
    most = NUMBERS["lines"][folder]
    assert lines <= most, f"{folder} has {lines} lines of code, {most} are allowed: take away, or raise the number"


def test_each_folder_of_the_package_has_a_budget() -> None:
    folders = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
    listed = {Path(name) for name in NUMBERS["lines"]}
    assert not [folder for folder in folders if not listed & {Path(folder), *Path(folder).parents}]


def test_no_large_binary_is_tracked_that_no_page_shows() -> None:
    """The repository tracks no unused file above 1 MB."""
    pages = "".join(path.read_text() for path in tracked() if path.suffix == ".md")
    large = [path for path in tracked() if path.is_file() and path.stat().st_size > MEGABYTE]
    assert not [path.name for path in large if path.name not in pages]


def test_the_list_of_promises_is_that_of_the_tests() -> None:
    """This list repeats docstrings."""
    assert PAGE.read_text() == generate(), "write it again: make promises"
    assert len(re.findall(r"\S*\w\S*", PAGE.read_text())) <= 4260, "more than 4,260 words"


def test_each_file_of_tests_states_a_promise() -> None:
    silent = [str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py") if not promises(path)]
    assert not silent


@pytest.mark.parametrize(
    ("tier", "costs", "over"),
    [
        ("parts", {"ranks": 1}, ["1 ranks (at most 0)"]),
        ("test", {"ranks": 40, "ranks at once": 2}, []),
        ("test", {"ranks": 3, "ranks at once": 3}, ["3 ranks at once (at most 2)"]),
        ("test", {"ranks": 3, "ranks at once": 3, "many_ranks": 1}, []),
        ("test", {"cold": 1}, ["1 cold (at most 0)"]),
        ("smoke", {"cold": 1}, []),
        ("check", {"cold": 1, "ranks at once": 3}, []),
    ],
)
def test_a_test_that_starts_more_than_its_tier_allows_fails(tier: str, costs: dict[str, int], over: list[str]) -> None:
    """Tests that start too much fail."""
    assert exceeded(tier, costs) == over
