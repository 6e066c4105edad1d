"""The part of the strategy that lets a fit go on in the middle: what the ranks' engines have for themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ddp_callbacks.checkpoints.resume import ResumeOptions
from ddp_callbacks.data.random_state import RunRandomState
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.lightning.resume import Fit

if TYPE_CHECKING:
    from ddp_callbacks.gradients import GradientSynchronizer
    from ddp_callbacks.lightning.local_steps import LocalSteps
    from ddp_callbacks.lightning.run import Run

_SEARCHES = ("BatchSizeFinder", "LearningRateFinder")  # of either package; the Tuner's, too


class ResumableMixin:
    """Mixed into the strategy.

    Attributes:
        resume: The fit, if the Trainer has the callback ``Resume``.
    """

    resume: Fit | None = None
    _run: Run | None
    _local: LocalSteps | None
    _synchronizer: GradientSynchronizer | None

    def begin_resuming(self, trainer: Any) -> None:
        """The processes have met: a callback ``Resume`` of a fit reads its file. A collective if there is one.

        Raises:
            ConfigurationError: There are several, or a search for a batch size or a learning rate.
        """
        found = [callback for callback in trainer.callbacks if isinstance(callback, ResumeOptions)]
        if len(found) > 1:
            raise ConfigurationError(f"a Trainer takes one callback Resume, got {len(found)}. Remove the others.")
        if not found or trainer.state.fn != "fit" or trainer.fast_dev_run:
            return
        for callback in trainer.callbacks:
            if type(callback).__name__ in _SEARCHES:
                raise ConfigurationError(
                    f"Resume cannot tell the trials of {type(callback).__name__} from the fit. Search in a Trainer "
                    "without Resume, and give what it finds to this one."
                )
        self.resume = Fit(trainer, found[0])
        self.resume.begin()

    @property
    def takes_local_steps(self) -> bool:
        """Whether the parameters of the ranks may differ between two batches."""
        return self._local is not None

    @property
    def random_state(self) -> RunRandomState | None:
        """Of the run; ``None`` with a single process."""
        return None if self._run is None else self._run.drawing.random_state

    def own_state(self) -> dict[str, Any]:
        """This rank's, between two batches. Local."""
        run = {"trained": 1, "held": []} if self._run is None else self._run.state_dict()
        engine = None if self._synchronizer is None else self._synchronizer.state_dict()
        return run | {"engine": engine, "local_steps": None if self._local is None else self._local.state_dict()}

    def load_own_state(self, states: Sequence[dict[str, Any]], are_as_many: bool) -> None:
        """Inverse of :meth:`own_state`. Local.

        Args:
            states: Of all ranks that took them; if there were as many as now, only this rank's is looked at.
            are_as_many: Whether there were.
        """
        own = states[0]
        if self._run is not None:
            self._run.load_state_dict(own, are_as_many)
        if self._synchronizer is not None and own["engine"] is not None:
            self._synchronizer.load_state_dict([state["engine"] for state in states])
        if are_as_many and self._local is not None and own["local_steps"] is not None:
            self._local.load_state_dict(own["local_steps"])

    def end_resuming(self) -> None:
        """The run has ended, well or not."""
        fit, self.resume = self.resume, None
        if fit is not None:
            fit.end()
