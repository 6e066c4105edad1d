"""The order of a pass: rank 0 runs the sampler and sends what it draws, so all ranks have the same batches.

If the order is fixed when the pass begins, rank 0 sends it in blocks. Otherwise it draws each batch when a single
process would, and sends it in a message of its own: the sampler may share a random state with other code, or react to
the training.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from ddp_callbacks.comm.collectives import broadcast_object
from ddp_callbacks.data.global_state import (
    GLOBAL,
    State,
    checksums_of,
    digest_of,
    get_global_state,
    own_generators,
    set_generators,
    set_global_state,
    states_of_generators,
)
from ddp_callbacks.data.iterator import DividedLoader, Start
from ddp_callbacks.data.nested import length_of
from ddp_callbacks.data.order_state import Attributes, other_batches
from ddp_callbacks.data.random_state import OwnRandomState, changed_state, follow_changes
from ddp_callbacks.data.samplers import begin_at, name_of_sampler
from ddp_callbacks.errors import ConfigurationError

_INDICES = 4096  # per block
_PURPOSE = "the next batches of a loader"


class Order(Iterable[Any]):
    """The batches of indices of one pass, the same on all ranks.

    Nothing is drawn before :meth:`call`, :meth:`begin` or the first batch. If the order is shared, ``next`` is a
    collective.

    Args:
        sampler: Yields the indices of each batch.
        source: The source of the batches. Rank 0 draws for all ranks, which get the states of its generators, unless
            each rank has a sampler of its own.
        start: Where a pass of a resumable loader begins; ``None`` for other loaders.

    Attributes:
        seed: Seed of the workers' random states; valid from the first batch on.
    """

    def __init__(self, sampler: Any, source: DividedLoader, start: Start | None) -> None:
        self._sampler, self._source, self._group, divider = sampler, source, source.group, source.divider
        self._sources = source.sources
        self._is_sent = divider.division != "own" and divider.world_size > 1
        self._runs_sampler = not self._is_sent or divider.rank == 0
        self._start, self._number = start, source.passes
        self._begin: State | None = None
        self._batches: Iterator[Any] | None = None  # the sampler's iterator, on ranks that run it
        self._again: list[Any] = []  # the next block, if an earlier run drew it
        self._is_over = False
        self._drawn, self._last = 0, None  # number of batches drawn; the last one
        self._is_called, position = False, start.position if start else None
        self._position = position if position and (position["drawn"] or position.get("called")) else None
        if self._position:
            self._drawn = min(self._position["batches"] * divider.per_step, self._position["drawn"])
        self.seed = self._position["seed"] if self._position else 0
        self._attributes: Attributes = {}  # when the pass began

    def call(self) -> None:
        """Let the sampler's ``__iter__`` draw when torch's loader calls it, if it may draw. A collective then.

        torch may call it repeatedly; the last call begins the pass.
        """
        if self._position is None and not inspect.isgeneratorfunction(type(self._sampler).__iter__):
            self._batches, self._begin, self._is_called = None, None, True
            self._exchange(self._begin_anew)

    def _begin_anew(self) -> list[Any]:
        self._go_to(0)
        return []

    def resume(self) -> None:
        """On ranks that run the sampler, move it to the position of an earlier run, if there is one. Local."""
        if self._position:
            self.begin()

    def begin(self) -> None:
        """On ranks that run the sampler, move it to the position of an earlier run, or to the first batch. Local."""
        if self._batches is not None or not self._runs_sampler:
            return
        if self._start and self._position:
            self._begin = self._position["begin"]
            self._start.attributes.load(self._position.get("attributes", {}))
            self._draw_again(self._position)
            self._start.put_back(self._sources)
        else:
            self._go_to(0)

    def _go_to(self, number: int) -> None:
        """Move the sampler to batch ``number``, under a random state of its own if it is resumable or draws ahead."""
        if self._begin:
            set_global_state(self._begin, self._sources)
        self._begin = get_global_state(self._sources)
        self._attributes = self._start.attributes.take() if self._start else {}
        self.seed = self.seed or digest_of(self._number, self._begin[0], *self._begin[GLOBAL:])
        self._state = OwnRandomState(self._begin[:GLOBAL])
        with self._state.drawing():
            self._batches, self._is_fixed = begin_at(self._sampler, number)

    def _draw_again(self, position: Mapping[str, Any]) -> None:
        """Draw again the batches that an earlier run drew but did not use, at least one, and compare the last one."""
        if not position["drawn"]:
            self._go_to(0)
            return
        unused = position["drawn"] - self._drawn
        again = max(1, unused)
        self._go_to(position["drawn"] - again)
        self._again = self._take(again)
        if _plain(self._again[-1:], self._sampler) != [position["last"]]:
            raise other_batches(
                name_of_sampler(self._sampler),
                f"batch {position['drawn'] - 1} has the indices {self._again[-1:]}, and had {position['last']}",
            )
        self._again = self._again[:unused]

    def __iter__(self) -> Iterator[Any]:
        while not self._is_over:
            yield from self._fetch()

    def _fetch(self) -> list[Any]:
        """Return the next block, empty if no batch is left. A collective if the order is shared."""
        block = self._exchange(self._next_block)
        self._drawn += len(block)
        if block:
            self._last, self._position = block[-1], None
        return block

    def _exchange(self, draw: Callable[[], list[Any]]) -> list[Any]:
        """Return what ``draw`` returns on the rank that runs the sampler. A collective if the order is shared."""
        message: Any = self._message(draw) if self._runs_sampler else None
        if self._is_sent:
            message = broadcast_object(message, _PURPOSE, self._group)
        if isinstance(message, str):
            raise ConfigurationError(message)
        block, self._is_over, self.seed, states, drawn = message
        set_generators(self._sources, states)
        if drawn and not self._runs_sampler:
            follow_changes(*drawn)
        return list(block)

    def _message(self, draw: Callable[[], list[Any]]) -> list[Any] | str:
        """Return what was drawn with the states that go with it, or the text of the error that all ranks raise.

        If it was drawn from the global random state, ranks that have the same one go on with it.
        """
        before = get_global_state()
        try:
            block = _plain(draw(), self._sampler)
        except ConfigurationError as error:
            return str(error)
        changed = changed_state(before)
        drawn = [] if all(state is None for state in changed) else [checksums_of(before), changed]
        return [block, self._is_over, self.seed, states_of_generators(self._sources), drawn]

    def _next_block(self) -> list[Any]:
        """Draw as many batches at once as possible without changing any result."""
        self.begin()
        if self._again:
            block, self._again = self._again, []
            return block
        count = self._largest_block() if self._is_fixed else 1
        block = self._take(count)
        self._is_over = len(block) < count
        return block

    def _largest_block(self) -> int:
        count = max(1, _INDICES // (getattr(self._sampler, "batch_size", None) or 1))
        if not own_generators(*self._sources):
            return count
        # torch's RandomSampler draws from its generator at its end, which a loop that stops early does not reach.
        return max(1, min(count, (length_of(self._sampler) or 0) - 1 - self._drawn))

    def _take(self, count: int) -> list[Any]:
        assert self._batches is not None
        with self._state.drawing() if self._start or self._is_fixed else nullcontext():
            block = list(itertools.islice(self._batches, count))
        self._source.warn_of_turns(self._state, self._start)
        return block

    def checksum(self, _: int) -> int:
        """Return 0: all ranks have the indices that rank 0 sent."""
        return 0

    def position(self, _: int) -> Mapping[str, Any]:
        """Return the sampler's position, wherever the loader is, as plain data and tensors. Local.

        It is equal on all ranks, except for ``begin``, which rank 0 needs to run the sampler again.
        """
        if self._position:
            return self._position
        found = {"drawn": self._drawn, "last": self._last, "seed": self.seed, "begin": self._begin}
        return found | {"attributes": self._attributes, "called": self._is_called}


def _plain(indices: Any, sampler: Any) -> Any:
    """Convert indices to integers and strings in lists and tuples, for messages and checkpoints."""
    if isinstance(indices, str | int):
        return indices
    if hasattr(indices, "tolist"):
        return indices.tolist()
    if isinstance(indices, Sequence):
        plain = [_plain(index, sampler) for index in indices]
        return tuple(plain) if isinstance(indices, tuple) else plain
    raise ConfigurationError(
        f"{name_of_sampler(sampler)} must yield integers or strings, or lists and tuples of them, as rank 0 sends what "
        f"it draws to all processes, and checkpoints hold it; got {indices}. Yield numbers, and let the data set look "
        "up what they stand for."
    )
