"""Check that the installed Lightning has the private names that this library uses.

:mod:`._parts`, :mod:`._logged` and :mod:`._progress` list these names and use them, each in one function.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddp_callbacks.lightning import _logged, _parts, _progress
from ddp_callbacks.lightning.packages import FABRIC, ROOTS
from ddp_callbacks.versions import require_names


def require_lightning(package: str) -> None:
    """Raise :class:`ImportError` if the installed package lacks a private name, naming the versions that have it."""
    _require(package, ROOTS, _parts.PRIVATE + _logged.PRIVATE)
    _require(package, FABRIC, _parts.PRIVATE_OF_BOTH)


def require_resume(package: str) -> None:
    """Like :func:`require_lightning`, for the names that only ``Resume`` uses."""
    _require(package, ROOTS, _progress.PRIVATE)
    _require(package, FABRIC, _progress.PRIVATE_OF_LOGGERS)


def require_fabric(package: str) -> None:
    """Like :func:`require_lightning`, for the names that only Fabric's strategy uses."""
    _require(package, FABRIC, _parts.PRIVATE_OF_FABRIC)


def _require(package: str, roots: dict[str, str], names: Sequence[str]) -> None:
    require_names(package.replace("_", "-"), [f"{roots[package]}.{name}" for name in names])
