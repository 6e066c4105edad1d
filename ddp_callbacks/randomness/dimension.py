"""Which dimension of what a call draws holds the batch.

A shape alone may leave this open. Two batches of different sizes tell: the dimension that grows with the batch holds
it. Until then, the first dimension that fits is taken; if others fit as well, or its size is a multiple of the samples,
that is noted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from ddp_callbacks.randomness.rows import BatchDim, Rows

KNOWN = {
    **dict.fromkeys(("gru", "lstm", "rnn_relu", "rnn_tanh"), 1),  # of [steps, samples, features], also if batch_first
    **dict.fromkeys(("multi_head_attention_forward", "scaled_dot_product_attention"), 0),
}
"""Which dimension holds the batch in what torch's functions draw."""

_UNEQUAL = "how much it draws does not follow from the number of samples, as for packed sequences"


class DrawByRankError(Exception):
    """What a call draws for the whole batch cannot be known on this rank; the message says why."""


@dataclass
class _Seen:
    """What is known of a place that draws.

    Attributes:
        layer: Name of the layer, for messages.
        known: The dimension that holds the batch, by the function that draws; ``None`` if that does not tell.
        samples, shape: Of the first draw.
        doubt: Why the dimension is not certain; empty if it is.
        is_told: Whether batches of different sizes have told the dimension.
        dim: The dimension that they told; ``None``: none, so that all ranks draw the same.
        refusal: Why it draws by rank; empty if it doesn't.
        order: The order of the dimensions in memory, of a part with several samples.
    """

    layer: str
    known: int | None
    samples: int
    shape: Sequence[int]
    doubt: str = ""
    is_told: bool = False
    dim: int | None = None
    refusal: str = ""
    order: Sequence[int] | None = None


class BatchDims:
    """Learns, for each place in a program that draws, which dimension holds the batch."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, _Seen] = {}

    def find(
        self,
        place: Hashable,
        name: Callable[[], str],
        shape: Sequence[int],
        rows: Rows,
        known: int | None = None,
        order: Sequence[int] | None = None,
    ) -> BatchDim | None:
        """Return the dimension of the batch; ``None``: the draw is not for the batch, so all ranks draw the same.

        Args:
            place: The same for each draw at this place in the program.
            name: Returns the layer's name, for messages.
            shape: What is drawn.
            rows: This rank's part of the batch.
            known: The dimension of the batch, if the function that draws tells it.
            order: The order of the dimensions in memory. A part of a single sample may not tell it, earlier ones do.

        Raises:
            DrawByRankError: The shape does not tell how much other ranks draw.
        """
        seen = self._seen.get(place)
        if seen is None:
            seen = self._seen[place] = _Seen(name(), known, rows.samples, shape)
        if not seen.is_told and (shape != seen.shape or rows.samples != seen.samples):
            _compare(seen, shape, rows.samples)
        if seen.refusal:
            raise DrawByRankError(seen.refusal)
        dim = seen.dim if seen.is_told else _guess(seen, shape, rows.samples)
        if dim is None:
            return None
        if shape[dim] % rows.samples:
            raise DrawByRankError(f"it draws {_text(shape)} for {rows.samples} samples")
        if shape[dim] > 1:
            seen.order = order
        return BatchDim(dim, shape[dim] // rows.samples, seen.order)

    def doubts(self) -> dict[str, str]:
        """Return why a layer's dimension is not certain, by the name of the layer."""
        return {seen.layer: seen.doubt for seen in self._seen.values() if seen.doubt}


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
        seen.doubt = "" if before == seen.dim else f"{found} holds the batch, earlier batches drew for another"
    else:
        seen.refusal = _UNEQUAL


def _guess(seen: _Seen, shape: Sequence[int], samples: int) -> int | None:
    fitting = _fitting(shape, samples)
    if not fitting:
        return None
    if seen.known in fitting:
        return seen.known
    if shape[fitting[0]] != samples or (len(fitting) > 1 and samples > 1):  # other dimensions of 1 are broadcast
        seen.doubt = f"of {_text(shape)} for {samples} samples, dimension {fitting[0]} was taken to hold the batch"
    return fitting[0]


def _fitting(shape: Sequence[int], samples: int) -> list[int]:
    """Return the dimensions that may hold the batch, the likeliest first."""
    exact = [dim for dim, size in enumerate(shape) if size == samples]
    is_multiple = len(shape) > 1 and shape[0] > samples and shape[0] % samples == 0  # as of heads, or words
    return exact + [0] * is_multiple


def _text(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
