"""A loader becomes this rank's part of it.

With ``batch_size="global"`` the batches stay the user's: every rank draws the same batches, in the same order, and
takes its slice of each, so the number of steps, schedules and logging need no change. With ``"per_process"`` each rank
takes whole batches in turn, so that N ranks consume N batches a step.

How a batch is divided depends on where it can be:

==============================  =======================================================================================
map-style ``DataLoader``        before loading: a rank loads its samples only (:class:`_SlicedBatchSampler`)
any other iterable of batches   after loading: every rank produces the whole batch under rank 0's random state and
                                keeps its slice of every tensor
not divisible                   one rank, in turn, computes the batch
``DistributedSampler`` inside   left alone, it is a part already
==============================  =======================================================================================

A rank that gets nothing of a batch still runs it, so that all ranks make the same calls, and gets a padding batch; its
:class:`Share` says 0 samples, and it counts nowhere.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import warnings
import weakref
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from ddp_callbacks._torch import replace_batch_sampler
from ddp_callbacks.comm.agreement import require_agreement
from ddp_callbacks.comm.checksums import checksum_of, is_dense
from ddp_callbacks.data.nested import arrays_in, is_array, rebuild_mapping, rebuild_sequence
from ddp_callbacks.data.random_state import SharedRandomState
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.process_group import get_rank, get_world_size

BatchSize = Literal["global", "per_process"]
BATCH_SIZES = ("global", "per_process")
_COMPARED_ROWS = 1 << 16

_LEFT_ALONE = (
    "The loader of {name} has a DistributedSampler, so it is left as it is: its batch is that of one process, not "
    "divided among all, and there are fewer steps than on one process. Give the loader without that sampler, or say by "
    'batch_size="per_process" that this is meant. (A library may put the sampler there because it finds "ddp" in the '
    'name of the Trainer\'s strategy: strategy="callbacks" is another name for "ddp_callbacks".)'
)


@dataclass(frozen=True)
class Share:
    """This rank's part of a batch.

    Attributes:
        local: Number of samples on this rank; 0 where it holds a padding batch.
        total: Number of samples on all ranks, ``None`` where it is not known here.
    """

    local: int
    total: int | None

    def __add__(self, other: Share) -> Share:
        total = None if self.total is None or other.total is None else self.total + other.total
        return Share(self.local + other.local, total)


def check_batch_size(batch_size: str) -> None:
    """Raise :class:`ConfigurationError` unless it is one of :data:`BATCH_SIZES`."""
    if batch_size not in BATCH_SIZES:
        raise ConfigurationError(
            f'batch_size must be one of "global" (the loader\'s batch is divided among the processes) and '
            f'"per_process" (each process takes whole batches), got {batch_size!r}.'
        )


def slice_bounds(size: int, rank: int, world_size: int, at_least: int = 1) -> tuple[int, int]:
    """Start and end of ``rank``'s part of ``size`` samples, divided among ``world_size`` ranks.

    Parts differ by one sample at most, and the first ranks have the longer ones. Local.

    Args:
        at_least: No part is smaller, but those of ranks that get nothing; where ``size`` is, the first rank has all.
    """
    world_size = min(world_size, max(1, size // at_least))
    if rank >= world_size:
        return size, size
    base, extra = divmod(size, world_size)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)


def uneven_bounds(size: int, rank: int, world_size: int) -> tuple[int, int] | None:
    """As :func:`slice_bounds`, in parts of which rank r's is r + 1 times rank 0's; each has two samples or more.

    ``None`` where ``size`` is too small for that. Local.
    """
    shares = world_size * (world_size + 1)
    if size < shares:
        return None
    return size * rank * (rank + 1) // shares, size * (rank + 1) * (rank + 2) // shares


@dataclass(frozen=True)
class WholeBatch:
    """A batch, the same on every rank, and a part of it.

    Attributes:
        whole: The batch.
        part: This rank's, where that can be of other sizes than in training: equal parts would hide wrong weights.
        share: Of the part.
    """

    whole: Any
    part: Any
    share: Share


class ShardedLoader:
    """This rank's part of a loader; has its length and, by delegation, its attributes.

    Made by :func:`shard_loader`. Iterating is a collective: all ranks must begin it together and ask for equally many
    batches.

    Args:
        loader: The user's, which stays as it is.
        batch_size: ``"global"`` or ``"per_process"``, see :func:`shard_loader`.
        group: ``None`` is the default group.
        at_least: See :func:`shard_loader`.

    Attributes:
        shares: Of the batches that were drawn and whose share nobody has taken yet, the oldest first.
        iterator: The last one that was begun.
    """

    def __init__(self, loader: Any, batch_size: BatchSize, group: dist.ProcessGroup | None, at_least: int) -> None:
        self.loader = loader
        self.shares: deque[Share] = deque()
        self.iterator: ShardedIterator | None = None
        self._batch_size = batch_size
        self._group = group
        self._passes = 0
        self._at_least = at_least
        self._sliced = _sliced_before_loading(loader, batch_size, group, at_least)

    def __reduce__(self) -> Any:
        """A copy, or a pickle, divides among the ranks of the default group, and begins anew."""
        return type(self), (self.loader, self._batch_size, None, self._at_least)

    def end(self) -> None:
        """End the last pass: its workers, if it has any, have ended on return."""
        iterator, self.iterator = self.iterator, None
        loaders = [self.loader, self._sliced.loader] if isinstance(self._sliced, _Part) else [self.loader]
        if iterator is not None:
            iterator.end()
        for loader in loaders:
            if isinstance(loader, DataLoader):
                loader._iterator = None

    def keep_indices(self) -> None:
        """Keep the indices of each batch that is drawn from now on, see :attr:`indices`."""
        if isinstance(self._sliced, _Part):
            self._sliced.sampler.keeps_indices = True

    @property
    def indices(self) -> list[list[Any]] | None:
        """This rank's indices of each batch of the last pass, if they were kept; empty for a padding batch."""
        sampler = self._sliced.sampler if isinstance(self._sliced, _Part) else None
        return sampler.draw.indices if sampler is not None and sampler.keeps_indices else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        length = len(self.loader)
        return length if self._batch_size == "global" else -(-length // get_world_size(self._group))

    def __iter__(self) -> ShardedIterator:
        if isinstance(self._sliced, _Part):
            self.iterator = _PartIterator(self._sliced, self.shares)
        elif self._batch_size == "global":
            self.iterator = _SlicingIterator(
                self.loader, self._group, self.shares, at_least=self._at_least, is_first=self._passes == 0
            )
        else:
            self.iterator = _TakingIterator(self.loader, self._group, self.shares)
        self._passes += 1
        return self.iterator


class ShardedDataLoader(ShardedLoader, DataLoader[Any]):  # type: ignore[misc]
    """Of a ``DataLoader``: one to those who ask (``isinstance``), with the attributes of the user's."""

    @property
    def _iterator(self) -> Any:
        """As a ``DataLoader`` has it, for who ends the workers."""
        return None if self.iterator is None else self.iterator.batches

    @_iterator.setter
    def _iterator(self, _: Any) -> None:
        self.end()


def shard_loader(
    loader: Any, batch_size: BatchSize = "global", group: dist.ProcessGroup | None = None, at_least: int = 1
) -> Any:
    """``loader`` for this rank: a :class:`ShardedLoader`, or ``loader`` itself where it is this rank's part already.

    That is so in a world of one, for one that was sharded before, and for one with a ``DistributedSampler``. The
    loader itself is never changed. Local, no communication; it is iterating over what is returned that all ranks do
    together.

    Args:
        loader: A ``DataLoader``, or any iterable of batches. A batch is a tensor, or tensors in lists, tuples and
            dicts, with the samples along the first dimension.
        batch_size: ``"global"``: each rank gets its slice of every batch. ``"per_process"``: each rank takes whole
            batches in turn.
        group: ``None`` is the default group.
        at_least: A rank gets so many samples of a ``"global"`` batch, or none; what
            :func:`ddp_callbacks.samples_needed` says of the model.

    Raises:
        ConfigurationError: Another ``batch_size``; torchdata's ``StatefulDataLoader``; or a loader that cannot be
            divided before loading, with workers and ``in_order=False``.
    """
    check_batch_size(batch_size)
    if get_world_size(group) == 1 or loader is None or isinstance(loader, ShardedLoader):
        return loader
    if any(kind.__name__ == "StatefulDataLoader" for kind in type(loader).__mro__):
        raise ConfigurationError(
            f"a StatefulDataLoader of torchdata cannot be divided among {get_world_size(group)} processes: its state "
            "would say how far one of them has come. Give a torch.utils.data.DataLoader with the same arguments."
        )
    if is_distributed(loader):
        if batch_size == "global" and get_rank(group) == 0:
            warnings.warn(_LEFT_ALONE.format(name=_name_of(loader)), stacklevel=2)
        return loader
    return (ShardedDataLoader if isinstance(loader, DataLoader) else ShardedLoader)(loader, batch_size, group, at_least)


def length_of(loader: Any) -> int | None:
    """The number of batches; ``None`` where the loader does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def with_shares(loader: Iterable[Any]) -> Iterator[tuple[Any, Share]]:
    """The batches of what :func:`shard_loader` returned, each with its :class:`Share`: for a loop of your own.

    In that loop ``synchronizer.weigh(share.local, share.total)`` goes before backward
    (:class:`ddp_callbacks.GradientSynchronizer`). A batch of which this rank has no sample is yielded as well, as a
    padding batch with a local share of 0: run it like any other. A collective, as iterating is.

    Args:
        loader: What :func:`shard_loader` returned, in a world of one the loader itself.

    Raises:
        MismatchError: At the first and after the last batch, where a sampler draws different batches on the ranks.
    """
    batches = iter(loader)
    for batch in batches:
        share = batches.take_share() if isinstance(batches, ShardedIterator) else None
        yield batch, share or _share_of_own(batch)
    if isinstance(batches, ShardedIterator):
        batches.check_agreement()


def _share_of_own(batch: Any) -> Share:
    """Of a batch that is not divided: the whole of a world of one, or a ``DistributedSampler``'s part."""
    size = common_size(batch)
    local = 1 if size is None else size
    return Share(local, local if get_world_size() == 1 else None)


def is_distributed(loader: Any) -> bool:
    """Whether the loader's sampler gives each rank its part."""
    samplers = [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]
    return any(isinstance(sampler, DistributedSampler) for sampler in samplers)


def _name_of(loader: Any) -> str:
    return type(getattr(loader, "dataset", loader)).__name__


def _let_go(_: object) -> None:
    """The caller's reference is gone after this."""


class ShardedIterator(Iterator[Any]):
    """Iterates over this rank's part, and knows how many samples each batch had here and everywhere.

    Args:
        batches: Those of the loader that is divided.
        shares: Filled with the :class:`Share` of each batch as it is drawn.
    """

    def __init__(self, batches: Iterator[Any], shares: deque[Share]) -> None:
        self.batches = batches
        self._shares = shares
        # Python's garbage collector finalizes the queues of a DataLoader's iterator before it ends the iterator, whose
        # workers then hear nothing, and are waited for 5 s each. Referenced from here, the queues are no garbage.
        weakref.finalize(self, _let_go, getattr(batches, "_index_queues", None)).atexit = False

    def end(self) -> None:
        """End the workers that load the batches."""
        shut_down = getattr(self.batches, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()

    def take_share(self) -> Share | None:
        """The share of the batches drawn since the last call; ``None`` if none was."""
        if not self._shares:
            return None
        taken = functools.reduce(operator.add, self._shares)
        self._shares.clear()
        return taken

    def first_batch(self) -> WholeBatch:
        """The first batch of this pass, on every rank, and a part of it.

        A collective, after the first batch was drawn and before the third is. Samples of a map-style data set are
        loaded again, in this process.

        Raises:
            ConfigurationError: The whole batch cannot be had.
        """
        raise NotImplementedError

    def __reduce__(self) -> Any:
        """As of a ``DataLoader``'s iterator, nothing is left of it in a copy of what holds it."""
        return type(None), ()

    def check_agreement(self) -> None:
        """Compare what the ranks have drawn. A collective; call it at the end of a pass.

        Raises:
            MismatchError: They have drawn different batches, as a sampler with a random state of its own does.
        """


# --- divided before loading ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Division:
    """The indices of one step, divided among the ranks.

    Attributes:
        whole: Those of all ranks.
        part: This rank's.
        start: Where in ``whole`` they begin.
    """

    whole: Sequence[Any]
    part: Sequence[Any]
    start: int
    share: Share


class _Draw:
    """One pass over a batch sampler: the shares of the batches drawn, a checksum of all indices, the first division."""

    def __init__(self) -> None:
        self.shares: deque[Share] = deque()
        self.indices: list[list[Any]] = []  # of this rank's parts, if they are kept
        self.checksum = 0
        self.first: _Division | None = None


class _SlicedBatchSampler:
    """Yields this rank's indices of each batch that ``batch_sampler`` yields, under rank 0's random state."""

    def __init__(
        self, loader: DataLoader[Any], batch_size: BatchSize, group: dist.ProcessGroup | None, at_least: int
    ) -> None:
        self._loader = loader
        self.batch_sampler: Any = loader.batch_sampler
        self.sampler = getattr(self.batch_sampler, "sampler", None)
        self._divide = functools.partial(_slices, at_least=at_least) if batch_size == "global" else _turns
        self.group = group
        self.keeps_indices = False
        self.draw = _Draw()
        self._compared = type(loader.dataset).__module__ != "torch.utils.data.dataset"

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Sequence[Any]]:
        self.draw = _Draw()
        return self._iterate(self.draw)

    def _iterate(self, draw: _Draw) -> Iterator[Sequence[Any]]:
        # Runs at the first next(): by then rank 0's DataLoader has drawn the seed of its workers, as without us.
        sources = (self._loader, self.batch_sampler, self.sampler)
        torch_only = _is_torchs(self.batch_sampler) and _is_torchs(self.sampler)
        shared = SharedRandomState(sources, torch_only=torch_only, group=self.group)
        batches = self._drawn(shared, draw)
        divided = self._divide(batches, get_rank(self.group), get_world_size(self.group))
        for division in divided:
            if draw.first is None:
                draw.first = division
                self._require_same_data()
                self.check_agreement(draw)
            draw.shares.append(division.share)
            if self.keeps_indices:
                draw.indices.append(list(division.part) if division.share.local else [])
            yield division.part

    def _require_same_data(self) -> None:
        """Raise unless what is cheap to compare of the data set is equal on all ranks; once for a loader."""
        if self._compared:
            return
        self._compared = True
        name = type(self._loader.dataset).__name__
        require_agreement(
            {f"{name}: checksum of its indices and labels": checksum_of(_cheaply_described(self._loader.dataset))},
            "the data",
            "Every process takes its part of the same data: give random_split a seed, and read the same files.",
            self.group,
        )

    def check_agreement(self, draw: _Draw) -> None:
        """Raise unless all ranks have drawn the same so far."""
        name = type(self.sampler if _is_torchs(self.batch_sampler) else self.batch_sampler).__name__
        require_agreement(
            {f"{name}: checksum of the indices drawn so far": draw.checksum},
            f"the batches that {name} draws",
            f"Every process runs {name} under rank 0's random state (torch's, Python's and NumPy's global ones and "
            "generators that are its attributes). Take its randomness from one of these, not from the clock, the "
            "process id or os.urandom.",
            self.group,
        )

    def _drawn(self, shared: SharedRandomState, draw: _Draw) -> Iterator[Sequence[Any]]:
        batches = iter(self.batch_sampler)
        while True:
            with shared.drawing():
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            draw.checksum = checksum_of(batch, draw.checksum)
            yield batch


def _cheaply_described(dataset: Any) -> Any:
    """Of torch's data sets what is exact and quick to compare: which samples, and integers such as labels."""
    if isinstance(dataset, Subset):
        return [torch.as_tensor(dataset.indices), _cheaply_described(dataset.dataset)]
    if isinstance(dataset, ConcatDataset):
        return list(map(_cheaply_described, dataset.datasets))
    if isinstance(dataset, TensorDataset):
        return [(str(found.dtype), found.shape, _integers(found)) for found in dataset.tensors]
    return None


def _integers(tensor: torch.Tensor) -> torch.Tensor | None:
    is_exact = is_dense(tensor) and not (tensor.is_floating_point() or tensor.is_complex())
    return tensor[:_COMPARED_ROWS] if is_exact and tensor.dim() == 1 else None


class _Part:
    """A ``DataLoader`` like the user's that loads this rank's samples only."""

    def __init__(
        self, loader: DataLoader[Any], batch_size: BatchSize, group: dist.ProcessGroup | None, at_least: int
    ) -> None:
        self.sampler = _SlicedBatchSampler(loader, batch_size, group, at_least)
        self.loader = copy.copy(loader)
        # A shallow copy keeps the user's class and options.
        # The shares are those of the batches in the sampler's order.
        replace_batch_sampler(self.loader, self.sampler)
        if get_rank(group) != 0:
            self.loader.generator = None  # the workers' seeds come from this rank's own random state


class _PartIterator(ShardedIterator):
    def __init__(self, part: _Part, shares: deque[Share]) -> None:
        super().__init__(iter(part.loader), shares)
        self._loader = part.loader
        self._sampler = part.sampler
        self._draw = part.sampler.draw

    def __next__(self) -> Any:
        batch = next(self.batches)
        self._shares.append(self._draw.shares.popleft())
        return batch

    def first_batch(self) -> WholeBatch:
        division, group = self._draw.first, self._sampler.group
        if division is None:
            raise ConfigurationError("the first batch must be drawn before it can be had as a whole, got none so far.")
        with SharedRandomState(group=group).drawing():
            samples = _load(self._loader.dataset, division.whole)
        collate, size = self._loader.collate_fn, len(division.whole)
        start, end = division.start, division.start + len(division.part)
        share = division.share
        if bounds := uneven_bounds(size, get_rank(group), get_world_size(group)):
            start, end = bounds
            share = Share(end - start, size)
        return WholeBatch(collate(samples), collate(samples[start:end]), share)

    def check_agreement(self) -> None:
        self._sampler.check_agreement(self._draw)


def _load(dataset: Any, indices: Sequence[Any]) -> Any:
    """As ``DataLoader`` loads them."""
    load_many = getattr(dataset, "__getitems__", None)
    return load_many(indices) if load_many else [dataset[index] for index in indices]


def _sliced_before_loading(
    loader: Any, batch_size: BatchSize, group: dist.ProcessGroup | None, at_least: int
) -> _Part | None:
    if not isinstance(loader, DataLoader):
        return None
    if loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset):
        return _Part(loader, batch_size, group, at_least)
    if loader.num_workers and not loader.in_order:
        raise ConfigurationError(
            "DataLoader(in_order=False) must be in_order=True here: every process loads all batches and takes its part "
            "of each, and without order they come in another order on each."
        )
    return None


def _slices(batches: Iterator[Sequence[Any]], rank: int, world_size: int, at_least: int) -> Iterator[_Division]:
    for batch in batches:
        start, end = slice_bounds(len(batch), rank, world_size, at_least)
        # The padding batch is the whole batch: it has too few samples for all ranks, and as many as one process sees.
        part = batch[start:end] if end > start else batch
        yield _Division(batch, part, start if end > start else 0, Share(end - start, len(batch)))


def _turns(batches: Iterator[Sequence[Any]], rank: int, world_size: int) -> Iterator[_Division]:
    while turn := list(itertools.islice(batches, world_size)):
        mine = turn[rank] if rank < len(turn) else None
        share = Share(len(mine or ()), sum(map(len, turn)))
        start = sum(map(len, turn[:rank])) if mine is not None else 0
        yield _Division(list(itertools.chain(*turn)), turn[0] if mine is None else mine, start, share)


def _is_torchs(sampler: object) -> bool:
    return sampler is None or type(sampler).__module__.startswith("torch.utils.data")


# --- divided after loading -----------------------------------------------------------------------------------------


class _WholeIterator(ShardedIterator):
    """Produces the batches of a loader that can't be divided before loading, the same ones on every rank."""

    def __init__(self, loader: Iterable[Any], group: dist.ProcessGroup | None, shares: deque[Share]) -> None:
        self._group, self._rank, self._world_size = group, get_rank(group), get_world_size(group)
        self._name = _name_of(loader)
        self._loads = isinstance(loader, DataLoader)
        self._items_are_samples = _yields_samples(loader)
        self._loader = loader
        self._position = -1
        self._first: WholeBatch | None = None
        dataset = getattr(loader, "dataset", None)
        self._shared = SharedRandomState([loader, dataset], group=group)
        with self._shared.drawing():
            super().__init__(iter(loader), shares)

    def _next_whole(self) -> Any:
        with self._shared.drawing():
            batch = next(self.batches)
        self._position += 1
        if self._position == 0:
            self._require_equal(batch)
            _require_samples_first(self._loader, batch)
        return batch

    def first_batch(self) -> WholeBatch:
        if self._first is None:
            raise ConfigurationError(
                f"the first batch of {self._name} cannot be had as a whole: it is not kept any more, or "
                'batch_size="per_process" makes a step of several batches.'
            )
        size = self._size(self._first.whole)
        bounds = None if size is None else uneven_bounds(size, self._rank, self._world_size)
        if size is None or bounds is None:
            return self._first
        part = _slice(self._first.whole, size, slice(*bounds))
        return WholeBatch(self._first.whole, part, Share(bounds[1] - bounds[0], size))

    def _keep(self, whole: Any, part: Any, share: Share) -> None:
        """Hosts draw one batch ahead; then the first is let go."""
        if self._position == 0:
            self._first = WholeBatch(whole, part, share)
        elif self._position == 2:
            self._first = None

    def _require_equal(self, batch: Any) -> None:
        """Every rank divides the same batch; raise unless the first is equal on all."""
        checksum = 0
        for tensor in arrays_in(batch):
            if isinstance(tensor, torch.Tensor) and not tensor.is_sparse and tensor.numel():
                raw = tensor.detach().cpu().contiguous().view(-1)
                checksum = zlib.crc32(repr((tensor.shape, raw[:64].tolist())).encode(), checksum)
        require_agreement(
            {f"{self._name}: checksum of the first batch": checksum},
            f"the batches that {self._name} yields",
            f"Every process yields the batches of {self._name} under rank 0's random state (torch's, Python's and "
            "NumPy's global ones), and takes its part of each. Yield the same on every process. (In Lightning, "
            "Trainer(use_distributed_sampler=False) leaves loaders alone that yield each process's own.)",
            self._group,
        )

    def _size(self, batch: Any) -> int | None:
        return None if self._items_are_samples else common_size(batch)


class _SlicingIterator(_WholeIterator):
    """Keeps this rank's slice of every tensor; says in the first pass that it cannot."""

    def __init__(self, *args: Any, at_least: int, is_first: bool) -> None:
        super().__init__(*args)
        self._at_least, self._is_first = at_least, is_first

    def __next__(self) -> Any:
        batch = self._next_whole()
        size = self._size(batch)
        if size is None:
            if self._position == 0 and self._rank == 0 and self._is_first:
                self._warn(batch)
            part, share = batch, Share(int(self._position % self._world_size == self._rank), 1)
        else:
            part, share = slice_batch(batch, size, self._rank, self._world_size, self._at_least)
        self._keep(batch, part, share)
        self._shares.append(share)
        return part

    def _warn(self, batch: Any) -> None:
        shapes = ", ".join(str(list(array.shape)) for array in itertools.islice(arrays_in(batch), 4))
        remedy = "Yield tensors that all have the samples in front" if self._loads else "Give a DataLoader"
        why = "has no common first dimension to divide"
        if self._items_are_samples and self._loads:
            why = "is taken for one sample (batch_size=None)"
        warnings.warn(
            f"A batch of {self._name} ({type(batch).__name__}: {shapes or 'no tensors'}) {why}, so each "
            "is computed by one process in turn: right, but no faster than one process. "
            f"{remedy}; or a data set with samples by index, of which each process loads its own; or "
            'batch_size="per_process".',
            stacklevel=3,
        )


class _TakingIterator(_WholeIterator):
    """Takes every ``world_size``-th batch."""

    def __next__(self) -> Any:
        turn = [self._next_whole()]
        for _ in range(self._world_size - 1):
            try:
                turn.append(self._next_whole())
            except StopIteration:
                break
        sizes = [size if (size := self._size(batch)) is not None else 1 for batch in turn]
        mine = self._rank < len(turn)
        self._shares.append(Share(sizes[self._rank] if mine else 0, sum(sizes)))
        return turn[self._rank if mine else 0]


def _yields_samples(loader: Any) -> bool:
    """Whether its items are what a map-style data set has under one index, which may have any first dimension."""
    if isinstance(loader, DataLoader) and loader.batch_sampler is None:
        return _is_map_style(loader.dataset) and not isinstance(loader.sampler, BatchSampler)
    return _is_map_style(loader)


def _is_map_style(data: Any) -> bool:
    return isinstance(data, Dataset) and not isinstance(data, IterableDataset)


def _require_samples_first(loader: Any, batch: Any) -> None:
    """Raise where a loader's own ``collate_fn`` has put the samples of the first batch along the second dimension."""
    if not isinstance(loader, DataLoader) or not loader.batch_size or loader.collate_fn is default_collate:
        return
    size = loader.batch_size
    shapes = [list(tensor.shape) for tensor in arrays_in(batch) if tensor.ndim > 1]
    if size > 1 and shapes and all(first != size == second for first, second, *_ in shapes):
        raise ConfigurationError(
            "samples must lie along the first dimension of a batch, which is divided, got tensors of shape "
            f"{', '.join(map(str, shapes))} with batch_size={size}. Let collate_fn put the samples first "
            "(batch_first), and transpose in the model."
        )


def slice_batch(batch: Any, size: int, rank: int, world_size: int, at_least: int = 1) -> tuple[Any, Share]:
    """This rank's slice of a loaded batch of ``size`` samples; the whole as a padding batch where that is empty."""
    start, end = slice_bounds(size, rank, world_size, at_least)
    part = _slice(batch, size, slice(start, end)) if end > start else batch
    return part, Share(end - start, size)


def common_size(batch: Any) -> int | None:
    """The number of samples: the first dimension that all tensors and arrays of ``batch`` share, ``None`` if none."""
    sizes = {array.shape[0] if array.ndim else None for array in arrays_in(batch)}
    return sizes.pop() if len(sizes) == 1 else None


def _slice(batch: Any, size: int, part: slice) -> Any:
    if is_array(batch):
        return batch[part]
    if isinstance(batch, Mapping):
        return rebuild_mapping(batch, {key: _slice(value, size, part) for key, value in batch.items()})
    if isinstance(batch, list | tuple):
        if len(batch) == size and not any(True for _ in arrays_in(batch)):
            return batch[part]  # one entry per sample, file names say
        return rebuild_sequence(batch, [_slice(value, size, part) for value in batch])
    return batch
