"""Supported versions of other libraries: install commands, and checks of the installed versions."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from ddp_callbacks.errors import warn

__version__ = "0.1.0"

SUPPORTED = {
    "torch": ">=2.8,<2.15",
    "lightning": ">=2.6,!=2.6.2,!=2.6.3,<2.7",
    "pytorch-lightning": ">=2.6,!=2.6.2,!=2.6.3,<2.7",
    "torchbearer": "==0.5.5",
    "mpi4py": ">=4",
}
"""The versions in pyproject.toml; each upper bound is the first minor version that ``make versions`` has not tested.

A newer version works with a warning.
"""


def how_to_install(*distributions: str) -> str:
    """Return the command to install these packages in supported versions: ``pip install "lightning>=2.6,<2.7"``."""
    return "pip install " + " ".join(f'"{_requirement(name)}"' for name in distributions)


def how_to_install_this(python: str = "python") -> str:
    """Return the command to install this library. No package index has it; a package of that name is another one."""
    folder = Path(__file__).resolve().parents[1]
    where = str(folder) if (folder / "pyproject.toml").exists() else "FOLDER"
    return f"{python} -m pip install {where} (the folder of its repository; no package index has it)"


def require_names(distribution: str, names: Iterable[str]) -> None:
    """Raise :class:`ImportError` if the installed version lacks one of these private names; warn if it is untested.

    Args:
        distribution: The package's name for pip.
        names: Private names, in three forms. ``module:attribute.attribute`` is a name.
            ``module:Class.method(self, first, second)`` is a function with the parameters that it must have.
            ``module:Class.__init__ uses first, second`` is for attributes that only instances have: a function whose
            code uses them.
    """
    for name in names:
        target, _, used = name.partition(" uses ")
        module, _, rest = target.partition(":")
        path, _, parameters = rest.rstrip(")").partition("(")
        try:
            found = functools.reduce(getattr, path.split("."), import_module(module))
        except (ImportError, AttributeError) as error:
            raise _lacks(distribution, f"{module}.{path}") from error
        if parameters and not set(parameters.split(", ")) <= _parameters(found):
            raise _lacks(distribution, f"{module}.{path}({parameters})")
        for attribute in used.split(", ") if used else ():
            if attribute not in _names_in(found):
                raise _lacks(distribution, f"{attribute} in {module}.{path}")
    _warn_of_an_untested(distribution)


def _parameters(function: Any) -> set[str]:
    return set(import_module("inspect").signature(function).parameters)  # inspect is slow to import


def _names_in(function: Any) -> tuple[str, ...]:
    """Return the attributes and globals that a function's code uses, without decorators; also its string constants."""
    code = import_module("inspect").unwrap(function).__code__
    return (*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str)))


def _lacks(distribution: str, name: str) -> ImportError:
    return ImportError(
        f"{distribution} {_installed(distribution)} has no {name}, which ddp_callbacks {__version__} needs. "
        f"It supports {_requirement(distribution)}: {how_to_install(distribution)}"
    )


@functools.cache
def _warn_of_an_untested(distribution: str) -> None:
    installed, untested = _installed(distribution), SUPPORTED.get(distribution, "").partition("<")[2]
    if untested and _minor(installed) >= _minor(untested):
        warn(
            f"{distribution} {installed} is newer than what ddp_callbacks {__version__} was tested with. If something "
            f"fails: {how_to_install(distribution)}",
        )


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _requirement(distribution: str) -> str:
    return distribution + SUPPORTED.get(distribution, "")


def _installed(distribution: str) -> str:
    version: str = import_module("importlib.metadata").version(distribution)
    return version
