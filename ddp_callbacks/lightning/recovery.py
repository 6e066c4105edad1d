"""Let a Trainer continue without processes that died."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ddp_callbacks.checkpoints.recovery import Recovery
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
    """What a call of a Trainer begins with, and begins with again."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._stage = trainer, trainer.state.stage
        self._places = trainer.strategy.places  # at the end of the call before
        trainer.strategy.places = ()
        self._modes = [(part, part.training) for part in trainer.lightning_module.modules()]

    def begin_again(self) -> None:
        """Forget a run that has failed, as Lightning does after an exception, but call no hooks."""
        trainer = self._trainer
        _parts.tear_down(trainer)
        _logged.put_results_back(trainer)  # a single process has nobody to join the values with
        trainer.state.stage, trainer.should_stop = self._stage, False
        for part, training in self._modes:
            part.training = training

    def follow(self) -> None:
        """Take the new rank, and let the loggers log to where rank 0's did."""
        trainer = self._trainer
        trainer.strategy.set_world_ranks()  # the loggers ask which rank this is
        trainer.strategy.follow_places(trainer.strategy.places or self._places)
