"""What all ways to divide a loader share: the source of batches, a pass over it, where it begins, and its iterator."""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from ddp_callbacks._torch import end_workers, worker_queues
from ddp_callbacks.data.global_state import State, set_global_state
from ddp_callbacks.data.nested import name_of
from ddp_callbacks.data.order_state import Attributes, OrderAttributes
from ddp_callbacks.data.random_state import OwnRandomState
from ddp_callbacks.data.shares import Divider, Share, Step, WholeBatch, common_size
from ddp_callbacks.errors import ConfigurationError, warn
from ddp_callbacks.process_group import get_rank
from ddp_callbacks.process_group.presence import found
from ddp_callbacks.reporting.recorder import timed_loading

_TAKES_TURNS = (
    "{name} (its sampler or iterable data set) draws random numbers from a global generator, and the steps or other "
    'loaders do, too. Usually they take turns; with Resume or randomness="by_sample" the loader draws from a copy, so '
    "that a run can stop anywhere: its batches are those of one process with that option, not of a run without. Give "
    "the sampler or data set a generator of its own, and they are the same."
)
_OTHER_ROWS = (
    "{loader}.__iter__ yields a batch of {rows} rows for {samples} samples of its data set. The gradient of each "
    "process's part counts by its samples: if rows are left out, let weight= count those that are left, or leave the "
    "samples out of the data set."
)


class Start(NamedTuple):
    """Where a pass of a resumable loader begins.

    Attributes:
        before: The random states when ``iter`` was called.
        position: The position of an earlier run; ``None``: the pass begins at the first batch.
        last: Where the pass before, of an earlier run, ended, if it is to be compared.
        attributes: Those of the objects on which the order depends.
        plain: A copy of them when ``iter`` was called.
    """

    before: State
    position: Mapping[str, Any] | None
    last: Mapping[str, Any] | None
    attributes: OrderAttributes
    plain: Attributes

    def of_last(self) -> Start:
        """Return this start at the position of the pass before."""
        return self._replace(position=self.last)

    def put_back(self, sources: Sequence[object]) -> None:
        """Set the random states and the attributes as they were when ``iter`` was called."""
        set_global_state(self.before, sources)
        self.attributes.put(self.plain)


class Drawn(Protocol):
    """What a source draws in a pass: whole batches, or their indices."""

    def position(self, drawn: int) -> Mapping[str, Any]:
        """Return the position after ``drawn`` batches of the pass, as tensors and plain data. Local."""

    def checksum(self, drawn: int) -> int:
        """Return a checksum of the first ``drawn`` batches; 0 if they are equal on all ranks in any case. Local."""


class DividedLoader:
    """A source of batches for a sharded loader.

    Args:
        loader: The iterable of batches.
        objects: Those on which the order depends, by name: their generators and other attributes.
        divider: Chooses this rank's part of each step.
        group: The ranks' process group; ``None`` is the default group.

    Attributes:
        is_stateful: Whether the loader resumes by a ``state_dict`` of its own.
        loads_all: Whether each rank loads all batches, and takes its parts.
        passes: The number of passes that have begun.
        taken: The step, without its part, whose batch the program computes.
    """

    is_stateful = False
    loads_all = False
    passes = 0
    taken: Step | None = None
    _has_warned = has_warned_of_rows = False

    def __init__(
        self, loader: Any, objects: Mapping[str, object], divider: Divider, group: dist.ProcessGroup | None
    ) -> None:
        self.loader, self.objects, self.divider, self.group = loader, objects, divider, group
        self.sources = tuple(objects.values())

    def warn_of_turns(self, state: OwnRandomState, start: Start | None) -> None:
        """Warn once, on rank 0, if a pass draws from a copy of the state from which the program draws meanwhile."""
        if state.takes_turns and not self._has_warned and not (start and start.position):
            self._has_warned = True
            if get_rank(self.group) == 0:
                warn(_TAKES_TURNS.format(name=name_of(self.loader)))

    def take(self, steps: deque[Step]) -> Step | None:
        """Return the oldest of the steps whose batches were drawn and not taken; ``None`` if there is none."""
        if not steps:
            return None
        self.taken = steps.popleft()
        return self.taken

    def iterate(self, steps: deque[Step], limit: int | None, start: Start | None) -> ShardedIterator:
        """Begin a pass. A collective if every rank produces the whole batches."""
        raise NotImplementedError

    def size_of(self, drawn: Any) -> int:
        """Return the number of samples in a batch, or in the indices of one."""
        raise NotImplementedError

    def part_of(self, drawn: Any, part: slice) -> Any:
        """Return a slice of a batch's samples, or of its indices."""
        return drawn[part]

    def compared(self, drawn: list[Any]) -> WholeBatch | None:
        """Return the whole batch of a step, and this rank's part of it; ``None``: not available. A collective.

        Args:
            drawn: What was drawn for the step.
        """
        raise NotImplementedError


class Pass:
    """The progress of one pass over a loader.

    Args:
        source: The source of the batches.
        drawn: What the source draws in this pass.
        limit: The number of batches to take; ``None``: all.
        start: Where the pass begins, if the loader is resumable.

    Attributes:
        used: The number of steps handed out, including those of an earlier run.
        is_begun: Whether :meth:`draw` was called.
        is_over: Whether no step is left.
    """

    def __init__(self, source: DividedLoader, drawn: Drawn, limit: int | None, start: Start | None) -> None:
        self._source, self._drawn, self._limit = source, drawn, limit
        self.used: int = start.position["batches"] if start and start.position else 0
        self._steps = deque[Step]()  # drawn but not handed out
        self.is_begun = self.is_over = False
        self._here = None if source.divider.deals else found()

    def draw(self, drawn: Iterator[Any]) -> Iterator[Step]:
        """Yield this rank's steps, and queue their shares."""
        self.is_begun, source = True, self._source
        steps = source.divider.steps(itertools.islice(drawn, self._limit), source.size_of, source.part_of)
        for step in steps:
            self._steps.append(step._replace(part=None))
            yield step

    def hand_out(self) -> Step:
        """Count a step that is handed out, and return it without its part."""
        self.used += 1
        step = self._steps.popleft()
        if self._here is not None:
            checksum = self._drawn.checksum(self.used * self._source.divider.per_step)
            self._here.drawn.note(self.used, checksum, (step.share.local, step.share.total))
        return step

    def checked(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of the user's own iterator, which must be those that were drawn, one by one."""
        for batch in batches:
            sizes = [step.share.rows.samples for step in self._steps if step.share.rows is not None]
            size = common_size(batch)
            if not self._steps or (size in sizes and size != sizes[0]):
                raise self._other_batches()
            if sizes and size not in (None, sizes[0]) and not self._source.has_warned_of_rows:
                self._source.has_warned_of_rows = True
                warn(_OTHER_ROWS.format(loader=type(self._source.loader).__name__, rows=size, samples=sizes[0]))
            yield batch
        if self._steps:
            raise self._other_batches()

    def _other_batches(self) -> ConfigurationError:
        return ConfigurationError(
            f"{type(self._source.loader).__name__}.__iter__ yields other batches than its sampler draws, or in another "
            "order, so which part of a batch this process has is unknown. Let its sampler choose and order the "
            "samples; or yield the batches from a class that is no DataLoader: these are divided after loading."
        )

    def position(self, batches: int | None) -> dict[str, Any]:
        """Return the position in the pass as tensors and plain data, for the state of a resumable loader.

        Args:
            batches: The number of steps used; ``None``: all steps handed out.
        """
        used = self.used if batches is None else batches
        if not 0 <= used <= self.used:
            raise ConfigurationError(
                f"batches must be the number used in this pass, of which {self.used} were handed out, got {batches}."
            )
        if self._source.is_stateful and used != self.used:
            raise ConfigurationError(
                f"batches must be {self.used}, those handed out, as a state of {name_of(self._source.loader)} is "
                f"that after its last batch, got {batches}. Draw no batch ahead from it."
            )
        return {**self._drawn.position(used * self._source.divider.per_step), "batches": used}


def _let_go(_: object) -> None:
    """Do nothing. :func:`weakref.finalize` keeps the argument alive until it calls this."""


class ShardedIterator(Iterator[Any]):
    """Iterates over this rank's part of a loader, and knows each batch's share.

    Args:
        source: The source of the batches.
        current: The pass.
        batches: The iterator of the source's loader.
        parts: Yields this rank's parts of the batches.
        steps: A queue. The iterator appends the step of each batch that it yields, without its part.
    """

    def __init__(
        self, source: DividedLoader, current: Pass, batches: Iterator[Any], parts: Iterator[Any], steps: deque[Step]
    ) -> None:
        self._source, self.current, self.loads_all = source, current, source.loads_all
        self.is_continued = current.used > 0  # begins amid a pass
        self.batches, self._parts, self._steps = batches, parts, steps
        self.samples: int | None = None  # of all ranks, in the last batch
        # Python's garbage collector finalizes the queues of a DataLoader's iterator before the iterator itself. Its
        # workers then get no message, and the process waits 5 s for each. A reference from here keeps the queues alive.
        weakref.finalize(self, _let_go, worker_queues(batches)).atexit = False

    @timed_loading
    def __next__(self) -> Any:
        try:
            part = next(self._parts)
        except StopIteration:
            self.current.is_over = True
            raise
        self._steps.append(step := self.current.hand_out())
        if len(self._steps) > 2:  # hosts draw one batch ahead; a loop may take none, and must not keep all
            self._steps[-3] = self._steps[-3]._replace(batches=[])
        self.samples = step.share.total
        return part

    def end(self) -> None:
        """End the workers that load the batches."""
        end_workers(self.batches)

    def take_share(self) -> Share | None:
        """Return the combined share of the batches drawn since the last call; ``None`` if there were none."""
        shares = [step.share for step in iter(functools.partial(self._source.take, self._steps), None)]
        return functools.reduce(operator.add, shares) if shares else None

    def whole_batch(self) -> WholeBatch:
        """Return the whole batch that was taken last, the same on every rank, and this rank's part of it.

        A collective. Samples of a map-style data set are loaded again, by a worker if the loader has some.

        Raises:
            ConfigurationError: The whole batch is not available, or batches of the same samples differ at random.
        """
        taken = self._source.taken
        found = self._source.compared(taken.batches) if taken and taken.batches else None
        if found is None:
            raise ConfigurationError(
                f"the whole batch of {name_of(self._source.loader)} is not available: it has not been drawn, or each "
                "process has batches of its own."
            )
        return found

    def __reduce__(self) -> Any:
        """Copies and pickles drop the iterator, like a ``DataLoader``'s."""
        return type(None), ()
