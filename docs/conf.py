"""Sphinx makes the site from the Markdown pages here and from the docstrings: ``make docs``."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

import ddp_callbacks

project = "ddp_callbacks"
release = version = ddp_callbacks.__version__
copyright = "the authors of ddp_callbacks"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "ddp_callbacks"
html_static_path = ["_static"]
html_show_sourcelink = False
html_show_copyright = False

myst_heading_anchors = 4  # as GitHub makes them
myst_links_external_new_tab = False

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_use_ivar = True
python_maximum_signature_line_length = 90
nitpicky = True


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
    up = "../" * (docname.count("/") + 1)
    source[0] = re.sub(rf"\]\((?={re.escape(up)}[^)#]+\.md\))", "](path:", source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", add_toctrees)
    app.connect("source-read", download_outside_pages)
    return {"parallel_read_safe": True}
