"""Make README.md the page of a package index: ``python packaging/index_readme.py HOME TAG``, HOME as https://.../NAME."""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def for_index(text: str, home: str, tag: str) -> str:
    """Links lead to the repository at ``home``, and commands install from the index."""
    for here, there in (
        ("git clone ADDRESS ddp_callbacks     # the address of this repository", f"git clone {home} ddp_callbacks"),
        ("In the folder of this repository:", "From the package index:"),
        ('".[lightning]"            # or ".[torchbearer]"', '"ddp_callbacks[lightning]"    # or [torchbearer]'),
        ("- No release yet, no known users;", "- No known users;"),
    ):
        if text.count(here) != 1:
            raise ValueError(f"README.md has {text.count(here)} times: {here}")
        text = text.replace(here, there)
    text = re.sub(r"(!\[[^\]]*\])\((?!https?:)", rf"\1({home}/raw/{tag}/", text)
    return re.sub(r"\]\((?!https?:|#)", rf"]({home}/blob/{tag}/", text)


if __name__ == "__main__":
    README.write_text(for_index(README.read_text(), *sys.argv[1:]))
