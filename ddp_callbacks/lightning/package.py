"""Lightning comes as two packages, ``lightning`` and ``pytorch_lightning``, whose classes know nothing of each other.

The classes here are made once for each that is installed, from the same mixins.
"""

from __future__ import annotations

import importlib
import typing
from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType
from typing import Any, Literal

from ddp_callbacks.lightning._lightning import (
    CHECK_SEARCH,
    add_worker_init_fn,
    is_interactive,
    require_lightning,
    results_class,
    tuner_module,
    undivided,
)
from ddp_callbacks.lightning._torchmetrics import require_torchmetrics
from ddp_callbacks.lightning.classes import CallbackStrategy, DDPCallback, Resume
from ddp_callbacks.lightning.logs import JointResults
from ddp_callbacks.lightning.processes import NAMES
from ddp_callbacks.lightning.replacement import Replaced
from ddp_callbacks.lightning.which_package import HOMES, ROOTS, ByCaller

# What a hook returns is left out: jsonargparse takes a function that returns a class for one that makes such objects.
_FUNCTIONS: dict[str, Any] = {
    "weight": Literal["cross_entropy"] | Callable[[Any], Any] | None,
    "comm_hook": Callable[[Any, Any], Any] | None,
}


def make(name: str, home: str) -> tuple[type, type, type]:
    """Make the strategy and the callbacks for a package, and register the strategy there.

    Args:
        home: The module that has them.
    """
    root = ROOTS[name]
    require_lightning(name)
    require_torchmetrics()
    strategies = importlib.import_module(f"{root}.strategies")
    callbacks = importlib.import_module(f"{root}.callbacks")
    members: dict[str, Any] = {
        "__module__": home,
        "__doc__": CallbackStrategy.__doc__,
        "__init__": _for_configs(CallbackStrategy.__init__, strategies.DDPStrategy.__init__),
        "homes": HOMES,
        "strategy_name": NAMES[0],
        "ddp_strategy": strategies.DDPStrategy,
        "results_class": type("JointResults", (JointResults, results_class(name)), {"__module__": home}),
        "add_worker_init_fn": staticmethod(add_worker_init_fn(name)),
        "interactive": is_interactive(name),
        "is_oom_error": staticmethod(importlib.import_module(f"{root}.utilities.memory").is_oom_error),
    }
    strategy = ByCaller("CallbackStrategy", (CallbackStrategy, strategies.DDPStrategy), members)
    described = {"__module__": home, "__doc__": DDPCallback.__doc__}
    callback = type("DDPCallback", (DDPCallback, callbacks.Callback), described)
    members = {"__module__": home, "__doc__": Resume.__doc__, "homes": HOMES}
    resume = ByCaller("Resume", (Resume, callbacks.Callback), members)
    what = "gradients synchronized by callbacks, the module is not wrapped"
    for each in NAMES:
        strategies.StrategyRegistry.register(each, strategy.exactly, description=what, override=True)
    Replaced(tuner_module(name), CHECK_SEARCH, _check_search)
    return strategy, callback, resume


def _check_search(check: Callable[[Any], None], trainer: Any) -> None:
    """What the Tuner asks before it searches for a batch size; for other strategies the answer is Lightning's."""
    with undivided(trainer) if isinstance(trainer.strategy, CallbackStrategy) else nullcontext():
        check(trainer)


def _for_configs(init: Any, of_ddp: Any) -> FunctionType:
    """A copy of ``init`` with the types by which LightningCLI reads a YAML and makes objects of it.

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
