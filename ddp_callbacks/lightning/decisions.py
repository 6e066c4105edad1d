"""Decisions that one rank may make alone, and that all act on at the same moment: stops, signals, time limits."""

from __future__ import annotations

import math
import signal
import time
from typing import Any, Literal, TypeAlias

from ddp_callbacks.lightning import _parts
from ddp_callbacks.lightning.packages import require
from ddp_callbacks.process_group import resolve_group
from ddp_callbacks.process_group.moments import Agreement, tell_lone_decision
from ddp_callbacks.process_group.presence import presence
from ddp_callbacks.replacement import Replacements

Wish: TypeAlias = Literal["requeue", "sigterm", "stop", "validate"]
"""To end by SIGTERM, to requeue the job, to turn ``trainer.should_stop`` on or off, or to validate by time."""


_STOPS = (
    "set trainer.should_stop, the other processes did not: all stop at step {step}. If it was for a loss or a metric "
    "of this process's part of the data, log it (self.log) and decide by trainer.callback_metrics."
)


class Decisions:
    """The decisions of one run of a Trainer. The ranks act on them at the ends of batches and epochs.

    If all ranks decide to stop after one batch, they stop there, as one process does. If only some do, all stop after
    the next one; at the end of an epoch, there. What a rank has decided has no effect before: it would wait for the
    others.

    Lightning communicates in signal handlers, whatever the other ranks are doing, and asks each rank's own clock
    whether to validate (``val_check_interval={"minutes": 5}``). Here a rank only notes these, and asks the others.

    Attributes:
        wishes: What this rank wants, until all ranks act on it.
    """

    def __init__(self, trainer: Any, replacements: Replacements) -> None:
        self._trainer = trainer
        self._run, self._agreements = presence().run, 0
        self._agreement = self._next_agreement()
        self.wishes: set[Wish] = set()
        self._stops = False  # whether the ranks have agreed to stop
        self._warning: int = signal.SIGUSR1  # the signal that asked for a requeue
        self._interval = _parts.validation_interval(trainer)  # seconds, if time decides when to validate
        if self._interval is not None:
            replacements.set(trainer, _parts.VALIDATION_INTERVAL, math.inf)  # never, until the ranks agree
        connector = _parts.connector(trainer, "signal")
        # Lightning broadcasts from inside the handler of SIGTERM, and before each batch, and waits without a limit.
        replacements.replace(trainer.fit_loop.epoch_loop, _parts.BROADCAST_SIGTERM, lambda _: None)
        replacements.replace(connector, _parts.HANDLE_SIGTERM, lambda _, *args: self._wish("sigterm"))
        if _parts.requeues(trainer):
            require(trainer.strategy.package, _parts.PRIVATE_OF_REQUEUES)
            replacements.replace(connector, _parts.HANDLE_REQUEUE, lambda _, *args: self._note_requeue(*args))
        replacements.callback(lambda: self._agreement.close())

    def pass_moment(self, *, is_asked: bool = False) -> None:
        """Act on what any rank wants, if no rank has passed this moment. All ranks must call it at the same moments.

        Sends nothing, and costs microseconds, unless a rank wants something. Acting may be a collective.

        Args:
            is_asked: Whether any rank has asked before this moment. If all ranks know, they act at this one.
        """
        self.ask()
        if is_asked:
            self._agreement.hold()
        while wish := self._agreement.pass_moment():
            asked, self._agreement = self._agreement.asked, self._next_agreement()
            self.wishes.discard(wish)
            self._act(wish)
            if wish == "stop" and self._stops:
                tell_lone_decision(asked, _STOPS.format(step=self._trainer.global_step))
            self.ask()

    def ask(self) -> bool:
        """Ask all ranks for what this one wants, and return whether it wants something. Local."""
        trainer = self._trainer
        if bool(trainer.should_stop) != self._stops:
            self.wishes.add("stop")
            trainer.should_stop = self._stops
        if self._is_time_to_validate():
            self.wishes.add("validate")
        if self.wishes:
            self._agreement.ask_now(min([*self.wishes]))
        return bool(self.wishes)

    def _next_agreement(self) -> Agreement:
        self._agreements += 1
        return Agreement(f"decision {self._agreements} of run {self._run}", resolve_group(None))

    def _act(self, wish: str) -> None:
        trainer = self._trainer
        if wish == "stop":
            self._stops = trainer.should_stop = not self._stops
        elif wish == "validate":
            _parts.set_last_validation(trainer, -math.inf)
        elif wish == "sigterm":
            _parts.connector(trainer, "signal").received_sigterm = True
        else:
            _parts.requeue(trainer, self._warning)

    def _is_time_to_validate(self) -> bool:
        """Whether the time has come by this rank's clock."""
        if self._interval is None or not self._trainer.training:
            return False
        last = _parts.last_validation(self._trainer)
        return bool(last > -math.inf and time.monotonic() - last >= self._interval)

    # --- in signal handlers -------------------------------------------------------------------------------------------

    def _note_requeue(self, number: int, *_: Any) -> None:
        """At Slurm's warning, ask all ranks to save a checkpoint and requeue, as Lightning does."""
        self._warning = number
        self._wish("requeue")

    def _wish(self, wish: Wish) -> None:
        self.wishes.add(wish)
        self._agreement.ask(wish)
