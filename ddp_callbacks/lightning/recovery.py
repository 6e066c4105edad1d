"""Let a Trainer continue without processes that died."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ddp_callbacks.checkpoints.recovery import Recovery


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
            return call()
        return self._recovery.call(call, functools.partial(_let_go, trainer, trainer.state.stage))

    def kill(self, _: int) -> None:
        """Do nothing: the processes are not children of this one."""


def _let_go(trainer: Any, stage: Any) -> None:
    """Forget a run that has failed, as Lightning does after an exception, but call no hooks."""
    trainer._teardown()
    trainer.state.stage, trainer.should_stop = stage, False
