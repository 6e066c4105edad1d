"""The batches of a run, and how each draws its random numbers.

===========  =============================================  ===========================================================
way          when                                           what a batch costs
===========  =============================================  ===========================================================
``whole``    the first batch; from the first draw on        about a microsecond per call, more for a call that draws
``none``     the first batch drew nothing                   a comparison of the random state
``by_rank``  something drew that no mode sees, or on wish   setting the random state
===========  =============================================  ===========================================================

Batches with and without gradients have a way each, and so has each stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn

from ddp_callbacks.errors import ConfigurationError, warn
from ddp_callbacks.randomness.generators import (
    are_equal,
    default_generators,
    draw_seed,
    drawing_by_rank,
    drawing_from,
    states_of,
)
from ddp_callbacks.randomness.modes import DrawingCalls, DrawingOperators
from ddp_callbacks.randomness.rows import Rows

Way = Literal["whole", "none", "by_rank"]

_SHOWN = 4  # reasons in one warning
_OF_SAMPLES = "step", "sample", "transfer", "before transfer"  # stages in which what is drawn is for samples

_UNSEEN = "compiled code, or code that is not Python, draws random numbers, or code sets a seed"
_RECOMPUTES = (
    "torch.utils.checkpoint computes forward, and draws its random numbers, again in backward. Call backward inside of "
    "the same context as forward."
)
_OTHERWISE = (
    "when, how often or how much it draws depends on the samples of a process: draw for all samples in each batch, "
    "then take those that you need, and let no other size be that of a part"
)
_PARTED = (
    "rank {} has drawn another amount than rank 0{} in a pass: code draws on one rank only, for each sample, "
    "depending on values, or for batches of several loaders, whose sizes differ"
)
_PADDED = (
    "rank {} has drawn another amount than rank 0 in a pass: {} draws for a size that changes from batch to batch, as "
    "if collate_fn pads each part to its own longest sample; pad all to one length"
)
_OUTSIDE = "code of the loop draws outside of `with draws.batch(share.rows)`: let it draw inside"
_LOADING = (
    "the loop's sampler, loader or iterable data set draws from torch's global generator, and the batches do, too: "
    "give it a generator of its own"
)
OTHER_ROWS = "a step joins loaders whose batches have different sizes, so each process draws its own numbers in it"
PREDICTED = (
    "a prediction draws: each process computes whole batches, and draws its own numbers. If they must be those of one "
    "process, predict on one"
)
_LATE = (
    "in the first batch that drew, in an epoch that had begun without draws, all processes drew the same: begin to "
    "draw with an epoch"
)


class WholeDraws:
    """Lets the computation of each batch draw the random numbers that one process would draw.

    All ranks must have the same random state before, and have the same one afterwards. It communicates nothing. In your
    own loop, pass it to :func:`ddp_callbacks.with_shares`, which gives all ranks rank 0's state in each pass::

        draws = WholeDraws(model)
        for (x, y), share in with_shares(loader, draws):
            synchronizer.weigh(share.local, share.total)
            with draws.batch(share.rows):
                criterion(model(x), y).backward()

    Args:
        module: The model, for the names of its layers.
        rank: This process's rank; ``None``: the one that it has in the default group at the time.
        by_rank: Let each rank draw its own numbers instead.

    Attributes:
        refused: Why a layer drew by rank in the last comparison, by its name.
        has_skipped: Whether this rank has left out a batch of which it has no sample, since the last report.
    """

    def __init__(self, module: nn.Module, rank: int | None = None, by_rank: bool = False) -> None:
        self._rank = rank
        self._states: list[torch.Tensor] | None = None  # of all ranks, in batches
        self._operators = DrawingOperators(module, rank)
        self._calls = DrawingCalls(self._operators)
        self._always: Way | None = "by_rank" if by_rank else None
        self._ways: dict[tuple[str, bool], Way] = {}  # by stage, and whether there are gradients
        self._was_by_rank = False  # in any batch
        self._has_drawn_apart = False  # since note_apart
        self._has_whole = False  # whether some batch of this pass was whole here, so that nothing has seen its draws
        self._before: list[torch.Tensor] | None = None  # the states to compare with at the end of the batch
        self._by_program: set[str] = set()
        self.refused: dict[str, str] = {}
        self._counts: tuple[Mapping[str, int], Mapping[str, int]] = ({}, {})  # of draws, in the last two comparisons
        self.has_skipped = False
        self._of_ranks: dict[str, str] = {}  # why a layer's draws may not be those of one process, on any rank
        self._is_compared = False
        self._told: set[str] = set()

    def accept(self, states: list[torch.Tensor]) -> None:
        """Draw in the batches that follow from these states of the default generators. Local; every rank calls it."""
        self._states = states
        self._look_again()

    @contextmanager
    def batch(self, rows: Rows | None, stage: str = "step") -> Iterator[None]:
        """Inside, all draws are for the whole batch, of which this rank keeps its rows.

        Run forward and loss inside. Run backward inside as well if it computes forward again, as checkpointing does.

        Args:
            rows: This rank's part of the batch. ``None``: unknown; each rank then draws its own numbers.
            stage: A name for what is done with the batch. What draws in one stage need not draw in another.

        Raises:
            ConfigurationError: From the end of the context: a backward outside would compute forward again.
        """
        with self.forward(rows, stage):
            yield
        if self._operators.waits:
            raise ConfigurationError(_RECOMPUTES)

    @contextmanager
    def forward(self, rows: Rows | None, stage: str = "step") -> Iterator[None]:
        """Like :meth:`batch`, for a host that calls backward elsewhere, inside of :meth:`backward`.

        Args:
            rows, stage: See :meth:`batch`.
        """
        operators = self._operators
        is_aside, operators.is_aside = operators.is_aside, False
        operators.recomputes = operators.waits = False
        try:
            with nullcontext() if self._states is None else drawing_from(self._states), self._batch(rows, stage):
                yield
        finally:
            operators.is_aside = is_aside

    def note_outside(self, before: list[torch.Tensor]) -> None:
        """Note whether a loop's body has drawn outside of :meth:`batch`, where it does not continue what batches draw.

        Args:
            before: The states of the default generators when the body began.
        """
        after = states_of(default_generators())
        continues = any(are_equal(after, states) for states in (before, self._states or []))
        if "whole" in self._ways.values() and not continues:
            self._by_program.add(_OUTSIDE)

    def note_loading(self, before: list[torch.Tensor]) -> None:
        """Note whether a loader draws from another state than batches, with which one process lets it take turns.

        Args:
            before: The states of the default generators before the batch was loaded.
        """
        if "whole" in self._ways.values() and not are_equal(before, states_of(default_generators())):
            self._by_program.add(_LOADING)

    def note_apart(self, why: str) -> None:
        """Note why the rows of batches were unknown here, if one of them has drawn; nothing if ``why`` is empty."""
        if why and self._has_drawn_apart and self._always is None:
            self._by_program.add(why)
        self._has_drawn_apart = False

    @contextmanager
    def comparing(self, rows: Rows, module: nn.Module) -> Iterator[None]:
        """Inside, a copy of the module computes these rows, or the whole batch, and draws as one process would. Local.

        Doing both tells which dimensions hold the batch, also in the batches that follow.
        """
        operators = DrawingOperators(module, self._rank, self._operators.dims)
        operators.begin(rows)
        operators.dims.is_comparing = True
        try:
            with DrawingCalls(operators):
                yield
        finally:
            operators.end()
            operators.dims.is_comparing = False
            self.refused = self.refused if rows.is_whole else operators.refusals
            self._counts = self._counts[-1], operators.counts_of_layers

    def note_otherwise(self) -> None:
        """Note that a part has drawn another amount than the whole batch, each of them in :meth:`comparing`. Local."""
        whole, part = self._counts
        layers = [layer for layer in {**whole, **part} if whole.get(layer) != part.get(layer)]
        if not self.refused:
            self._of_ranks |= dict.fromkeys(layers or ["a step"], _OTHERWISE) | self._of_ranks

    def learning_nothing(self) -> AbstractContextManager[None]:
        """Inside, :meth:`comparing` changes nothing for the batches that follow: whether it is called may be chance."""
        return self._operators.dims.kept()

    def confirm(self) -> None:
        """Note that what :meth:`comparing` has drawn gave the numbers of one process. Local."""
        self._operators.dims.confirm()

    def backward(self) -> AbstractContextManager[object]:
        """Surround the backward of the batch of the last :meth:`forward`."""
        return self._operators.backward()

    def _look_again(self) -> None:
        """Let the next batch tell whether it draws now, if those of the last pass did not."""
        self._ways = {kind: way for kind, way in self._ways.items() if way != "none"}

    def forget_way(self) -> None:
        """Let the next batch tell again whether batches draw. Local."""
        self._ways.clear()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside a batch, surround code that draws alike on all ranks, such as noise for gradients."""
        operators, before = self._operators, states_of(default_generators())
        is_aside, operators.is_aside = operators.is_aside, True
        operators.compare()
        try:
            yield
        finally:
            operators.is_aside = is_aside
            after = states_of(default_generators())
            if operators.expected is not None:
                operators.expected = after
            if self._before is not None and are_equal(self._before, before):
                self._before = after

    def report(self) -> list[Any]:
        """Return what :meth:`compare` needs to know of this rank. Local.

        That is: whether it has left out a batch, why layers drew by rank, about which dimension of a layer's draws
        holds the batch: doubts, and what is certain; and in which batches each layer has drawn, ``None`` if unknown.
        """
        self._look_again()
        has_skipped, self.has_skipped = self.has_skipped, False
        has_whole, self._has_whole = self._has_whole, False
        dims, batches = self._operators.dims, self._operators.take_batches()
        return [has_skipped, self._operators.refusals, dims.doubts(), dims.told(), None if has_whole else batches]

    def compare(self, digests: Sequence[Sequence[int]], reports: Sequence[Sequence[Any]]) -> None:
        """Note ranks that have drawn otherwise than rank 0, and what is wrong on any rank. Local.

        Args:
            digests: For each rank, checksums of the random states of torch and of others, at one moment.
            reports: The :meth:`report` of each rank. One that has left out a batch may have drawn otherwise.
        """
        told = {layer: dim for *_, known, _ in reports for layer, dim in known.items()}
        for rank, (_, refusals, doubts, *_) in enumerate(reports):
            open_doubts = {
                layer: doubt for layer, (doubt, dim) in doubts.items() if dim == -1 or told.get(layer, -1) != dim
            }
            for layer, reason in (refusals | open_doubts).items():
                self._of_ranks.setdefault(layer, f"{reason} (rank {rank})" if rank else reason)
        self._is_compared = True
        if self._was_by_rank or self._operators.refusals:
            return
        if self._have_drawn_otherwise([batches for skips, *_, batches in reports if not (skips or batches is None)]):
            return
        padded = self._operators.dims.varying()
        for place, of in enumerate(("", " by random or NumPy")):
            differ = [rank for rank, digest in enumerate(digests) if digest[place] != digests[0][place]]
            apart = ", ".join(str(rank) for rank in differ if not reports[rank][0])
            if apart:
                self._by_program.add(_PADDED.format(apart, padded) if padded and not of else _PARTED.format(apart, of))

    def _have_drawn_otherwise(self, batches_of: Sequence[Mapping[str, int]]) -> bool:
        """Whether ranks have drawn in other batches than the first of them; note the layers."""
        layers = dict.fromkeys(layer for batches in batches_of for layer in batches)
        found = [layer for layer in layers if len({batches.get(layer) for batches in batches_of}) > 1]
        self._of_ranks |= dict.fromkeys(found, _OTHERWISE) | self._of_ranks
        return bool(found)

    def _batch(self, rows: Rows | None, stage: str) -> AbstractContextManager[None]:
        if rows is not None and rows.is_whole:
            self._has_whole = True
            return nullcontext()
        kind = stage, torch.is_grad_enabled()
        way = self._always or self._ways.get(kind, "whole")
        if rows is None or way == "by_rank":
            self._was_by_rank = True
            return self._apart()
        return self._watched(kind) if way == "none" else self._whole(rows, kind)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        with drawing_by_rank(default_generators(), self._rank):
            self._before = states_of(default_generators())
            yield
            self._has_drawn_apart |= not are_equal(self._before, states_of(default_generators()))

    @contextmanager
    def _whole(self, rows: Rows, kind: tuple[str, bool]) -> Iterator[None]:
        operators = self._operators
        operators.begin(rows)
        operators.dims.is_in_hook = kind[0] not in _OF_SAMPLES
        self._before = operators.expected = None if kind in self._ways else states_of(default_generators())
        try:
            with self._calls:
                yield
        finally:
            operators.end()
        if self._before is not None:
            operators.compare()
            operators.expected = None
            self._ways[kind] = self._way_after(self._before)

    def _way_after(self, before: list[torch.Tensor]) -> Way:
        """Return how later batches draw, after one that began with these states."""
        has_drawn = not are_equal(before, states_of(default_generators()))
        if not has_drawn and not self._operators.draws:  # a generator of the user's, or a seed, may leave the state
            return "none"
        if has_drawn and self._operators.is_unseen:
            self._by_program.add(_UNSEEN)
        return "whole" if self._operators.draws else "by_rank"

    @contextmanager
    def _watched(self, kind: tuple[str, bool]) -> Iterator[None]:
        generators = default_generators()
        self._before = states_of(generators)
        yield
        if not are_equal(self._before, states_of(generators)):
            del self._ways[kind]
            self._by_program.add(_LATE)
            for generator, state in zip(generators, self._before, strict=True):
                generator.set_state(state)  # ranks may have drawn unequal amounts
                draw_seed(generator)

    def _own_reasons(self) -> dict[str, str]:
        doubts = self._operators.dims.doubts()
        return {layer: doubt for layer, (doubt, _) in doubts.items()} | self._operators.refusals

    def state_dict(self) -> dict[str, Any]:
        """Return how batches draw, as plain data. Local."""
        return {"ways": [[list(kind), way] for kind, way in self._ways.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, the result of :meth:`state_dict`. Local."""
        self._ways = {(stage, has_gradients): way for (stage, has_gradients), way in state.get("ways", ())}

    def warn(self) -> None:
        """Warn of layers whose draws may not be those of one process, once for each. Call it after some batches."""
        reasons = self._of_ranks if self._is_compared else self._own_reasons()
        lines = {layer: f"{layer}: {reason}" for layer, reason in reasons.items()}
        lines |= {line: line for line in sorted(self._by_program)}
        new = [line for about, line in lines.items() if about not in self._told]
        self._told.update(lines)
        if new:
            more = f"; and {len(new) - _SHOWN} more" * (len(new) > _SHOWN)
            warn(f"Some random numbers may not be those of one process. {'; '.join(new[:_SHOWN])}{more}.")
