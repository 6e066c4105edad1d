"""Which dimension of what a call draws holds the batch.

A shape alone may leave this open. Two batches of different sizes tell: the dimension that grows with the batch holds
it. Until then, the first dimension that fits is taken; if others fit as well, or its size is a multiple of the samples,
that is noted. A multiple that the program gives as a size is taken for a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ddp_callbacks.randomness.rows import BatchDim, Rows

KNOWN = {
    **dict.fromkeys(("gru", "lstm", "rnn_relu", "rnn_tanh"), 1),  # of [steps, samples, features], also if batch_first
    **dict.fromkeys(("multi_head_attention_forward", "scaled_dot_product_attention"), 0),
}
"""Which dimension holds the batch in what torch's functions draw."""

_Draw = tuple[tuple[int, ...], int]  # a shape, and the number of samples
_IMAGES = 4  # dimensions of a batch of images

_JOINS, _REPEATS = ("cat", "concat", "concatenate", "vstack"), ("repeat", "tile")
ARRANGING = {*_JOINS, *_REPEATS, "repeat_interleave", "view", "reshape", "flatten"}
"""Functions that may give each sample several rows."""

_UNEQUAL = (
    "how much it draws does not follow from the number of samples, as for graphs, packed sequences, or batches of "
    "several loaders"
)
_PADDED = "it draws {} for a part, {} for the whole first batch: let collate_fn pad all samples to one length"
_ALL = "draw for all samples, then take those that you need"
_FIRST = "let the batch be the first dimension, and no other size that of a part"
_TOGETHER = "the rows of a sample were taken to follow each other"


class DrawByRankError(Exception):
    """What a call draws for the whole batch cannot be known on this rank; the message says why."""


@dataclass
class _Seen:
    """What is known of a place that draws.

    Attributes:
        layer: Name of the layer, for messages.
        known: The dimension that holds the batch, by the function that draws; ``None`` if that does not tell.
        is_sized: Whether the program gives the shape, not a tensor.
        is_in_hook: Whether that is in a hook, which may draw for other things than samples, such as a plot.
        samples, shape: Of the first draw.
        doubt: Why the dimension is not certain; empty if it is.
        taken: The dimension that was taken then; -1 if it was another in other batches.
        is_told: Whether batches of different sizes have told the dimension.
        dim: The dimension that they told; ``None``: none, so that all ranks draw the same.
        refusal: Why it draws by rank; empty if it doesn't.
        order: The order of the dimensions in memory, of a part with several samples.
        varies: Whether a size beside that of the batch has changed.
        is_compared: Whether a comparison has drawn here.
        is_right: Whether it has shown that the guess was right.
        was_wrong: Whether batches were computed with another dimension before it was told.
    """

    layer: str
    known: int | None
    is_sized: bool
    is_in_hook: bool
    samples: int
    shape: Sequence[int]
    doubt: str = ""
    taken: int | None = -1
    is_told: bool = False
    dim: int | None = None
    refusal: str = ""
    order: Sequence[int] | None = None
    varies: bool = False
    is_compared: bool = False
    is_right: bool = False
    was_wrong: bool = False


class BatchDims:
    """Learns, for each place in a program that draws, which dimension holds the batch.

    Attributes:
        is_comparing: Whether a batch is computed whole and in part.
        is_in_hook: Whether a hook runs.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, _Seen] = {}
        self._compared, self._right = set[_Draw](), set[_Draw]()  # in comparisons, of which the latter were right
        self.is_comparing = self.is_in_hook = False

    def find(
        self,
        place: Hashable,
        name: Callable[[], str],
        shape: Sequence[int],
        rows: Rows,
        known: int | None = None,
        order: Sequence[int] | None = None,
        blocks: int | None = None,
    ) -> BatchDim | None:
        """Return the dimension of the batch; ``None``: the draw is not for the batch, so all ranks draw the same.

        Args:
            place: The same for each draw at this place in the program.
            name: Returns the layer's name, for messages.
            shape: What is drawn.
            rows: This rank's part of the batch.
            known: The dimension of the batch, if the function that draws tells it.
            order: The order of the dimensions in memory of the tensor that is drawn for; ``None``: the program gives
                the shape. A part of a single sample may not tell it, earlier ones do.
            blocks: If the first dimension has several rows of each sample: how many times all samples follow each
                other there, see :func:`blocks_of`; ``None``: unknown.

        Raises:
            DrawByRankError: The shape does not tell how much other ranks draw.
        """
        if blocks is not None:
            return BatchDim(0, shape[0] // rows.samples // blocks, order, blocks)
        seen = self._seen.get(place)
        if seen is None:
            is_in_hook = self.is_in_hook and order is None
            seen = self._seen[place] = _Seen(name(), known, order is None, is_in_hook, rows.samples, shape)
            seen.is_right = not self.is_in_hook and (tuple(shape), rows.samples) in self._right
        if shape != seen.shape or rows.samples != seen.samples:
            self._learn(seen, shape, rows.samples)
        if self.is_comparing:
            seen.is_compared = True
            self._compared.add((tuple(shape), rows.samples))
        if seen.refusal:
            raise DrawByRankError(seen.refusal)
        dim = seen.dim if seen.is_told else _guess(seen, shape, rows.samples)
        if dim is None:
            return None
        if shape[dim] % rows.samples:
            raise DrawByRankError(f"it draws {_text(shape)} for {rows.samples} samples: {_ALL}")
        if shape[dim] > 1:
            seen.order = order
        if shape[dim] > rows.samples and seen.known is None and not seen.is_right:
            seen.doubt, seen.taken = seen.doubt or f"of {_text(shape)} for {rows.samples} samples, {_TOGETHER}", -1
        return BatchDim(dim, shape[dim] // rows.samples, seen.order)

    def _learn(self, seen: _Seen, shape: Sequence[int], samples: int) -> None:
        was_told = seen.is_told
        if not was_told:
            _compare(seen, shape, samples)
        has_other_sizes = _has_other_sizes(seen, shape)
        seen.varies = seen.varies or has_other_sizes
        if self.is_comparing and seen.is_told and not was_told:
            if seen.is_compared:
                seen.doubt, seen.was_wrong = "", False  # nothing was computed with another one
            if has_other_sizes:
                seen.refusal = _PADDED.format(_text(shape), _text(seen.shape))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Forget on exit what was learnt inside."""
        before = {place: replace(seen) for place, seen in self._seen.items()}
        try:
            yield
        finally:
            self._seen = before

    def confirm(self) -> None:
        """Note that what was drawn in a comparison is what one process draws: another place draws the same so."""
        self._right |= self._compared
        for seen in self._seen.values():
            if seen.is_compared and not seen.was_wrong:
                seen.is_right, seen.doubt = True, ""

    def varying(self) -> str:
        """Return the name of a layer that draws for a size that changes, beside that of the batch; empty for none."""
        return next((seen.layer for seen in self._seen.values() if seen.varies), "")

    def doubts(self) -> dict[str, list[Any]]:
        """Return why a layer's dimension is not certain, and which one was taken, by the name of the layer."""
        doubted = [seen for seen in self._seen.values() if seen.doubt]
        taken = _unique((seen.layer, seen.taken) for seen in doubted)
        return {seen.layer: [seen.doubt, taken[seen.layer]] for seen in doubted}

    def told(self) -> dict[str, int | None]:
        """Return the dimension of the layers for which batches of different sizes have told it."""
        return _unique((seen.layer, seen.dim) for seen in self._seen.values() if seen.is_told and not seen.doubt)


def _unique(dims: Iterable[tuple[str, int | None]]) -> dict[str, int | None]:
    """Return the dimension of each layer; -1 for one with several."""
    found: dict[str, int | None] = {}
    for layer, dim in dims:
        found[layer] = dim if found.setdefault(layer, dim) == dim else -1
    return found


def blocks_of(name: str, given: Any, made: torch.Tensor, samples: int) -> int | None:
    """Return how many times all samples follow each other in what a function of :data:`ARRANGING` made.

    ``None`` if that cannot be told, or there are not several rows of each sample.

    Args:
        name: The function's.
        given: Its first argument.
    """
    tensors = [
        each for each in (given if isinstance(given, list | tuple) else [given]) if isinstance(each, torch.Tensor)
    ]
    if not tensors or not all(each.dim() for each in tensors) or made.shape[0] <= samples or made.shape[0] % samples:
        return None
    sizes, several = tensors[0].shape, made.shape[0] // samples
    if name in _JOINS:
        return several if all(each.shape[0] == samples for each in tensors) else None
    if name in _REPEATS:
        return several if sizes[0] == samples else None
    if samples not in sizes[:2] or sizes[:2].count(samples) > 1:  # either may hold the batch
        return None
    blocks = 1 if sizes[0] == samples else sizes[0]
    return blocks if several % blocks == 0 else None


def _compare(seen: _Seen, shape: Sequence[int], samples: int) -> None:
    """Learn from a draw of another shape, or for another number of samples, than the first one at the same place."""
    if len(shape) != len(seen.shape):
        seen.refusal = f"it draws {_text(seen.shape)} in one batch, {_text(shape)} in another"
        return
    sizes = list(zip(seen.shape, shape, strict=True))
    grown = [dim for dim, (one, other) in enumerate(sizes) if one != other and one * samples == other * seen.samples]
    if samples == seen.samples:
        if not _fitting(shape, samples):
            seen.refusal = _UNEQUAL
    elif len(grown) == 1 or shape == seen.shape:
        before, seen.is_told, seen.dim = _guess(seen, seen.shape, seen.samples), True, grown[0] if grown else None
        found = "no dimension" if seen.dim is None else f"dimension {seen.dim}"
        wrong = f"{found} of what it draws holds the batch, but another was taken in earlier batches"
        seen.was_wrong = before != seen.dim
        seen.doubt, seen.taken = f"{wrong}: {_FIRST}" * seen.was_wrong, -1
    else:
        seen.refusal = _UNEQUAL


def _has_other_sizes(seen: _Seen, shape: Sequence[int]) -> bool:
    """Whether sizes other than that of the batch are not those of the first draw."""
    if seen.dim is None or len(shape) != len(seen.shape):
        return False
    return any(one != other for dim, (one, other) in enumerate(zip(seen.shape, shape, strict=True)) if dim != seen.dim)


def _guess(seen: _Seen, shape: Sequence[int], samples: int) -> int | None:
    fitting = _fitting(shape, samples)
    if not fitting:
        return None
    if seen.known in fitting:
        return seen.known
    is_multiple = shape[fitting[0]] != samples
    guess = None if is_multiple and seen.is_sized else fitting[0]
    is_one_number = list(shape) == [1] and seen.is_sized  # more likely one for all samples
    # Other sizes of 1 broadcast. What has four dimensions is of images, or heads: the batch comes first.
    is_open = is_multiple or seen.is_in_hook or is_one_number or (len(fitting) > 1 < samples and len(shape) < _IMAGES)
    if is_open and not seen.is_right:
        taken = "no dimension" if guess is None else f"dimension {guess}"
        of = f"of {_text(shape)} for {samples} sample{'s' * (samples > 1)}"
        seen.doubt = f"{of}, {taken} was taken to hold the batch; if wrong, {_FIRST}"
        seen.taken = guess
    return guess


def _fitting(shape: Sequence[int], samples: int) -> list[int]:
    """Return the dimensions that may hold the batch, the likeliest first."""
    exact = [dim for dim, size in enumerate(shape) if size == samples]
    is_multiple = len(shape) > 1 and shape[0] > samples and shape[0] % samples == 0  # as of heads, or words
    return exact + [0] * is_multiple


def _text(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
