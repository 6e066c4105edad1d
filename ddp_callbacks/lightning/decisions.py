"""What one rank alone may know, and all have to act on in the same step: to stop, signals, that time is up."""

from __future__ import annotations

import itertools
import math
import signal
import time
from collections.abc import Sequence
from typing import Any

from ddp_callbacks.comm.scalars import ScalarExchange
from ddp_callbacks.gradients import GradientSynchronizer
from ddp_callbacks.lightning import _parts
from ddp_callbacks.lightning.replacement import Replacements
from ddp_callbacks.process_group.votes import abstain, is_unanimous

NONE = (False,) * 4
"""No flag is raised."""

ROOM = 1 + len(NONE)  # numbers of a rank that travel with the gradients: whether its step is skipped, and flags
_OF_STEP = "the decisions of a step"


class Decisions:
    """The decisions of one run of a Trainer; the ranks exchange them in each batch, as flags.

    In a training step they travel with the gradients, where a backward comes next.

    What hooks decide behind the step comes too late for that. To stop at once, as one process does, all ranks must have
    decided it; what some have decided is exchanged in the next batch.

    Lightning communicates in handlers of signals, where the other ranks are anywhere, and asks each rank's own clock
    whether to validate (``val_check_interval={"minutes": 5}``). Here a rank only notes such a thing.
    """

    def __init__(self, trainer: Any, exchange: ScalarExchange, replacements: Replacements) -> None:
        self._trainer = trainer
        self._exchange = exchange
        self._carrier: GradientSynchronizer | None = None  # of what is on its way
        self._rows: list[list[float]] = []  # that came in this step
        self._sigterm = False
        self._requeue: int | None = None  # the signal that has asked for it
        self._validated = math.inf  # when, by this rank's clock
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
        """This rank's: to stop, as a hook may have set here alone; SIGTERM; to requeue; time to validate."""
        own = [self._trainer.should_stop, self._sigterm, self._requeue is not None, self._is_time_to_validate()]
        return [flag or held for flag, held in itertools.zip_longest(own, self.held, fillvalue=False)]

    def send(self, is_skipped: bool, carrier: GradientSynchronizer | None) -> None:
        """Tell the others of this step. A collective if there is no carrier.

        Args:
            is_skipped: Whether ``training_step`` has returned nothing.
            carrier: Of the backward that comes next on every rank.
        """
        self.take()
        row = [*map(float, (is_skipped, *self.flags()))]
        if carrier is None:
            self._rows = self._exchange.exchange(row, _OF_STEP)
        else:
            carrier.carry(row)
            self._carrier = carrier

    def take(self) -> None:
        """Take what has come with the gradients. Local."""
        if self._carrier is not None:
            self._rows, self._carrier = self._carrier.carried, None

    def skipped_by(self) -> list[bool]:
        """For each rank, whether its ``training_step`` has returned nothing."""
        self.take()
        return [bool(row[0]) for row in self._rows]

    def end_training_batch(self) -> None:
        """Act on what the ranks have told each other in this batch. All ranks must call it."""
        self.take()
        stop, *others = _raised(self._rows)[1:] or NONE
        self._rows = []
        if stop or not self._trainer.should_stop:
            abstain()
        else:
            stop = is_unanimous("the decision to stop")
        self.act([stop, *others])

    def end_evaluation_batch(self, flag: bool) -> bool:
        """The same behind a batch of an evaluation; whether any rank has raised another flag. A collective."""
        found, *flags = _raised(self._exchange.exchange([*map(float, (flag, *self.flags()))], _OF_STEP))
        self.act(flags)
        return found

    def agree(self) -> None:
        """All ranks act on what any of them has decided beside a batch. A collective."""
        self.act(_raised(self._exchange.exchange([*map(float, self.flags())], "the decision to stop")))

    def act(self, flags: Sequence[bool]) -> None:
        """Act on what the ranks have agreed upon. Every rank calls it with the same; a collective.

        What only this rank has decided is kept until the others have heard of it: one that acted by itself would leave
        them waiting.
        """
        self.held = [own and not agreed for own, agreed in zip(self.flags(), flags, strict=True)]
        stop, sigterm, has_to_requeue, validate = flags
        self._trainer.should_stop, _parts.connector(self._trainer, "signal").received_sigterm = stop, sigterm
        if self._interval is not None and self._trainer.training:
            # Lightning compares this with its clock: at any moment the answer is the one that was agreed upon.
            _parts.set_last_validation(self._trainer, -math.inf if validate else math.inf)
        if has_to_requeue:
            number, self._requeue = self._requeue or signal.SIGUSR1, None
            _parts.requeue(self._trainer, number)

    @property
    def _interval(self) -> Any:
        """Between validations, in seconds, if it is time that decides."""
        return _parts.validation_interval(self._trainer)

    def _is_time_to_validate(self) -> bool:
        trainer = self._trainer
        if self._interval is None or not trainer.training:
            return False
        if math.isfinite(_parts.last_validation(trainer)):  # Lightning has noted a validation, or the start
            self._validated = _parts.last_validation(trainer)
        return bool(time.monotonic() - self._validated >= self._interval)

    def _note_sigterm(self) -> None:
        """The handler of the signal: all ranks hear of it at the end of the batch."""
        launcher = self._trainer.strategy.launcher
        if not self._sigterm and launcher is not None:
            launcher.kill(signal.SIGTERM)
        self._sigterm = True

    def _note_requeue(self, number: int, *_: Any) -> None:
        """The handler of Slurm's warning: Lightning saves a checkpoint and requeues, which takes all ranks."""
        self._requeue = number


def _raised(rows: Sequence[Sequence[float]]) -> list[bool]:
    """The flags that any rank has raised."""
    return [any(column) for column in zip(*rows, strict=True)]
