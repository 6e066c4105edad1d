"""Let a Trainer continue without processes that died."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ddp_callbacks.checkpoints.recovery import Recovery
from ddp_callbacks.data.attributes import decode, encode, plain_attributes
from ddp_callbacks.lightning import _logged, _parts
from ddp_callbacks.process_group.survivors import note_call


class RecoveringLauncher:
    """A launcher of Lightning for processes that are there: it calls the function, again if other processes have died.

    Lightning calls each entry point of a Trainer through the launcher of its strategy.
    """

    is_interactive_compatible = True

    def __init__(self, recovery: Recovery) -> None:
        self._recovery = recovery

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any, **kwargs: Any) -> Any:
        """Call a function of the Trainer on this process. A collective."""
        call = functools.partial(function, *args, **kwargs)
        if trainer.fast_dev_run:  # nobody keeps the state of such a run
            note_call()
            return call()

        def call_and_note() -> Any:
            result = call()
            trainer.strategy.note_places()
            return result

        return self._recovery.call(call_and_note, _Begin(trainer))

    def kill(self, _: int) -> None:
        """Do nothing: the processes are not children of this one."""


class _Begin:
    """What a call of a Trainer begins with, and begins with again.

    Lightning's callbacks change themselves and the Trainer in a fit, and find neither changed in a program that starts
    again. A callback of the user's own keeps what it has.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._stage = trainer, trainer.state.stage
        self._places = trainer.strategy.places  # at the end of the call before
        trainer.strategy.places = ()
        module = trainer.lightning_module
        self._modes = [(part, part.training) for part in module.modules()]
        self._dtypes = [(each, each.dtype) for each in [*module.parameters(), *module.buffers()]]
        self._settings = [(owner, _settings_of(owner)) for owner in (trainer, trainer.fit_loop)]
        package = trainer.strategy.package
        own = [each for each in trainer.callbacks if _parts.is_lightnings_callback(package, each)]
        self._callbacks = [(each, dict(vars(each)), encode(plain_attributes(each))) for each in own]

    def begin_again(self) -> None:
        """Forget a run that has failed, as Lightning does after an exception, but call no hooks."""
        trainer = self._trainer
        _parts.tear_down(trainer)
        _logged.put_results_back(trainer)  # a single process has nobody to join the values with
        for owner, before in self._settings:
            vars(owner).update(before)
        trainer.state.stage, trainer.should_stop = self._stage, False
        for part, training in self._modes:
            part.training = training
        for tensor, dtype in self._dtypes:
            tensor.data = tensor.data.to(dtype)
        for callback, attributes, plain in self._callbacks:
            vars(callback).clear()
            vars(callback).update(attributes | decode(plain, trainer.strategy.root_device))

    def follow(self) -> None:
        """Take the new rank, and let the loggers log to where rank 0's did."""
        trainer = self._trainer
        trainer.strategy.set_world_ranks()  # the loggers ask which rank this is
        trainer.strategy.follow_places(trainer.strategy.places or self._places)


def _settings_of(owner: object) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if isinstance(value, bool | int | float | str | None)}
