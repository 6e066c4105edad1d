"""Write the list of promises in ``tests/README.md``: the docstrings of the tests, by folder and file.

python -m kit.promises      in the folder tests
"""

from __future__ import annotations

import ast
from pathlib import Path

from kit.paths import TESTS

PAGE = TESTS / "README.md"
BEGIN = "## Promises\n"
TITLES = {
    "trial": "Torchbearer",
    "trainer": "Lightning and Fabric",
    "resume": "Stop and resume",
    "engine": "Gradients, batch norm, local steps",
    "comm": "Communication",
    "data": "Loaders",
    "failures": "Failures",
    "launcher": "ddprun, hosts, Slurm and PBS",
    "parts": "Parts, without processes",
    "pages": "Pages, examples and installation",
    "cuda": "On a GPU",
    "apps": "Applications of others",
    "engines": "Inside other engines",
}


def generate() -> str:
    """Return the page: its text above the list, and the new list."""
    parts = [PAGE.read_text().partition(BEGIN)[0] + BEGIN]
    for folder, title in TITLES.items():
        parts.append(f"### {title}\n")
        for path in sorted((TESTS / folder).glob("test_*.py")):
            if found := promises(path):
                parts.append(f"[{path.name}]({folder}/{path.name})\n")
                parts.append("\n".join(f"- {promise}" for promise in found) + "\n")
    return "\n".join(parts)


def promises(path: Path) -> list[str]:
    """Return the first paragraph of each test's docstring, each in one line."""
    tests = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    docs = [ast.get_docstring(node) for node in tests if node.name.startswith("test_")]
    return [" ".join(doc.partition("\n\n")[0].split()) for doc in docs if doc]


if __name__ == "__main__":
    PAGE.write_text(generate())
