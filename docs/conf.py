"""Sphinx makes the site from the Markdown pages here and from the docstrings: ``make docs``."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from typing import Any
from unittest import mock

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import ddp_callbacks
from ddp_callbacks.launcher.options import parse_doctor_options, parse_options
from ddp_callbacks.launcher.plan import Here

project = "ddp_callbacks"
release = version = ddp_callbacks.__version__
copyright = "the authors of ddp_callbacks"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "ddp_callbacks"
html_static_path = ["_static"]
html_css_files = ["site.css"]
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
    ("py:.*", r"(torch|c10d|torchbearer|lightning|mpi4py|collections|datetime|os|signal|typing|dist)\b.*"),
    (
        "py:.*",
        "ddp_callbacks.torchbearer.(base.LocalStates|metrics.MetricsPass)|Callback|Trial|Work|timedelta|Process(Raised|Exited)Exception|BatchSize|CommHook|Compress|Every|Reduction|SkipBatch|Sync|Verify|Weight",
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


def download_outside_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    """Offer Markdown files outside docs/ for download, as MyST does with all other files there."""
    up = re.escape("../" * (docname.count("/") + 1))
    source[0] = re.sub(rf"\]\(({up}[^)#\s]+\.md)(#[^)\s]*)?\)", r"](path:\1)", source[0])


class Help(SphinxDirective):
    """What a program prints with ``--help``: ``{help} ddprun doctor``."""

    has_content = False
    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        printed = io.StringIO()
        with redirect_stdout(printed), suppress(SystemExit), mock.patch.dict(os.environ, COLUMNS="88"):
            _parser(self.arguments[0])(["--help"], {}, Here("python", "/", lambda name: False))
        return [nodes.literal_block("", printed.getvalue(), language="text")]


def _parser(program: str) -> Callable[[list[str], dict[str, str], Here], object]:
    parsers = {"ddprun": parse_options, "ddprun doctor": parse_doctor_options}
    return parsers[program]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("help", Help)
    app.connect("source-read", add_toctrees)
    app.connect("source-read", download_outside_pages)
    return {"parallel_read_safe": True}
