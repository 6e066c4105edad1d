"""Lightning comes as two packages, whose classes are unrelated. Make ours for the one that a program uses."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence

from ddp_callbacks.versions import how_to_install, require_names

ROOTS = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
FABRIC = {"lightning": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}


def make(name: str, home: str) -> tuple[type, type, type, type]:
    """Make the classes for a package; see :func:`.classes.make`, which imports what comes with Lightning."""
    _require_package(name)
    classes: tuple[type, type, type, type] = importlib.import_module("ddp_callbacks.lightning.classes").make(name, home)
    return classes


def require(package: str, of_trainer: Sequence[str], of_fabric: Sequence[str] = ()) -> None:
    """Raise :class:`ImportError` if the package lacks a private name, naming the versions that have it.

    Args:
        of_trainer: Names below ``lightning.pytorch``, as :func:`ddp_callbacks.versions.require_names` reads them.
        of_fabric: Names below ``lightning.fabric``.
    """
    for roots, names in ((ROOTS, of_trainer), (FABRIC, of_fabric)):
        require_names(package.replace("_", "-"), [f"{roots[package]}.{name}" for name in names])


def _require_package(name: str) -> None:
    """Raise :class:`ImportError`, saying what to import instead, if the program uses the other package."""
    other = next(each for each in ROOTS if each != name)
    instead = f"import ddp_callbacks.{other} instead of ddp_callbacks.{name}"
    if importlib.util.find_spec(name) is None:
        if importlib.util.find_spec(other) is not None:
            raise ImportError(f"{name} is not installed, but {other} is: {instead}.")
        raise ImportError(
            f"Lightning is not installed: {how_to_install('lightning')} (or pytorch-lightning, which works as well)"
        )
    if _is_imported(other) and not _is_imported(name):
        raise ImportError(f"this program has imported {other}: {instead}. If it uses both, import {name} before.")


def _is_imported(name: str) -> bool:
    return ROOTS[name] in sys.modules or FABRIC[name] in sys.modules
