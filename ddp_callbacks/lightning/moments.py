"""The moments of a fit at which it may be cut, and how it goes on from there.

==============  =======================================================  ==============================================
place           the fit was cut                                          hooks that are called again when it goes on
==============  =======================================================  ==============================================
``start``       in the sanity check                                      all, and the sanity check
``training``    behind a training batch, and what belongs to it:         those that open the run and the epoch
                a validation, schedulers, the loggers' row
``evaluation``  behind a batch of a validation                           and those that open the validation
``epoch``       between two epochs                                       those that open the run
==============  =======================================================  ==============================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from ddp_callbacks.lightning._lightning import (
    EVALUATION_STEP,
    SHOULD_VALIDATE,
    STORE_OUTPUTS,
    begin_pass,
    data_fetcher_of,
    end_loaders,
    first_of_epoch,
    go_on,
    is_next_of,
    loader_of,
    set_first_of_epoch,
    set_position,
)
from ddp_callbacks.lightning.replacement import Replaced

Place = Literal["start", "training", "evaluation", "epoch"]


class Moments:
    """Calls ``pass_moment`` at each moment of the fits of a Trainer, until :meth:`close`.

    Args:
        pass_moment: May raise, to end the fit there.

    Attributes:
        step: The arguments of the last step of a validation.
        first_of_epoch: What the logging knew of the training when the validation began.
    """

    def __init__(self, trainer: Any, pass_moment: Callable[[Place], None]) -> None:
        self._trainer = trainer
        self._pass_moment = pass_moment
        self.step: Sequence[Any] = ()
        self.first_of_epoch: bool | None = None
        loop = trainer.fit_loop
        self._replaced = [
            Replaced(loop.epoch_loop, "on_advance_end", self._end_training_batch),
            Replaced(loop.epoch_loop.val_loop, EVALUATION_STEP, self._evaluation_step),
            Replaced(loop, "on_advance_end", self._end_epoch),
        ]

    def close(self) -> None:
        """Give Lightning's objects back."""
        for replaced in self._replaced:
            replaced.undo()

    def _end_training_batch(self, end: Callable[[Any], None], data_fetcher: Any) -> None:
        self.first_of_epoch = first_of_epoch(self._trainer)
        end(data_fetcher)
        self._pass_moment("training")

    def _evaluation_step(self, step: Callable[..., None], *args: Any) -> None:
        step(*args)
        self.step = args
        self._pass_moment("start" if self._trainer.sanity_checking else "evaluation")

    def _end_epoch(self, end: Callable[[], None]) -> None:
        end()
        self._pass_moment("epoch")


class GoingOn:
    """Lets the next fit of a Trainer go on from a place.

    Args:
        cut: Where it was cut: ``place``, which is not the start, and ``training_position``, ``evaluation_position``
            ``first_of_epoch``, and ``loaders``.
        restore: Puts everything back.
        set_loader: Lets the next pass over a loader, given by stage and index, begin where it was cut.
    """

    def __init__(
        self, trainer: Any, cut: dict[str, Any], restore: Callable[[], None], set_loader: Callable[[str, int], None]
    ) -> None:
        self._trainer = trainer
        self._cut = cut
        self._restore = restore
        self._set_loader = set_loader
        self._has_begun = False
        self._replaced = [Replaced(trainer.fit_loop, "run", self._run)]

    def close(self) -> None:
        """Give Lightning's objects back."""
        for replaced in reversed(self._replaced):
            replaced.undo()

    def _run(self, run: Callable[[], None]) -> None:
        if self._has_begun:
            run()
            return
        self._has_begun = True
        within = self._cut["place"] != "epoch"
        if within:
            self._once(self._trainer.fit_loop.epoch_loop, "on_run_start", self._begin_epoch)
        go_on(self._trainer, within, self._restore)

    def _begin_epoch(self, begin: Callable[..., None], data_fetcher: Any) -> None:
        loop = self._trainer.fit_loop.epoch_loop
        begin_pass(loop, begin, data_fetcher)
        self._restore()
        combined, loaders = loader_of(self._trainer.fit_loop), self._cut["loaders"]["train"]
        set_position(data_fetcher, combined, self._cut["training_position"])
        end_loaders(combined, [index for index, state in enumerate(loaders) if state and state["pass"] is None])
        if self._cut["place"] == "evaluation":
            self._go_on_in_validation(loop, data_fetcher)

    def _go_on_in_validation(self, loop: Any, data_fetcher: Any) -> None:
        set_first_of_epoch(self._trainer, self._cut["first_of_epoch"])
        self._once(loop, SHOULD_VALIDATE, lambda *_: True)
        self._once(loop.val_loop, "reset", self._reset)
        self._once(loop.val_loop, "on_run_start", self._begin_validation)
        loop.on_advance_end(data_fetcher)

    def _reset(self, reset: Callable[[], None]) -> None:
        loop = self._trainer.fit_loop.epoch_loop.val_loop
        reset()
        position = self._cut["evaluation_position"]
        if position["drawing"]:
            self._set_loader("val", 0)  # whose pass has begun
        set_position(data_fetcher_of(loop), loader_of(loop), position)

    def _begin_validation(self, begin: Callable[[], None]) -> None:
        begin()
        loop, position = self._trainer.fit_loop.epoch_loop.val_loop, self._cut["evaluation_position"]
        self._restore()
        if position["loader"]:
            self._once(loop, STORE_OUTPUTS, lambda store: None if is_next_of(loop, position) else store())

    def _once(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Replace a method for its next call."""

        def call(method: Callable[..., Any], *args: Any) -> Any:
            replaced.undo()
            return function(method, *args)

        replaced = Replaced(owner, name, call)
        self._replaced.append(replaced)
