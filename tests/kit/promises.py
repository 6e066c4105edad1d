"""Write the list of promises in ``tests/README.md``: the docstrings of the tests, by folder and file.

python -m kit.promises      in the folder tests
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
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
}


def generate() -> str:
    """The page: what stands above the list, and the list."""
    head = PAGE.read_text().partition(BEGIN)[0]
    sections = [f"### {title}\n\n{''.join(_of_folder(TESTS / folder))}" for folder, title in TITLES.items()]
    return f"{head}{BEGIN}\n" + "\n".join(sections)


def promises(path: Path) -> list[str]:
    """The first paragraph of the docstring of each test that has one, each in one line."""
    tests = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    docs = [ast.get_docstring(node) for node in tests if node.name.startswith("test_")]
    return [" ".join(doc.partition("\n\n")[0].split()) for doc in docs if doc]


def _of_folder(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("test_*.py")):
        found = promises(path)
        if found:
            yield (
                f"[{path.name}]({path.relative_to(TESTS)})\n\n" + "".join(f"- {promise}\n" for promise in found) + "\n"
            )


if __name__ == "__main__":
    PAGE.write_text(generate())
