"""The order of a pass: rank 0 runs the sampler and sends what it draws, so all ranks have the same batches.

An order that is fixed when the pass begins travels in blocks. Any other sampler is asked for a batch when a single
process would ask: it may draw from a random state that others draw from, too, or react to what was trained. Then each
batch is a message.
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ddp_callbacks.comm import codec
from ddp_callbacks.comm.checksums import checksum_of
from ddp_callbacks.comm.collectives import broadcast_tensors
from ddp_callbacks.data.global_state import RandomStates, generators_of, set_generators, states_of_generators
from ddp_callbacks.data.nested import length_of
from ddp_callbacks.data.random_state import OwnRandomState
from ddp_callbacks.data.samplers import begin_at, name_of_sampler
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.process_group import get_rank, get_world_size

_INDICES = 4096  # in a block
_DOING = "the order of the batches"
_BEGINNING: Mapping[str, Any] = {"drawn": 0, "last": {"keys": []}, "seed": 0, "begin": None}


class Start(NamedTuple):
    """Where a pass of a resumable loader begins.

    Attributes:
        number: Of the pass.
        before: The random states when ``iter`` was called.
        position: Where an earlier run was; ``None``: at the first batch.
        draws_from_before: Whether to draw from ``before``, whatever else the loader draws first.
    """

    number: int
    before: RandomStates
    position: Mapping[str, Any] | None
    draws_from_before: bool


class _Draws:
    """A pass over a sampler, under a random state of its own, on the rank that runs the sampler.

    Args:
        sampler: Yields the indices of each batch.
        sources: What may have random generators: the loader and its samplers.
        begin: The random states to draw from; ``None``: those of this moment.

    Attributes:
        ahead: The batches of the next block, if they have been drawn.
    """

    def __init__(self, sampler: Any, sources: Sequence[object], begin: RandomStates | None) -> None:
        if begin is not None:
            begin.put_back(sources)
        self.begin = begin or RandomStates.of(sources)
        self._sampler = sampler
        self._state = OwnRandomState()
        self._batches: Iterator[Any] = iter(())
        self._is_fixed = False
        self.ahead: list[Any] = []
        self._may_draw_at_end = bool(generators_of(sources))

    def start(self, number: int) -> None:
        """Go to the batch of this number."""
        with self._state.drawing():
            self._batches, self._is_fixed = begin_at(self._sampler, number)

    def take(self, count: int) -> list[Any]:
        """The next batches; fewer if the sampler ends."""
        with self._state.drawing():
            return list(itertools.islice(self._batches, count))

    def take_block(self, drawn: int) -> tuple[list[Any], bool]:
        """The next batches, after ``drawn``, and whether they are the last."""
        if self.ahead:
            ahead, self.ahead = self.ahead, []
            return ahead, False
        count = self._count(drawn)
        batches = self.take(count)
        return batches, len(batches) < count

    def _count(self, drawn: int) -> int:
        """The number of batches that can be drawn at once, so that no one can tell."""
        if not self._is_fixed:
            return 1
        count = max(1, _INDICES // (getattr(self._sampler, "batch_size", None) or 1))
        if not self._may_draw_at_end:
            return count
        # torch's RandomSampler draws from its generator at its end, which a loop that stops early does not reach.
        return max(1, min(count, (length_of(self._sampler) or 0) - 1 - drawn))


class Order(Iterator[Any]):
    """The batches of indices of one pass, the same on all ranks.

    Nothing is drawn before the first :meth:`begin` or ``next``. ``next`` is a collective if the order is shared.

    Args:
        sampler: Yields the indices of each batch.
        sources: What may have random generators: the loader and its samplers. All ranks have rank 0's states.
        group: Of the ranks; ``None`` is the default group.
        is_shared: Rank 0 draws for all ranks. Otherwise each draws for itself.
        start: Of a resumable loader.
        used: The number of batches that an earlier run has used.

    Attributes:
        drawn: The number of batches that the sampler has yielded, with those of an earlier run.
        seed: For the workers; from the first batch on.
    """

    def __init__(
        self,
        sampler: Any,
        sources: Sequence[object],
        group: dist.ProcessGroup | None,
        *,
        is_shared: bool,
        start: Start | None,
        used: int,
    ) -> None:
        self._sampler, self._sources, self._group, self._start = sampler, sources, group, start
        self._is_sent = is_shared and get_world_size(group) > 1
        self._runs_sampler = not self._is_sent or get_rank(group) == 0
        self._draws: _Draws | None = None
        self._has_begun = self._is_over = False
        self._waiting: deque[Any] = deque()
        position = (start.position if start else None) or _BEGINNING
        self._begin, self.seed = position["begin"], position["seed"]
        self.drawn, self._last = position["drawn"], _unpacked(position["last"])
        self._again = self.drawn - used  # batches that were drawn, not used, and are drawn again

    def begin(self) -> None:
        """Let rank 0 go to where an earlier run was. Local."""
        if self._has_begun:
            return
        self._has_begun = True
        if not self._runs_sampler:
            return
        start = self._start
        begin = start.before if start and start.draws_from_before else None
        if self._begin:
            begin = RandomStates.from_plain(self._begin)
        self._draws = _Draws(self._sampler, self._sources, begin)
        self._begin = self._draws.begin.plain()
        self.seed = self.seed or self._draws.begin.seed(start.number if start else 0)
        if start is None or not self.drawn:
            self._draws.start(0)
        else:
            self._draw_again(self._draws)
            start.before.put_back(self._sources)

    def _draw_again(self, draws: _Draws) -> None:
        count = max(1, self._again)
        draws.start(self.drawn - count)
        again = draws.take(count)
        if checksum_of(_unpacked(_packed(again[-1:], self._sampler))) != checksum_of(self._last):
            raise ConfigurationError(
                f"{name_of_sampler(self._sampler)} does not draw the batches of the run that was saved: batch "
                f"{self.drawn - 1} of the pass has the indices {again[-1:]}, and had {self._last}. Resume with the "
                "data set, the batch size and the sampler of that run, and take its randomness from torch's, "
                "Python's or NumPy's global random state, or from generators that are its attributes. If it depends on "
                "the epoch, call set_epoch."
            )
        draws.ahead = again[: self._again]

    def __next__(self) -> Any:
        self.begin()
        if not self._waiting and not self._is_over:
            self._fetch()
        if not self._waiting:
            raise StopIteration
        return self._waiting.popleft()

    def _fetch(self) -> None:
        block: list[Any] = []
        if self._draws is not None:
            block, self._is_over = self._draws.take_block(self.drawn)
        self._waiting.extend(self._exchanged(block) if self._is_sent else block)
        if self._again:
            self._again = 0
        elif self._waiting:
            self.drawn += len(self._waiting)
            self._last = [self._waiting[-1]]

    def _exchanged(self, batches: list[Any]) -> list[Any]:
        """Rank 0's batches. A collective."""
        tensors: list[torch.Tensor] = []
        header = None
        if self._draws is not None:
            header = codec.pack(self._message(batches), tensors)
        message = codec.unpack(*broadcast_tensors(header, tensors, _DOING, self._group))
        if isinstance(message, str):
            raise ConfigurationError(message)
        if self._draws is not None:
            return batches
        packed, self._is_over, self.seed, states = message
        set_generators(self._sources, states)
        return _unpacked(packed)

    def _message(self, batches: list[Any]) -> list[Any] | str:
        """What all ranks get to know, or raise."""
        try:
            packed = _packed(batches, self._sampler)
        except ConfigurationError as error:
            return str(error)
        return [packed, self._is_over, self.seed, states_of_generators(self._sources)]

    def position(self) -> dict[str, Any]:
        """Where the sampler is: plain data and tensors. Local.

        It is equal on all ranks, except for ``begin``, which rank 0 needs to run the sampler again.
        """
        last = _packed(self._last, self._sampler)
        return {"drawn": self.drawn, "last": last, "seed": self.seed, "begin": self._begin}


def _packed(batches: list[Any], sampler: Any) -> dict[str, Any]:
    """As plain data and tensors. A batch is a list of indices, or one."""
    try:
        lists = [batch if hasattr(batch, "__len__") else [batch] for batch in batches]
        indices = [operator.index(index) for batch in lists for index in batch]
        lengths = [len(batch) if hasattr(batch, "__len__") else -1 for batch in batches]
        return {"lengths": torch.tensor(lengths), "indices": torch.tensor(indices, dtype=torch.int64)}
    except (TypeError, RuntimeError):  # no numbers, or too large ones
        pass
    try:
        codec.pack(batches, [])
    except TypeError as error:
        raise ConfigurationError(
            f"{name_of_sampler(sampler)} must yield integers or strings, or lists and tuples of them, as rank 0 sends "
            f"what it draws to all processes, and checkpoints hold it; got {batches[:1]}. Yield numbers, and let the "
            "data set look up what they stand for."
        ) from error
    return {"keys": batches}


def _unpacked(packed: Mapping[str, Any]) -> list[Any]:
    """Inverse of :func:`_packed`; indices become ``int``, batches of them lists."""
    if "keys" in packed:
        return list(packed["keys"])
    indices = iter(packed["indices"].tolist())
    return [
        next(indices) if length < 0 else list(itertools.islice(indices, length))
        for length in packed["lengths"].tolist()
    ]
