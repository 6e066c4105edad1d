"""The moments of a fit at which it may be cut, and how it goes on from there.

============  =====================================================  ===================================================
place         the fit was cut                                        hooks that are called again when it goes on
============  =====================================================  ===================================================
``training``  behind a training batch, before what follows it:       those that open the run and the epoch, and those of
              a validation, schedulers of a plateau; or in that      the validation
              validation
``epoch``     between two epochs                                     those that open the run
============  =====================================================  ===================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from ddp_callbacks.lightning import _parts, _progress
from ddp_callbacks.lightning.replacement import Replacements

Place = Literal["training", "epoch"]


class GoingOn:
    """Lets the next fit of a Trainer go on from a place.

    Lightning's loop runs as in a fit that begins, in the epoch that was cut or the one behind it, until it is about to
    train: then everything is put back, and it goes on from there. A fit that is over begins and ends once more, without
    an epoch: callbacks that put averaged weights in place do it in ``on_train_end``, behind the last file.

    Args:
        cut: Where it was cut: ``place``, ``validates``, ``training_position``, and ``loaders``.
        restore: Puts everything back.
        replacements: Of Lightning's methods.
    """

    def __init__(
        self, trainer: Any, cut: dict[str, Any], restore: Callable[[], None], replacements: Replacements
    ) -> None:
        self._trainer = trainer
        self._cut = cut
        self._restore = restore
        self._once = replacements.replace_once
        self._has_begun = False
        replacements.replace(trainer.fit_loop, "run", self._run)

    def _run(self, run: Callable[[], None]) -> None:
        if self._has_begun:
            run()
            return
        self._has_begun = True
        loop = self._trainer.fit_loop
        _progress.let_begin(loop)
        self._put_limits_back = _progress.lift_limits(loop)
        if self._cut["place"] == "epoch":
            self._once(loop, "on_run_start", self._begin_run)
        else:
            _progress.begin_epoch_again(loop)
            self._once(loop, "on_advance_start", self._begin_epoch)
            self._once(loop.epoch_loop, "on_run_start", self._begin_pass)
        run()

    def _begin_run(self, begin: Callable[[], None]) -> None:
        begin()
        self._put_back()

    def _begin_epoch(self, begin: Callable[[], None]) -> None:
        with Replacements() as muted:  # loggers have the rows of these hooks
            for logger in self._trainer.loggers:
                muted.replace(logger, "log_metrics", lambda *_, **__: None)
            begin()

    def _begin_pass(self, begin: Callable[..., None], data_fetcher: Any) -> None:
        begin(data_fetcher)
        self._put_back()
        combined, loaders = _parts.loader_of(self._trainer.fit_loop), self._cut["loaders"]["train"]
        _progress.set_position(data_fetcher, combined, self._cut["training_position"])
        _progress.end_loaders(
            combined, [index for index, state in enumerate(loaders) if state and state["pass"] is None]
        )
        loop = self._trainer.fit_loop.epoch_loop
        self._once(loop, _progress.SHOULD_VALIDATE, lambda *_: self._cut["validates"])
        loop.on_advance_end(data_fetcher)

    def _put_back(self) -> None:
        self._put_limits_back()
        self._restore()
