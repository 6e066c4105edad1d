"""The callback for a Trainer: when the Trainer is made, the callback chooses our strategy for it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec

from ddp_callbacks.auto import announce, is_auto, is_on
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.lightning import _parts
from ddp_callbacks.lightning.resume_fit import ResumeMixin
from ddp_callbacks.lightning.strategy import CallbackStrategyMixin
from ddp_callbacks.lightning.strategy_processes import NAMES

_Options = ParamSpec("_Options")
_Init = Callable[Concatenate[Any, _Options], None]
_Callbacks: Any = object  # stands for either package's class, which follows in the MRO


def _with_options_of(init: _Init[_Options]) -> Callable[[Callable[..., None]], _Init[_Options]]:
    """Decorate an ``__init__`` so that editors, type checkers and LightningCLI see the options of ``init``."""
    return functools.wraps(init)


class DDPCallbackMixin(_Callbacks):  # type: ignore[misc]
    """Makes a ``Callback`` of either package choose its strategy; see ``DDPCallback``."""

    package: str
    strategy_class: Callable[..., CallbackStrategyMixin]

    @_with_options_of(CallbackStrategyMixin.__init__)
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        self._options = args, options
        self.make_strategy()  # raises if an option is invalid

    def make_strategy(self) -> CallbackStrategyMixin:
        """Return a strategy for one Trainer, with these options."""
        args, options = self._options
        strategy = self.strategy_class(*args, **options)
        strategy.chosen_by = self
        return strategy

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check the Trainer at the beginning of ``fit``, ``validate``, ``test`` and ``predict``.

        Raises:
            ConfigurationError: The Trainer was made without this callback, or is one of the other package.
        """
        strategy = trainer.strategy
        if getattr(strategy, "chosen_by", None) is self:
            return
        _require_same_package(self, type(_parts.connector(trainer, "logger")))
        raise ConfigurationError(
            f"DDPCallback chooses the strategy when a Trainer is made; this one was made without it, and has "
            f"{type(strategy).__name__}: Trainer(callbacks=[DDPCallback()])."
        )


def let_callbacks_choose(trainer_class: Any) -> None:
    """Let every Trainer that is made with a ``DDPCallback`` from now on have the strategy of that callback."""
    make = trainer_class.__init__

    @functools.wraps(make)
    def init(trainer: Any, *args: Any, **options: Any) -> None:
        make(trainer, *args, **_with_strategy(trainer_class, options))
        for resume in (callback for callback in trainer.callbacks if isinstance(callback, ResumeMixin)):
            resume.setup(trainer, None, "fit")  # a run asks it only when loggers have opened their files

    trainer_class.__init__ = init


def _with_strategy(trainer_class: type, options: dict[str, Any]) -> dict[str, Any]:
    """Return a Trainer's arguments, with the strategy that a callback among them, or ``ddprun --auto``, chooses."""
    callbacks = options.get("callbacks")
    several = callbacks if isinstance(callbacks, Sequence) else [callbacks]
    chooses = next((callback for callback in several if isinstance(callback, DDPCallbackMixin)), None)
    strategy = options.get("strategy", os.environ.get("PL_TRAINER_STRATEGY", "auto"))
    if chooses is None:
        resumes = any(isinstance(callback, ResumeMixin) for callback in several)
        if strategy != "auto" or not (is_auto() or (is_on() and resumes)):
            return options
        announce("Trainer", f"strategy={NAMES[0]!r}")
        return options | {"strategy": NAMES[0]}
    _require_same_package(chooses, trainer_class)
    if strategy not in ("auto", *NAMES):
        name = repr(strategy) if isinstance(strategy, str) else type(strategy).__name__
        raise ConfigurationError(
            f"this Trainer has strategy={name}, and a DDPCallback, whose strategy is {NAMES[0]!r}. Leave out "
            "strategy=, and give the callback the options; or leave out the callback."
        )
    return options | {"strategy": chooses.make_strategy()}


def _require_same_package(callback: DDPCallbackMixin, lightning_class: type) -> None:
    """Raise :class:`ConfigurationError` unless a class of Lightning's belongs to the callback's package."""
    home = lightning_class.__module__.partition(".")[0]
    if home != callback.package:
        raise ConfigurationError(
            f"this Trainer is one of {home}, and this DDPCallback is for {callback.package}: import it from "
            f"ddp_callbacks.{home}."
        )
