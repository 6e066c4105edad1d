"""Sphinx makes the site from the Markdown pages here and from the docstrings: ``make docs``."""

from __future__ import annotations

import inspect
import io
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from functools import cache, partial
from pathlib import Path
from pydoc import locate
from typing import Any
from unittest import mock

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import ddp_callbacks
from ddp_callbacks.launcher.options import parse_options

DOCS = Path(__file__).parent.resolve()
ROOT, FILES = DOCS.parent, DOCS / "_files"

project = "ddp_callbacks"
release = version = ddp_callbacks.__version__
copyright = "the authors of ddp_callbacks"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
if os.environ.get("INTERSPHINX"):  # links into the references of others: their inventories need the network
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "lightning": ("https://lightning.ai/docs/pytorch/stable", None),
    }
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"ddp_callbacks {release}"
if versions := os.environ.get(
    "DOCS_VERSIONS"
):  # folders of the site at DOCS_ROOT, one for each release: "v0.1.0 v0.2.0"
    links = (f'<a href="{os.environ["DOCS_ROOT"]}/{name}/index.html">{name}</a>' for name in versions.split())
    html_theme_options = {"announcement": "Releases: " + " ".join(links)}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["copy.js"]
pygments_style = "default"  # shows a diff in red and green in the light theme, too
html_show_sourcelink = False
html_show_copyright = False

myst_heading_anchors = 4  # as GitHub makes them

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # torch's and Torchbearer's methods are described there
napoleon_use_ivar = True
python_maximum_signature_line_length = 90
nitpicky = True
nitpick_ignore_regex = [  # what is not described here: other libraries, and names for types
    ("py:.*", r"(torch|c10d|torchbearer|lightning|mpi4py)\b.*"),
    ("py:.*", r"(collections|contextlib|datetime|io|os|signal|types|typing|dist)\b.*"),
    (
        "py:.*",
        "ddp_callbacks.torchbearer.(base.Call|base.LocalStates|metrics.MetricsPass)|ddp_callbacks.checkpoints.format.LocalStates|ddp_callbacks.data.iterator.(DividedLoader|Pass)|ddp_callbacks.data.shares.Step|Callback|Trial|Work|timedelta|Process(Raised|Exited)Exception|BatchSize|CommHook|Compress|Every|OnDivergence|Randomness|Reduction|SkipBatch|Sync|Verify|Weight",
    ),
]


def add_toctrees(app: Sphinx, docname: str, source: list[str]) -> None:
    """Make the lists of links under the headings of the landing page the sidebar's, so that a page is named once."""
    if docname == "index":
        source[0] = re.sub(r"^## (.+)\n((?:.*\n)*?)(?=^## |\Z)", _with_toctree, source[0], flags=re.MULTILINE)


def _with_toctree(part: re.Match[str]) -> str:
    pages = re.findall(r"^- .*?\]\((?!https?:)([^)#]+)\.md\)", part[2], re.MULTILINE)
    toctree = "\n".join(["```{toctree}", ":hidden:", f":caption: {part[1]}", "", *pages, "```", ""])
    return f"{part[0]}\n{toctree}\n" if pages else part[0]


_LINK = r"(?<!!)\[([^]]*)\]\(((?:\.\./)*[^)#\s:]+\.\w+)(#[^)\s]*)?\)"
_LANGUAGES = {".py": "python", ".sh": "bash", ".slurm": "bash", ".pbs": "bash", ".toml": "toml", ".yaml": "yaml"}


def make_pages_of_files(app: Sphinx) -> None:
    """Make each file outside of docs/ that a page links to a page of the site, in ``_files``."""
    for page in sorted(DOCS.rglob("*.md")):
        if FILES not in page.parents and "_build" not in page.parts:
            for _, target, _ in re.findall(_LINK, page.read_text()):
                path = (page.parent / target).resolve()
                if path.is_file() and DOCS not in path.parents:
                    _make_page(path)


def _make_page(path: Path) -> None:
    made = FILES / f"{path.relative_to(ROOT)}.md"
    made.parent.mkdir(parents=True, exist_ok=True)
    source = os.path.relpath(path, made.parent)
    if path.suffix == ".md":
        text = re.sub(r"!\[([^]]*)\]\(([^)\s]+)\)", partial(_image, path, made), path.read_text())
    else:
        language = _LANGUAGES.get(path.suffix, "text")
        text = f"# {path.relative_to(ROOT)}\n\n```{{literalinclude}} {source}\n:language: {language}\n```\n"
    text = f"---\norphan: true\n---\n{text}"
    if not made.exists() or made.read_text() != text:
        made.write_text(text)


def _image(path: Path, made: Path, image: re.Match[str]) -> str:
    return f"![{image[1]}]({os.path.relpath(path.parent / image[2], made.parent)})"


def link_to_pages_of_files(app: Sphinx, docname: str, source: list[str]) -> None:
    """Let links lead to these pages; in them, links to files that have no page become plain text."""
    page = DOCS / f"{docname}.md"
    home = ROOT / docname.removeprefix(f"{FILES.name}/") if FILES in page.parents else page

    def lead(link: re.Match[str]) -> str:
        text, target, anchor = link.groups(default="")
        path = (home.parent / target).resolve()
        if DOCS not in path.parents:
            path = FILES / f"{path.relative_to(ROOT)}.md"
        return f"[{text}]({os.path.relpath(path, page.parent)}{anchor})" if path.is_file() else text

    source[0] = re.sub(_LINK, lead, source[0])


def add_summary(app: Sphinx, docname: str, source: list[str]) -> None:
    """Begin the pages of the API with a table of what they describe, and the page that shows it at work.

    The pages that teach a subject are those to which the page of the API links before the table, the first one first.
    """
    names = re.findall(r"^\.\. auto(?:class|function):: (\S+)", source[0], re.MULTILINE)
    if names and docname.startswith("reference/api/"):
        rows = (f"| {{py:obj}}`~{name}` | {_first_sentence(name)} | {shown_in(name, source[0])} |" for name in names)
        table = "\n".join(["| Name | | Shown in |", "|---|---|---|", *rows])
        source[0] = re.sub(r"\n(?=## |```)", lambda _: f"\n{table}\n\n", source[0], count=1)


def _first_sentence(name: str) -> str:
    text = " ".join((inspect.getdoc(locate(name)) or "").partition("\n\n")[0].split())
    text = re.sub(r":\w+:`[~.]*([^`<]*?)(?: <[^`]*>)?`", r"`\1`", text.replace("``", "`"))
    return text.replace("|", "\\|")


_PART = r"^#{1,4} (?P<heading>[^\n]+)$|^```(?P<language>[^\n]*)\n(?P<code>.*?)^```"


def shown_in(name: str, api: str) -> str:
    """A link to the first of the pages that teach whose code imports it, or else to the page that names it most."""
    teaching = re.findall(r"\]\(\.\./\.\./([^)#]+\.md)", api.partition("```")[0])
    links = examples().get(name, {})
    most = sorted(links, key=lambda page: -_visible(DOCS / page).count(name.rpartition(".")[2]))
    return next((links[page] for page in (*teaching, *most) if page in links), "")


@cache
def examples() -> dict[str, dict[str, str]]:
    """For each dotted name, by page: a link to the first part whose code imports it."""
    found: dict[str, dict[str, str]] = {}
    for page in [
        path for folder in ("how_to", "tutorials", "explanation") for path in sorted((DOCS / folder).glob("*.md"))
    ]:
        title = anchor = ""
        for part in re.finditer(_PART, _visible(page), re.MULTILINE | re.DOTALL):
            if heading := part["heading"]:
                title, anchor = title or heading, re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            elif part["language"] in ("python", "diff"):
                link = f"[{title}](../../{page.relative_to(DOCS)}#{anchor})"
                for name in _imported(part["code"]):
                    found.setdefault(name, {}).setdefault(str(page.relative_to(DOCS)), link)
    return found


def _visible(page: Path) -> str:
    return re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)


def _imported(code: str) -> Iterator[str]:
    """What a program, or the new lines of a diff, imports from the package."""
    code = re.sub(r"^[+] ?", "", code, flags=re.MULTILINE)
    for module, some, one in re.findall(r"^from (ddp_callbacks[\w.]*) import (?:\(([^)]*)\)|(.+))", code, re.MULTILINE):
        yield from (f"{module}.{name}" for name in re.findall(r"\w+", some or one))


class Help(SphinxDirective):
    """What a program prints with ``--help``: ``{help} ddprun doctor``."""

    has_content = False
    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        printed = io.StringIO()
        with redirect_stdout(printed), suppress(SystemExit), mock.patch.dict(os.environ, COLUMNS="88"):
            flag = "--help-all" if self.arguments[0] == "ddprun" else "--help"
            parse_options([flag], {}, command=self.arguments[0].removeprefix("ddprun").strip())
        return [nodes.literal_block("", printed.getvalue(), language="text")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("help", Help)
    app.connect("source-read", add_toctrees)
    app.connect("builder-inited", make_pages_of_files)
    app.connect("source-read", link_to_pages_of_files)
    app.connect("source-read", add_summary)
    return {"parallel_read_safe": True}
