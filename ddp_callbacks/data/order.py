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
    """

    def __init__(self, sampler: Any, sources: Sequence[object], begin: RandomStates | None) -> None:
        if begin is not None:
            begin.put_back(sources)
        self.begin = begin or RandomStates.of(sources)
        self._sampler = sampler
        self._state = OwnRandomState()
        self._batches: Iterator[Any] = iter(())
        self._is_fixed = False
        self._may_draw_at_end = bool(generators_of(sources))

    def start(self, number: int) -> None:
        """Go to the batch of this number."""
        with self._state.drawing():
            self._batches, self._is_fixed = begin_at(self._sampler, number)

    def take(self, count: int) -> list[Any]:
        """The next batches; fewer if the sampler ends."""
        with self._state.drawing():
            return list(itertools.islice(self._batches, count))

    def count_ahead(self, drawn: int) -> int:
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
        kept: The number of batches that may have been drawn and not used.
        start: Of a resumable loader.

    Attributes:
        drawn: The number of batches that ``next`` has returned; an earlier run's count.
        seed: For the workers; from the first batch on.
    """

    def __init__(
        self,
        sampler: Any,
        sources: Sequence[object],
        group: dist.ProcessGroup | None,
        *,
        is_shared: bool,
        kept: int,
        start: Start | None,
    ) -> None:
        self._sampler, self._sources, self._group, self._start = sampler, sources, group, start
        self._is_sent = is_shared and get_world_size(group) > 1
        self._runs_sampler = not self._is_sent or get_rank(group) == 0
        self._draws: _Draws | None = None
        self._has_begun = self._is_over = False
        self.drawn, self.seed = 0, 0
        self._returned: deque[Any] = deque(maxlen=kept)
        self._waiting: deque[Any] = deque()
        if start is not None and start.position is not None:
            self._go_to(start.position)

    def _go_to(self, position: Mapping[str, Any]) -> None:
        self.drawn, self.seed = position["used"], position["seed"]
        tail, left = _unpacked(position["tail"]), position["drawn"] - position["used"]
        self._returned.extend(tail[: len(tail) - left])
        self._waiting.extend(tail[len(tail) - left :])
        self._is_over = position["is_over"]

    def begin(self) -> None:
        """Let rank 0 go to where an earlier run was. Local."""
        if self._has_begun:
            return
        self._has_begun = True
        if not self._runs_sampler:
            return
        start, position = self._start, (self._start.position if self._start else None) or {}
        begin = start.before if start and start.draws_from_before else None
        if position.get("begin"):
            begin = RandomStates.from_plain(position["begin"])
        self._draws = _Draws(self._sampler, self._sources, begin)
        self.seed = self.seed or self._draws.begin.seed(start.number if start else 0)
        if not position.get("drawn"):
            self._draws.start(0)
        elif start is not None:
            self._skip(position)
            start.before.put_back(self._sources)

    def _skip(self, position: Mapping[str, Any]) -> None:
        assert self._draws is not None
        last = position["drawn"] - 1
        self._draws.start(last)
        again, expected = self._draws.take(1), _unpacked(position["tail"])[-1:]
        if checksum_of(_unpacked(_packed(again, self._sampler))) != checksum_of(expected):
            raise ConfigurationError(
                f"{name_of_sampler(self._sampler)} does not draw the batches of the run that was saved: batch {last} "
                f"of the pass has the indices {again[:1]}, and had {expected}. Go on with the data set, the batch size "
                "and the sampler of that run, and take its randomness from torch's, Python's or NumPy's global random "
                "state, or from generators that are its attributes. If it depends on the epoch, call set_epoch."
            )

    def __next__(self) -> Any:
        self.begin()
        if not self._waiting and not self._is_over:
            self._fetch()
        if not self._waiting:
            raise StopIteration
        batch = self._waiting.popleft()
        self._returned.append(batch)
        self.drawn += 1
        return batch

    def _fetch(self) -> None:
        batches: list[Any] = []
        if self._draws is not None:
            count = self._draws.count_ahead(self.drawn)
            batches = self._draws.take(count)
            self._is_over = len(batches) < count
        self._waiting.extend(self._exchanged(batches) if self._is_sent else batches)

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

    @property
    def kept(self) -> int:
        """The number of batches before ``drawn`` that a position may begin at."""
        return len(self._returned)

    def position(self, used: int) -> dict[str, Any]:
        """Where the pass is: plain data and tensors. Local.

        It is equal on all ranks, except for ``begin``, which rank 0 needs to run the sampler again.

        Args:
            used: The number of batches that have been used.
        """
        drawn = self.drawn + len(self._waiting)
        tail = [*self._returned, *self._waiting][-max(1, drawn - used) :]
        return {
            "used": used,
            "drawn": drawn,
            "tail": _packed(tail, self._sampler),
            "is_over": self._is_over,
            "seed": self.seed,
            "begin": self._draws.begin.plain() if self._draws else None,
        }


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
