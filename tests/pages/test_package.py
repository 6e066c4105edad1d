"""What would be published: a wheel and an sdist that install into an empty environment and train there."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
from kit.commands import DEADLINE
from kit.paths import ROOT

from ddp_callbacks import __version__

SCRIPT = """
import torch
from ddp_callbacks import GradientSynchronizer, broadcast_parameters, join_process_group

world = join_process_group()
torch.manual_seed(world.rank)
model = torch.nn.Linear(3, 1)
broadcast_parameters(model)
GradientSynchronizer(model)
model(torch.full((2, 3), 1.0 + world.rank)).sum().backward()
print("gradient of rank", world.rank, model.weight.grad.tolist())
"""

IMPORTS = """
import importlib, sys

for name in sys.argv[1:]:
    try:
        importlib.import_module(f"ddp_callbacks.{name}")
        print(name, "is here")
    except Exception as error:
        print(name, "is missing:", error)
"""
INSTALL = {  # what the sentence of a part that is missing recommends
    "lightning": 'pip install "lightning',
    "torchbearer": 'pip install "torchbearer==0.5.5"',
    "mpi": 'pip install "mpi4py',
}


def run(*words: str | Path, folder: Path) -> str:
    # Without what this process hands to its children: the environment must stand on its own.
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder), "OMP_NUM_THREADS": "1", "PIP_NO_INPUT": "1"}
    environ |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel and the sdist, built from the tracked files."""
    folder = tmp_path_factory.mktemp("built")
    copy = f"git -C {ROOT} ls-files -z | tar -C {ROOT} --null -T - -c | tar -x"
    subprocess.run(copy, shell=True, cwd=folder, check=True)
    run(sys.executable, "-m", "build", "--outdir", folder / "dist", folder, folder=folder)
    return folder / "dist"


@pytest.mark.night
@pytest.mark.cold
def test_the_wheel_and_the_sdist_hold_the_whole_package(built: Path) -> None:
    """Wheel and sdist hold every module of the package."""
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "ddp_callbacks").rglob("*.py")}
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert {*modules, "ddp_callbacks/py.typed"} <= set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        assert modules <= {name.partition("/")[2] for name in archive.getnames()}


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has torch only."""
    folder = tmp_path_factory.mktemp("with_torch")
    run(sys.executable, "-m", "venv", "made", folder=folder)
    version = torch.__version__.partition("+")[0]
    run(folder / "made" / "bin" / "python", "-m", "pip", "install", f"torch=={version}", folder=folder)
    return folder / "made"


def copy(environment: Path, folder: Path) -> Path:
    """Return the Python of a copy; the files are linked, and pip replaces those that it changes."""
    run("cp", "--archive", "--link", environment, folder / "copy", folder=folder)
    return folder / "copy" / "bin" / "python"


@pytest.mark.night
@pytest.mark.cold
def test_wheel_and_sdist_train_in_an_empty_environment(built: Path, with_torch: Path, tmp_path: Path) -> None:
    """The wheel installs into an empty environment and trains there."""
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    python = copy(with_torch, tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    for package in (wheel, sdist):  # of the sdist, pip makes another wheel
        run(python, "-m", "pip", "install", "--force-reinstall", "--no-deps", package, folder=tmp_path)
        output = run(python.with_name("ddprun"), "--nproc-per-node", "2", "train.py", folder=tmp_path)
        assert "gradient of rank 0 [[3.0, 3.0, 3.0]]" in output, output  # the mean of 2 and 4


@pytest.mark.night
@pytest.mark.cold
@pytest.mark.parametrize("extra", [None, "lightning", "torchbearer"])
def test_what_is_not_installed_says_how_to_install_it(
    built: Path, with_torch: Path, tmp_path: Path, extra: str | None
) -> None:
    (wheel,), python = built.glob("*.whl"), copy(with_torch, tmp_path)
    run(python, "-m", "pip", "install", f"{wheel}[{extra}]" if extra else wheel, folder=tmp_path)
    for line, (name, command) in zip(
        run(python, "-c", IMPORTS, *INSTALL, folder=tmp_path).splitlines(), INSTALL.items(), strict=True
    ):
        assert line == f"{name} is here" if name == extra else f"{name} is missing: " in line and command in line


def test_the_conda_recipe_agrees_with_the_metadata() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    recipe = (ROOT / "packaging" / "conda" / "recipe.yaml").read_text()
    torch_needed = project["dependencies"][0].replace("torch", "")
    lightning_needed = project["optional-dependencies"]["lightning"][0].replace("lightning", "")
    assert f"  version: {__version__}\n" in recipe and f"- ddprun = {project['scripts']['ddprun']}\n" in recipe
    assert f"- pytorch {torch_needed}\n" in recipe and f"- python {project['requires-python']}\n" in recipe
    assert recipe.count(f"lightning {lightning_needed}\n") == 2


def test_the_readme_of_an_index_leads_to_the_repository_and_installs_from_the_index() -> None:
    make = runpy.run_path(str(ROOT / "packaging" / "index_readme.py"))["for_index"]
    text = make((ROOT / "README.md").read_text(), "https://example.org/one/ddp", "v1.0")
    assert 'pip install "ddp_callbacks[lightning]"' in text and "git clone https://example.org/one/ddp" in text
    assert not re.findall(r"\]\((?!https:|#)", text)
    assert "(https://example.org/one/ddp/raw/v1.0/docs/_static/preemptible.svg)" in text
