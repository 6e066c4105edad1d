"""The random numbers of a loop's body: those that one process would draw for the batch.

A body draws for the batch that was drawn last. A loop inside of another one, such as a validation, has its own batches;
after it, the body of the outer loop draws on for its batch. Loading draws outside of every body.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from ddp_callbacks.comm.collectives import all_gather_object
from ddp_callbacks.data.loop_variables import Loop, LoopVariables
from ddp_callbacks.data.random_state import RunRandomState
from ddp_callbacks.data.shares import Share
from ddp_callbacks.lightning.fabric.loss_batches import Pass
from ddp_callbacks.process_group import get_rank
from ddp_callbacks.randomness import Rows, WholeDraws

_END = object()


class LoopDraws:
    """Lets the bodies of loops over divided loaders draw for the whole batch. All ranks have one random state."""

    def __init__(self) -> None:
        self._state, self._variables = RunRandomState(), LoopVariables()
        self._loops = WeakKeyDictionary[Pass, Loop]()
        self._bodies: dict[Pass, _Body] = {}  # that of the batch drawn last comes last
        self._of_cut: dict[str, float] = {}  # what passes have changed that their loops have left

    def loading(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield ``batches``, which are loaded outside of bodies."""
        iterator = iter(batches)
        while True:
            with self._outside():
                batch = next(iterator, _END)
            if batch is _END:
                return
            yield batch

    def begin(self, running: Pass, draws: WholeDraws, share: Share) -> None:
        """Begin the body of a batch. Local."""
        if running in self._loops:
            self._loops[running].note(share.local)
        self._pause()
        for body in self._bodies.values():
            body.is_alone = False
        self._bodies[running] = _Body(draws, share.rows)

    def end(self, running: Pass) -> None:
        """End the body of the last batch of a pass, if it has not ended, and those that began inside. Local."""
        while running in self._bodies:
            _, body = self._bodies.popitem()
            body.end()
        self._resume()

    def begin_pass(self, running: Pass) -> None:
        """Continue on all ranks from rank 0's random state. A collective."""
        with self._outside():
            self._state.synchronize()
            self._loops[running] = Loop()

    def end_pass(self, running: Pass, draws: WholeDraws) -> None:
        """Like :meth:`begin_pass`, after a pass whose bodies had ``draws``; warn of what is not of the whole batch."""
        with self._outside():
            self._state.draws = draws
            changed, has_padded = self._end_loop(running)
            own = [self._state.report(), self._of_cut | changed, has_padded]
            self._of_cut = {}
            reports, sums, padded = zip(*all_gather_object(own, "the random state"), strict=True)
            self._state.take(reports)
        draws.warn()
        self._variables.warn(sums, get_rank())
        if get_rank() == 0:
            self._variables.warn_of_padding([rank for rank, pads in enumerate(padded) if pads])

    def cut_pass(self, running: Pass) -> None:
        """Warn, on rank 0, of what a pass that its loop leaves has counted. Local: other ranks may be elsewhere.

        The next :meth:`end_pass` compares what else it has changed.
        """
        if running in self._loops:
            changed, _ = self._end_loop(running)
            counts = {name: number for name, number in changed.items() if math.isnan(number)}
            self._variables.warn([counts, counts], get_rank())
            self._of_cut |= changed

    def _end_loop(self, running: Pass) -> tuple[dict[str, float], bool]:
        """Return what the loop has changed; see :meth:`.LoopVariables.sums`."""
        loop = self._loops.pop(running)
        if loop.reads_sizes and running.draws and not running.is_computed:
            running.skipped.note_loop(running.draws[0].share)
        return self._variables.sums(loop)

    @contextmanager
    def _outside(self) -> Iterator[None]:
        self._pause()
        try:
            yield
        finally:
            self._resume()

    def _pause(self) -> None:
        if self._bodies:
            [*self._bodies.values()][-1].pause()

    def _resume(self) -> None:
        if self._bodies:
            [*self._bodies.values()][-1].resume()


class _Body:
    """A loop's body, from a batch to the next one. It may be left and entered again in between.

    Attributes:
        is_alone: Whether no other body has begun inside, which may have drawn what this one draws at other times.
    """

    def __init__(self, draws: WholeDraws, rows: Rows | None) -> None:
        self.is_alone = True
        self._draws, self._inside, self._aside = draws, ExitStack(), ExitStack()
        self._inside.enter_context(draws.forward(rows))

    def pause(self) -> None:
        self._aside.enter_context(self._draws.aside())

    def resume(self) -> None:
        self._aside.close()

    def end(self) -> None:
        self._aside.close()
        self._inside.close()
        if not self.is_alone:
            self._draws.forget_way()
