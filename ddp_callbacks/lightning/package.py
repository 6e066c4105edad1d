"""Make the public classes for one of Lightning's two packages, and register the strategies there."""

from __future__ import annotations

import functools
import importlib
import typing
from collections.abc import Callable
from types import FunctionType
from typing import Any, Literal

from ddp_callbacks.lightning import _logged, _parts
from ddp_callbacks.lightning._torchmetrics import require_torchmetrics
from ddp_callbacks.lightning.callback import DDPCallbackMixin, let_callbacks_choose
from ddp_callbacks.lightning.classes import CallbackFabricStrategy, CallbackStrategy, DDPCallback, Resume
from ddp_callbacks.lightning.logs import JointResults
from ddp_callbacks.lightning.packages import FABRIC, ROOTS, require
from ddp_callbacks.lightning.processes import NAMES

# Return types are left out: jsonargparse takes a function that returns a class for a factory of its objects.
_FUNCTIONS: dict[str, Any] = {
    "weight": Literal["cross_entropy"] | Callable[[Any], Any] | None,
    "comm_hook": Callable[[Any, Any], Any] | None,
}


def make(name: str, home: str) -> tuple[type, type, type, type]:
    """Make ``CallbackStrategy``, ``DDPCallback``, ``Resume`` and ``CallbackFabricStrategy`` for a package.

    Args:
        home: The name of the module that has the classes.

    Raises:
        ImportError: The installed version lacks something.
    """
    require(name, _parts.PRIVATE + _logged.PRIVATE, _parts.PRIVATE_OF_BOTH)
    require_torchmetrics()
    strategies = importlib.import_module(f"{ROOTS[name]}.strategies")
    base = importlib.import_module(f"{ROOTS[name]}.callbacks").Callback
    let_callbacks_choose(importlib.import_module(ROOTS[name]).Trainer)
    of_fabric = importlib.import_module(f"{FABRIC[name]}.strategies")
    shared: dict[str, Any] = {"package": name}
    own = {
        "__init__": _for_configs(CallbackStrategy.__init__, strategies.DDPStrategy.__init__),
        "strategy_name": NAMES[0],
        "ddp_strategy": strategies.DDPStrategy,
        "results_class": type("JointResults", (JointResults, _logged.results_class(name)), {"__module__": home}),
    }
    strategy = _make(home, CallbackStrategy, strategies.DDPStrategy, shared | own)
    fabric = _make(home, CallbackFabricStrategy, of_fabric.DDPStrategy, shared)
    what = "gradients synchronized by callbacks, the module is not wrapped"
    for each in NAMES:
        strategies.StrategyRegistry.register(each, strategy, description=what, override=True)
        of_fabric.STRATEGY_REGISTRY.register(each, fabric, description=what, override=True)
    init = functools.wraps(own["__init__"])(lambda *args, **options: DDPCallbackMixin.__init__(*args, **options))
    callback = _make(home, DDPCallback, base, shared | {"__init__": init, "strategy_class": strategy})
    return strategy, callback, _make(home, Resume, base, shared), fabric


def _make(home: str, described: type, base: type, members: dict[str, Any]) -> type:
    """Make a class for the package, with the name and the docstring of ``described``."""
    return type(described.__name__, (described, base), {"__module__": home, "__doc__": described.__doc__, **members})


def _for_configs(init: Any, of_ddp: Any) -> FunctionType:
    """Return a copy of ``init`` with the types that LightningCLI needs to make objects from a YAML file.

    Args:
        of_ddp: ``DDPStrategy.__init__``, which has the package's own classes where ``init`` has ``Any``.
    """
    copy = FunctionType(init.__code__, init.__globals__, init.__name__, init.__defaults__, init.__closure__)
    copy.__kwdefaults__, copy.__qualname__ = init.__kwdefaults__, init.__qualname__
    of_ddp = typing.get_type_hints(of_ddp)
    hints = init.__annotations__
    own = {name: of_ddp[name] for name in hints if hints[name] == "Any" and name in of_ddp}
    copy.__annotations__ = hints | own | _FUNCTIONS
    return copy
