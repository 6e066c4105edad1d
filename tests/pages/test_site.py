"""The site builds, and a browser shows it whole."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from kit.commands import DEADLINE, run
from kit.paths import ROOT

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="needs Sphinx: the extra docs"),
    pytest.mark.pages,
    pytest.mark.xdist_group("site"),
]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PROBE = Path(__file__).with_name("site_probe.html")
WIDTHS = (1280, 1100, 390)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = ["python", "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", "-d", folder / "doctrees"]
    run([*command, ROOT / "docs", folder / "html"], ROOT)
    return folder / "html"


def test_site_builds_without_a_warning(site: Path) -> None:
    """The site builds without a warning."""
    assert (site / "index.html").exists()


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
def test_no_code_is_cut_off_on_wide_and_on_narrow_screens(site: Path, tmp_path: Path) -> None:
    """Browsers show all code, on wide and narrow screens, bright or dark."""
    pages = sorted(str(path.relative_to(site)) for path in site.rglob("*.html") if "_files" not in path.parts)
    probe = PROBE.read_text().replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS))
    (site / "probe.html").write_text(probe)
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    options += ["--allow-file-access-from-files", "--virtual-time-budget=10000000", "--dump-dom"]
    command = [str(CHROMIUM), *options, (site / "probe.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, cwd=tmp_path)
    found = re.search(r"<pre id=\"found\">(.*?)</pre>", done.stdout, re.DOTALL)
    assert found and found[1].startswith("looked at"), done.stderr[-3000:]
    looked, *faults = found[1].strip().splitlines()
    assert looked == f"looked at {len(pages) * len(WIDTHS)} pages" and not faults, "\n".join(faults[:40])
