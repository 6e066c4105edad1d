"""Decisions that one rank may make alone, and that all act on in the same step: stops, signals, time limits."""

from __future__ import annotations

import itertools
import math
import signal
import time
from collections.abc import Sequence
from typing import Any

from ddp_callbacks.comm.collectives import all_gather_object
from ddp_callbacks.gradients import GradientSynchronizer
from ddp_callbacks.lightning import _parts
from ddp_callbacks.lightning.replacement import Replacements
from ddp_callbacks.process_group.votes import abstain, is_unanimous

NONE = (False,) * 4
"""Flags, none of which is raised."""

ROOM = 1 + len(NONE)  # numbers that a rank sends with the gradients: whether its step is skipped, and flags
_OF_STEP = "the decisions of a step"


class Decisions:
    """The decisions of one run of a Trainer. The ranks exchange them in each batch, as flags.

    In a training step, the ranks send the flags with the gradients if a backward comes next.

    A hook after the step decides too late for that. If all ranks decide to stop there, they stop at once, as one
    process does. If only some do, the ranks exchange that in the next batch.

    Lightning communicates in signal handlers, whatever the other ranks are doing, and asks each rank's own clock
    whether to validate (``val_check_interval={"minutes": 5}``). Here a rank only notes these, and tells the others.
    """

    def __init__(self, trainer: Any, replacements: Replacements) -> None:
        self._trainer = trainer
        self._carrier: GradientSynchronizer | None = None  # the engine that is sending flags
        self._rows: list[list[float]] = []  # received in this step
        self._sigterm = False
        self._requeue: int | None = None  # the signal that asked for it
        self._validated = math.inf  # time of the last validation, by this rank's clock
        self.held: Sequence[bool] = ()
        connector = _parts.connector(trainer, "signal")
        # Lightning broadcasts from inside the handler of SIGTERM, and before each batch, and waits without a limit.
        replacements.replace(trainer.fit_loop.epoch_loop, _parts.BROADCAST_SIGTERM, lambda _: None)
        replacements.replace(connector, _parts.HANDLE_SIGTERM, lambda _, *args: self._note_sigterm())
        replacements.replace(connector, _parts.HANDLE_REQUEUE, lambda _, *args: self._note_requeue(*args))
        replacements.callback(self._put_clock_back)

    def _put_clock_back(self) -> None:
        if self._interval is not None:
            _parts.set_last_validation(self._trainer, self._validated)

    def flags(self) -> list[bool]:
        """Return this rank's flags: stop (a hook may have set it on this rank alone), SIGTERM, requeue, validate."""
        own = [self._trainer.should_stop, self._sigterm, self._requeue is not None, self._is_time_to_validate()]
        return [flag or held for flag, held in itertools.zip_longest(own, self.held, fillvalue=False)]

    def send(self, is_skipped: bool, carrier: GradientSynchronizer | None) -> None:
        """Send this rank's decisions in a training step to the other ranks. A collective if there is no carrier.

        Args:
            is_skipped: Whether ``training_step`` has returned ``None``.
            carrier: The engine of the backward that comes next on every rank; ``None`` if none comes.
        """
        self.take()
        row = [*map(float, (is_skipped, *self.flags()))]
        if carrier is None:
            self._rows = all_gather_object(row, _OF_STEP)
        else:
            carrier.carry(row)
            self._carrier = carrier

    def take(self) -> None:
        """Take the decisions that came with the gradients. Local."""
        if self._carrier is not None:
            self._rows, self._carrier = self._carrier.carried, None

    def skipped_by(self) -> list[bool]:
        """Return, for each rank, whether its ``training_step`` has returned ``None``."""
        self.take()
        return [bool(row[0]) for row in self._rows]

    def end_training_batch(self) -> None:
        """Act on the decisions that the ranks exchanged in this batch. All ranks must call it."""
        self.take()
        stop, *others = _raised(self._rows)[1:] or NONE
        self._rows = []
        if stop or not self._trainer.should_stop:
            abstain()
        else:
            stop = is_unanimous("the decision to stop")
        self.act([stop, *others])

    def end_evaluation_batch(self, flag: bool) -> bool:
        """After a batch of an evaluation, exchange and act; return whether any rank raised ``flag``. A collective."""
        found, *flags = _raised(all_gather_object([*map(float, (flag, *self.flags()))], _OF_STEP))
        self.act(flags)
        return found

    def agree(self) -> None:
        """Outside of batches, let all ranks act on what any of them has decided. A collective."""
        self.act(_raised(all_gather_object(self.flags(), "the decision to stop")))

    def act(self, flags: Sequence[bool]) -> None:
        """Act on the flags that the ranks have agreed on. A collective; every rank passes the same flags.

        A decision of this rank alone is kept until the others know of it: if this rank acted on it now, they would
        wait for it in vain.
        """
        self.held = [own and not agreed for own, agreed in zip(self.flags(), flags, strict=True)]
        stop, sigterm, has_to_requeue, validate = flags
        self._trainer.should_stop, _parts.connector(self._trainer, "signal").received_sigterm = stop, sigterm
        if self._interval is not None and self._trainer.training:
            # Lightning compares this time with its clock, so its answer is now the agreed one at any moment.
            _parts.set_last_validation(self._trainer, -math.inf if validate else math.inf)
        if has_to_requeue:
            number, self._requeue = self._requeue or signal.SIGUSR1, None
            _parts.requeue(self._trainer, number)

    @property
    def _interval(self) -> Any:
        """Seconds between validations, if time decides when to validate; otherwise ``None``."""
        return _parts.validation_interval(self._trainer)

    def _is_time_to_validate(self) -> bool:
        trainer = self._trainer
        if self._interval is None or not trainer.training:
            return False
        if math.isfinite(_parts.last_validation(trainer)):  # Lightning has noted a validation, or the start
            self._validated = _parts.last_validation(trainer)
        return bool(time.monotonic() - self._validated >= self._interval)

    def _note_sigterm(self) -> None:
        """Handle SIGTERM: pass it to child processes, and note it. All ranks learn of it at the end of the batch."""
        launcher = self._trainer.strategy.launcher
        if not self._sigterm and launcher is not None:
            launcher.kill(signal.SIGTERM)
        self._sigterm = True

    def _note_requeue(self, number: int, *_: Any) -> None:
        """Handle Slurm's warning: note it. Lightning then saves a checkpoint and requeues, which needs all ranks."""
        self._requeue = number


def _raised(rows: Sequence[Sequence[float]]) -> list[bool]:
    """Return, for each flag, whether any rank has raised it."""
    return [any(column) for column in zip(*rows, strict=True)]
