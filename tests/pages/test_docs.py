"""README.md and the pages of the site: their code runs, and their links lead somewhere."""

from __future__ import annotations

import ast
import graphlib
import importlib
import inspect
import re
import runpy
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.pages import (
    COLD,
    LANGUAGES,
    ROOT,
    Block,
    Page,
    Running,
    agrees,
    figures,
    page_named,
    pages,
    patched,
    sides,
)
from kit.ranks import Nursery

import ddp_callbacks
import ddp_callbacks.errors
import ddp_callbacks.lightning
import ddp_callbacks.torchbearer

DOCS = ROOT / "docs"
PAGES = pages()
FOLDERS = [path.parent.relative_to(ROOT) for path in sorted((ROOT / "ddp_callbacks").rglob("*/__init__.py"))]
BLOCKS = [block for page in PAGES for block in page.blocks]


def _run_together(page: Page) -> list[Any]:
    """The blocks of a page run one after the other, on one of pytest's workers."""
    blocks = [block for block in page.blocks if (block.is_python or block.is_commands) and block.not_run is None]
    return [pytest.param(block, marks=list(_marks(page, block)), id=str(block)) for block in blocks]


def _marks(page: Page, block: Block) -> Iterator[pytest.MarkDecorator]:
    yield pytest.mark.pages
    yield pytest.mark.xdist_group(page.name)
    if block.needs_mpi:
        yield pytest.mark.mpi
    if page.name in COLD:
        yield pytest.mark.cold


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[dict[str, Running]]:
    """Each page as its code runs, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("pages")

    class Made(dict[str, Running]):
        def __missing__(self, name: str) -> Running:
            self[name] = made = Running(page_named(name), folder / name.replace("/", "-"), nursery)
            return made

    yield Made()
    shutil.rmtree(folder)


@pytest.mark.parametrize("block", [each for page in PAGES for each in _run_together(page)])
def test_block_runs(block: Block, running: dict[str, Running]) -> None:
    """The code of all pages prints what they show."""
    failure = running[block.page].failure_of(block)
    if failure is not None:
        pytest.fail(f"{block}\n{failure}", pytrace=False)


def test_blocks_are_of_known_languages_and_their_files_are_used() -> None:
    for page in PAGES:
        for block in page.blocks:
            assert block.language in LANGUAGES or re.fullmatch(r"\{[a-z-]+\}.*", block.language), block
            assert block.file is None or "\n".join(page.lines).count(block.file) > 1, f"{block}: nothing uses the file"


def test_blocks_that_are_not_run_are_few_and_say_why() -> None:
    """Code that does not run says why."""
    left_out = [block for block in BLOCKS if block.not_run is not None]
    assert not [str(block) for block in left_out if len((block.not_run or "").split()) < 3]
    runnable = [block for block in BLOCKS if block.language in ("python", "diff", "sh", "console")]
    assert len(left_out) < len(runnable) / 8, [str(block) for block in left_out]


def made_by(block: Block) -> str:
    """The Python of a block; of a diff, what it makes."""
    return sides(block.text)[1] if block.language == "diff" else block.text


def _imported_in(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """What a program imports from the package: module and name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("ddp_callbacks"):
            yield from ((str(node.module), name.name) for name in node.names)


def test_python_that_is_not_run_compiles_and_imports_what_exists() -> None:
    for block in BLOCKS:
        if block.is_python and block.not_run is not None:
            block.code()
            for module, name in _imported_in(ast.parse(made_by(block))):
                assert hasattr(importlib.import_module(module), name), f"{block}: {module}.{name}"


def test_workers_of_dask_that_import_the_script_start_nothing() -> None:
    (block,) = (block for block in BLOCKS if "from dask.distributed import Client" in block.text)
    assert {type(node) for node in ast.parse(block.text).body} == {ast.ImportFrom, ast.FunctionDef, ast.If}


def test_make_has_the_targets_that_pages_name() -> None:
    rules = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {name for names in rules for name in names.split()}
    texts = ["\n".join(page.lines) for page in _tracked_pages()]
    named = {name for text in texts for name in re.findall(r"(?:^|`)(?:\w+=\S+ )*make ([\w-]+)", text, re.MULTILINE)}
    assert named and named <= targets


def test_make_clean_removes_what_git_ignores() -> None:
    removed = (ROOT / "Makefile").read_text().partition("\nclean:\n")[2].split()
    not_of_make = {"__pycache__/", "dist/", "/data/", "logs/", ".venv*/"}
    ignored = {name.rstrip("/") for name in {*(ROOT / ".gitignore").read_text().split()} - not_of_make}
    assert ignored - {"_build", "docs/_files"} <= {*removed} and {"docs/_build", "docs/_files"} <= {*removed}


def _tracked_pages() -> list[Page]:
    """Those of the examples and of the root folder as well."""
    root = [Page(path) for path in sorted(ROOT.glob("*.md")) if path.name != "README.md"]
    return [*PAGES, *root, *(Page(path) for path in sorted((ROOT / "examples").rglob("*.md")))]


@pytest.mark.parametrize("page", _tracked_pages(), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Page) -> None:
    """Links and `make` targets of pages exist."""
    for link in page.links:
        path, _, anchor = link.partition("#")
        target = (page.path.parent / path).resolve() if path else page.path
        assert target.is_file(), f"{page.name}: no file {link}"  # a folder cannot be offered by the site
        if anchor and target.suffix == ".md":
            assert anchor in Page(target).anchors, f"{page.name}: no heading {link}"


def test_the_page_of_variables_has_each_of_the_library() -> None:
    """The page of variables names each of the library's."""
    text = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    shown = (DOCS / "reference" / "variables.md").read_text()
    assert {*re.findall(r"\bDDP_CALLBACKS_[A-Z_]+[A-Z]\b", text)} <= {*re.findall(r"\bDDP_CALLBACKS_[A-Z_]+\b", shown)}


def test_the_torchbearer_page_lists_callbacks_that_can_be_used_alone() -> None:
    section = (DOCS / "how_to" / "torchbearer.md").read_text().partition("## The callbacks alone")[2]
    listed = re.findall(r"^\| `(\w+)` \|", section.partition("\n## ")[0], re.MULTILINE)
    assert sorted(listed) == sorted({*ddp_callbacks.torchbearer.__all__} - {"SHARE", "DDPCallback"})


# --- words -----------------------------------------------------------------------------------------------------------

WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text())
MOST_WORDS, MOST_OF_A_PAGE, MOST_OF_THE_README = 33_000, 1_800, 900


def test_pages_are_short() -> None:
    """Pages are short."""
    words = {page.name: page.words for page in PAGES}
    assert words.pop("README.md") <= MOST_OF_THE_README
    assert max(words.values()) <= MOST_OF_A_PAGE, max(words, key=words.__getitem__)
    assert sum(words.values()) <= MOST_WORDS, sum(words.values())


@pytest.mark.parametrize("page", _tracked_pages(), ids=lambda page: page.name)
def test_pages_use_plain_words_and_agree_on_figures(page: Page) -> None:
    """Pages use plain words, and agree on figures."""
    text = " ".join(page.prose.split())
    for pattern, instead in WORDS["instead"].items():
        found = re.search(rf".{{0,40}}{pattern}.{{0,20}}", text, re.IGNORECASE)
        assert not found, f"{page.name}: {found and found[0]!r}: write {instead}"
    for pattern, value in WORDS["figures"].items():
        shown = {group for match in re.finditer(pattern, text, re.MULTILINE) for group in match.groups() if group}
        assert shown <= {value}, f"{page.name}: {shown} for {pattern}"


def test_step_times_lead_to_what_measured_them() -> None:
    shown = [page for page in PAGES if "0.55 to 0.90" in page.prose]
    assert shown and all(any("/step_time/README.md" in link for link in page.links) for page in shown)


def test_lines_of_ddprun_have_absolute_paths() -> None:
    lines = [line for block in BLOCKS for line in block.text.splitlines() if line.startswith("ddprun: ")]
    assert not [line for line in lines if " ddprun-logs/" in line]


def _texts_of_the_package() -> Iterator[tuple[str, str]]:
    """Messages, with where they are, and the docstrings of public names."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        descriptions = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in descriptions:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value
    yield from ((name, text) for name, _, text in DESCRIBED)


def test_messages_and_docstrings_use_plain_words() -> None:
    found = [
        f"{where}: {match[0]!r} in {text!r}: write {instead}"
        for where, text in ((where, " ".join(text.split())) for where, text in _texts_of_the_package())
        for pattern, instead in WORDS["instead"].items()
        if (match := re.search(pattern, text, re.IGNORECASE))
    ]
    assert not found, "\n".join(found)


# --- the reference ---------------------------------------------------------------------------------------------------

API = sorted((DOCS / "reference" / "api").glob("*.md"))
LISTED = [
    name
    for path in API
    for name in re.findall(r"^\.\. auto(?:class|function|data):: (\S+)", path.read_text(), re.MULTILINE)
]


ROOMS = ("comm", "errors", "lightning", "mpi", "pytorch_lightning", "torchbearer")
PUBLIC = {"ddp_callbacks", *(f"ddp_callbacks.{name}" for name in ROOMS)}


def _find(name: str) -> Any:
    """What a dotted name of the reference stands for."""
    found: Any = ddp_callbacks
    path = "ddp_callbacks"
    for part in name.split(".")[1:]:
        path += f".{part}"
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(path)
    return found


def test_the_reference_lists_public_names_and_what_pages_and_examples_import() -> None:
    """The reference lists public names and what pages import."""
    for module in sorted(PUBLIC - {"ddp_callbacks.errors", "ddp_callbacks.pytorch_lightning"}):
        path = ROOT / module.replace(".", "/")
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        text = source.read_text()  # to import mpi would change this process
        listed = re.findall(r"__all__ = \[(.*?)\]", text, re.DOTALL)
        names = re.findall(r'"(\w+)"', listed[0]) if listed else ddp_callbacks.__all__
        assert {f"{module}.{name}" for name in names} - {"ddp_callbacks.__version__"} <= set(LISTED)
    sources = [path.read_text() for path in (ROOT / "examples").rglob("*.py") if "benchmarks" not in path.parts]
    sources += [made_by(block) for block in BLOCKS if block.is_python]
    imported = [found for source in sources for found in _imported_in(ast.parse(source))]
    assert {module for module, _ in imported} <= PUBLIC
    errors = {f"ddp_callbacks.errors.{name}" for name in vars(ddp_callbacks.errors)}
    assert {f"{module}.{name}" for module, name in imported} <= set(LISTED) | errors


def _described() -> Iterator[tuple[str, Any, str]]:
    """Every public class, function, method and property, with its name and the text that describes it."""
    for name in LISTED:
        found = None if name.startswith("ddp_callbacks.mpi.") else _find(name)
        if not callable(found) or isinstance(found, str):
            continue
        yield name, found, inspect.getdoc(found) or ""
        if inspect.isclass(found):
            for attribute, value in vars(found).items():
                inherited = any(hasattr(base, attribute) for base in found.__mro__[1:])
                function = getattr(value, "__func__", getattr(value, "fget", value))
                ours = inspect.isfunction(function) and function.__module__.startswith("ddp_callbacks")
                if ours and not attribute.startswith("_") and not inherited:
                    yield f"{name}.{attribute}", value, inspect.getdoc(value) or ""


DESCRIBED = list(_described())


@pytest.mark.parametrize(("name", "thing", "text"), DESCRIBED, ids=[name for name, _, _ in DESCRIBED])
def test_public_names_are_described_with_all_their_parameters(name: str, thing: Any, text: str) -> None:
    """Each public name documents all its parameters."""
    assert text, f"{name} has no docstring"
    if isinstance(thing, property):
        return
    parameters = inspect.signature(getattr(thing, "__func__", thing)).parameters
    named = [parameter for parameter in parameters if parameter not in ("self", "cls")]
    missing = [parameter for parameter in named if not re.search(rf"(?<!\w){re.escape(parameter)}\b", text)]
    assert not missing, f"{name} does not say what {missing} are"


def test_each_public_class_is_shown_at_work() -> None:
    pytest.importorskip("sphinx")
    shown = runpy.run_path(str(DOCS / "conf.py"))["examples"]()
    modules = (ddp_callbacks, ddp_callbacks.torchbearer, ddp_callbacks.lightning)
    public = {f"{module.__name__}.{name}" for module in modules for name in module.__all__}
    classes = {name for name in public if inspect.isclass(_find(name))} - {
        "ddp_callbacks.GradBucket",
        "ddp_callbacks.Share",
        "ddp_callbacks.WorkerEnv",
    }  # nobody makes one
    assert classes <= set(shown), classes - set(shown)


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("lightning.CallbackStrategy", "how_to/lightning.md#options"),
        ("lightning.Resume", "how_to/preemptible_jobs.md#what-you-add"),
        ("shard_loader", "how_to/loaders.md#in-a-loop-of-your-own"),
        ("spawn", "how_to/launching.md#without-ddprun"),
        ("CrossEntropyWeight", "explanation/exact_gradient.md#what-the-weight-is"),
    ],
)
def test_the_reference_points_to_the_page_that_teaches_a_name(name: str, page: str) -> None:
    pytest.importorskip("sphinx")
    (api,) = (text for path in API if f" ddp_callbacks.{name}\n" in (text := path.read_text()))
    shown = runpy.run_path(str(DOCS / "conf.py"))["shown_in"](f"ddp_callbacks.{name}", api)
    assert f"(../../{page})" in shown


PACKAGE = ROOT / "ddp_callbacks"


def _imports() -> dict[str, set[str]]:
    """What each module of the package imports of the others when it is imported itself."""
    sources = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in sources.items() if name != "__init__"}
    found: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("ddp_callbacks"):
                inner = str(node.module).removeprefix("ddp_callbacks").removeprefix(".")
                inside = [f"{inner}.{part.name}".strip(".") for part in node.names]
                found[name] |= {other if other in modules else inner for other in inside} - {"", name}
    return found


def _entry(module: str) -> str:
    """What stands on the map for a module."""
    return module.partition(".")[0]


def test_the_map_of_the_code_has_every_module_above_what_it_imports() -> None:
    """Imports go in one direction, as the map shows."""
    text = (DOCS / "reference" / "architecture.md").read_text()
    levels = {name: int(level) for level, name in re.findall(r"^\| (\d+) \| `([\w.]+)` \|", text, re.MULTILINE)}
    drawn = runpy.run_path(str(DOCS / "_static" / "drawings.py"))["levels"]()
    assert list(levels.values()) == sorted(levels.values())
    assert levels == {name: level for level, names in enumerate(drawn) for name in names}
    imports = {name: others for name, others in _imports().items() if name != "__main__"}
    assert set(levels) == set(map(_entry, imports))
    for name, others in imports.items():
        for other in others:
            here, there = _entry(name), _entry(other)
            assert here == there or levels[there] < levels[here], f"{name} imports {other}"
    inside = {name: others - {_entry(name)} for name, others in _imports().items()}
    assert list(graphlib.TopologicalSorter(inside).static_order())  # raises CycleError


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_the_docstring_of_a_folder_names_its_modules_and_no_other(folder: Path) -> None:
    text = (ROOT / folder / "__init__.py").read_text().split('"""')[1]
    modules = {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__", "__main__"}
    assert modules == {name for name in modules if re.search(rf"(?<![\w.]){name}\b|:mod:`\.{name}`", text)}
    assert set(re.findall(r":mod:`\.(\w+)`", text)) <= modules


# --- how blocks are read and compared --------------------------------------------------------------------------------


def test_a_page_is_read_with_its_hidden_comments() -> None:
    text = """\
# A page
<!-- setup
import torch
-->
```python
x = torch.ones(2)
```
<!-- file: train.py
print("trained")
-->
<!-- not run: it needs a cluster -->

```sh
qsub job.pbs
```
Text ends the reach of a comment.
1. In a list:
   ```console
   $ python train.py \\
       --fast   # a remark
   trained
   ```
"""
    page = Page(ROOT / "docs" / "page.md")
    page.__dict__["lines"] = text.splitlines()
    setup, code, file, left_out, commands = page.blocks
    assert (setup.line, setup.text, setup.is_python) == (3, "import torch\n", True)
    assert (code.line, code.language) == (6, "python")
    assert (file.file, file.text, file.is_python) == ("train.py", 'print("trained")\n', False)
    assert left_out.not_run == "it needs a cluster"
    assert commands.not_run is None
    assert commands.commands() == [("python train.py --fast   # a remark", ["trained"])]


def test_a_diff_has_two_sides() -> None:
    assert sides("+ import a\n\n- f(1)\n+ f(2)\n  g()") == ("\n\nf(1)\n\ng()", "import a\n\n\nf(2)\ng()")
    assert patched("import b\nf(1)\n\ng()\n", "+ import a\n  import b\n  ...\n- g()\n+ g(2)") == (
        "import a\nimport b\nf(1)\n\ng(2)\n"
    )
    assert sides("@@ -1 +1 @@\n f(\n-    1)\n+    2)") == ("f(\n    1)\n", "f(\n\n    2)")


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("loss 0.25, 7 of 10", "loss 0.31, 9 of 12", True),
        ("(checksum d2d9e948)", "(checksum 01234567)", True),
        ("100%|██▌  | 10/10 [00:07<00:00, 1.41it/s]", "\r 10%|█\r100%|████| 9/9 [01:00<00:00, 1.1s/it]", True),
        ("a\n...\nd", "a\nb\nc\nd", True),
        ("a ... c", "a b c", True),
        ("a\n[h1:0] ddp_callbacks: summed\nb", "a\nb\n[h1:0] ddp_callbacks: summed", True),
        ("a\nddp_callbacks: summed\nb", "a\nb", False),
        ("a", "a\nb", False),
        ("loss 1", "lost 1", False),
        ("...\nb", "a\nc", False),
    ],
)
def test_output_agrees_but_for_its_numbers(shown: str, printed: str, same: bool) -> None:
    """Tests compare output with pages, but for numbers."""
    assert agrees(shown.splitlines(), printed) is same


def test_figures_are_those_of_lines_about_processes() -> None:
    lines = [
        "1 process: accuracy 0.969, loss 0.1154; logs",
        "epoch 1 loss 0.3",
        "2 processes; accuracy on 360 digits: 0.97",
    ]
    assert figures(lines) == [(("accuracy", "0.969"), ("loss", "0.1154")), (("accuracy", "0.97"),)]
