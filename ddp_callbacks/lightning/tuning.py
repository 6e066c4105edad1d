"""The search for a batch size: a trial that runs out of memory on one rank fails on all, which try the next together.

Lightning refuses to search under a strategy that is a ``DDPStrategy``, whose batch is that of each process. Here a
batch size has the same meaning on any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ddp_callbacks.comm.collectives import any_rank
from ddp_callbacks.errors import PeerError
from ddp_callbacks.lightning._lightning import active_loop, undivided
from ddp_callbacks.lightning.replacement import Replaced
from ddp_callbacks.process_group.failures import report_failure

_SEARCH = "scale_batch_size"  # of a BatchSizeFinder, by which it is known in either package
_END = "the end of a trial of a batch size"
_CAUSE = "why a trial of a batch size has failed"


class Anew(Protocol):
    """What the search asks the strategy."""

    world_size: int

    def is_oom_error(self, error: BaseException) -> bool:
        """Lightning's question, whether memory has run out."""

    def start_anew(self) -> None:
        """Go on after a failure, with the parameters and optimizers of rank 0. A collective."""


class BatchSizeSearch:
    """Lets the ``BatchSizeFinder`` of a Trainer, also that of ``Tuner.scale_batch_size``, search, until :meth:`close`.

    Args:
        trainer: After its callbacks are known, and before their ``setup``.
    """

    def __init__(self, trainer: Any, strategy: Anew) -> None:
        self._trainer, self._strategy = trainer, strategy
        self._callbacks: list[Any] = []  # of the Trainer, in whose place a trial has none
        self._replaced: list[Replaced] = []
        for callback in trainer.callbacks:
            if hasattr(callback, _SEARCH):
                self._replaced.append(Replaced(callback, "setup", self._setup))
                if strategy.world_size > 1:
                    self._replaced.append(Replaced(callback, _SEARCH, self._search))

    def close(self) -> None:
        """Give the callbacks their methods back."""
        for replaced in self._replaced:
            replaced.undo()

    def _setup(self, setup: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        with undivided(self._trainer):
            setup(*args, **kwargs)

    def _search(self, search: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._callbacks = self._trainer.callbacks
        loop = active_loop(self._trainer)
        self._trial = Replaced(loop, "run", self._run)
        try:
            search(*args, **kwargs)
        finally:
            self._trial.undo()

    def _run(self, run: Callable[[], Any]) -> Any:
        """One trial: it ends on all ranks, or fails on all. A collective."""
        try:
            result = run()
            any_rank(False, _END)
            return result
        except Exception as error:
            failure = error
            report_failure(error)
        self._start_anew()
        from_peer = isinstance(failure, PeerError)
        is_other = any_rank(not from_peer and not self._strategy.is_oom_error(failure), _CAUSE)
        if not from_peer:
            raise failure
        # Lightning knows a lack of memory by these words, which the text of another failure may hold, too.
        why = (
            "lack of memory (DefaultCPUAllocator: can't allocate memory)"
            if not is_other
            else "another reason than lack of memory"
        )
        raise PeerError(f"the trial of a batch size has failed on another rank for {why}") from failure

    def _start_anew(self) -> None:
        """With the user's callbacks, which are back in training."""
        self._trial.undo()
        self._trainer.callbacks, of_trial = self._callbacks, self._trainer.callbacks
        try:
            self._strategy.start_anew()
        finally:
            self._trainer.callbacks = of_trial
            self._trial = Replaced(active_loop(self._trainer), "run", self._run)
