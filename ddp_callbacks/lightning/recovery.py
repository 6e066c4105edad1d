"""Let a Trainer continue without processes that died."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ddp_callbacks.checkpoints.recovery import Recovery
from ddp_callbacks.lightning import _logged, _parts, loggers
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
        return self._recovery.call(call, _Begin(trainer, self._recovery).put_back)

    def kill(self, _: int) -> None:
        """Do nothing: the processes are not children of this one."""


class _Begin:
    """What a call of a Trainer begins with, and begins with again."""

    def __init__(self, trainer: Any, recovery: Recovery) -> None:
        self._trainer, self._recovery, self._stage = trainer, recovery, trainer.state.stage
        self._modes = [(part, part.training) for part in trainer.lightning_module.modules()]

    def put_back(self) -> None:
        """Forget a run that has failed, as Lightning does after an exception, but call no hooks."""
        trainer = self._trainer
        places = trainer.strategy.places  # before the teardown
        _parts.tear_down(trainer)
        _logged.put_results_back(trainer)  # a single process has nobody to join the values with
        trainer.state.stage, trainer.should_stop = self._stage, False
        for part, training in self._modes:
            part.training = training
        trainer.strategy.set_world_ranks()  # the loggers ask which rank this is
        loggers.follow(trainer.loggers, places)
        if not self._recovery.has_copy:  # which knows later places
            loggers.go_on(trainer.loggers, places)
