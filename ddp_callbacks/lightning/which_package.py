"""Which of Lightning's two packages a program uses, where both are installed."""

from __future__ import annotations

import importlib.abc
import importlib.util
import inspect
import sys
from abc import ABCMeta
from collections.abc import Callable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from types import FrameType, FunctionType, ModuleType
from typing import Any

from ddp_callbacks.versions import how_to_install

ROOTS = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
FABRIC = {"lightning": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
# The modules of the classes made for each.
HOMES = {"lightning": "for_lightning", "pytorch_lightning": "for_pytorch_lightning"}
HOMES_OF_FABRIC = {"lightning": "fabric.for_lightning", "pytorch_lightning": "fabric.for_lightning_fabric"}
_OWN = {"lightning": ("lightning",), "pytorch_lightning": ("pytorch_lightning", "lightning_fabric")}


def installed() -> list[str]:
    """The packages that are installed, first those that the program has imported already.

    Raises:
        ImportError: None is.
    """
    names = [name for name in ROOTS if importlib.util.find_spec(name) is not None]
    if not names:
        raise ImportError(
            f"Lightning is not installed: {how_to_install('lightning')} (or pytorch-lightning, which works as well)"
        )
    return sorted(names, key=lambda name: ROOTS[name] not in sys.modules and FABRIC[name] not in sys.modules)


class AtImport(importlib.abc.MetaPathFinder):
    """Calls ``then`` when the program has imported a package for the first time."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name = name
        self._then = then
        sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self._then()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class ByCaller(ABCMeta):
    """Of a class that there is once for each package: a call makes an object for the one that the caller uses.

    Attributes:
        homes: The module that has the class for each package.
    """

    homes: Mapping[str, str]

    @property
    def __signature__(cls) -> inspect.Signature:
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _for_caller(cls, sys._getframe(1)).exactly(*args, **kwargs)

    def exactly(cls, *args: Any, **kwargs: Any) -> Any:
        """An object of this class, whoever calls."""
        return super().__call__(*args, **kwargs)


def _for_caller(cls: ByCaller, frame: FrameType | None) -> ByCaller:
    homes = {name: sys.modules.get(f"ddp_callbacks.lightning.{home}") for name, home in cls.homes.items()}
    classes = {name: getattr(home, cls.__name__, None) for name, home in homes.items()}
    if None in classes.values() or cls not in classes.values():  # there is but one, or it is a class of the user's
        return cls
    while frame is not None:
        used = set(_packages_of(frame))
        if len(used) == 1:
            return classes[used.pop()] or cls
        frame = frame.f_back
    return cls


def _packages_of(frame: FrameType) -> Iterator[str]:
    """The packages of which modules, classes or functions have a name where this code runs."""
    if str(frame.f_globals.get("__name__")).startswith("ddp_callbacks"):
        return
    for value in [*frame.f_globals.values(), *frame.f_locals.values()]:
        module = (
            value.__name__
            if isinstance(value, ModuleType)
            else getattr(value, "__module__", None)
            if isinstance(value, type | FunctionType)
            else None
        )
        for name, own in _OWN.items():
            if any(module == root or str(module).startswith(f"{root}.") for root in own):
                yield name
