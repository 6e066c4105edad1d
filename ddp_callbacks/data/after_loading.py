"""Division after loading: every rank produces the whole batches, under rank 0's random state, and takes its part.

How a resumable loader continues in a later run:

============================  =========================================================================================
with ``state_dict``, length   by its own ``state_dict``
any other iterable            every rank produces the used batches again and drops them, which takes as long as before
============================  =========================================================================================
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset, default_collate

from ddp_callbacks._torch import copied_loader, end_workers, keeps_iterator, override
from ddp_callbacks.comm.agreement import require_agreement
from ddp_callbacks.comm.checksums import checksum_of, is_dense
from ddp_callbacks.data.global_state import set_global_state
from ddp_callbacks.data.iterator import DividedLoader, Pass, ShardedIterator, Start
from ddp_callbacks.data.nested import arrays_in, has_state, is_data_loader, length_of, name_of, undividable
from ddp_callbacks.data.order_state import objects_of_order, other_batches
from ddp_callbacks.data.random_state import SharedRandomState
from ddp_callbacks.data.shares import Divider, Step, WholeBatch, common_size, slice_samples
from ddp_callbacks.data.workers import spared_workers
from ddp_callbacks.errors import ConfigurationError

_END = object()
_KEPT = 8  # steps that a host may have drawn ahead


class _Produced:
    """The batches of one pass, which every rank produces. The constructor is a collective."""

    def __init__(self, whole: AfterLoading, start: Start | None) -> None:
        self._whole, self._start = whole, start
        self._drawn = self._checksum = self._first = 0  # batches produced in this pass; checksums of all, of the first
        self._checksums: deque[tuple[int, int]] = deque(maxlen=_KEPT * whole.divider.per_step)
        self._attributes = start.attributes.take() if start else {}  # when the pass began
        if start and (position := start.position):
            self._attributes = position.get("attributes", {})
            start.attributes.load(self._attributes)
            set_global_state(position["begin"], whole.sources)
            if whole.is_stateful:
                whole.loader.load_state_dict(position["loader"])
        self._state = SharedRandomState(whole.sources, group=whole.group)

    def open(self) -> Iterator[Any]:
        """Return the loader's iterator, after the batches that an earlier run used."""
        with self._state.drawing(), spared_workers(self._whole.loader):
            batches: Iterator[Any] = iter(self._whole.loader)
        self._state.has_drawn = False  # a DataLoader draws the seed of its workers
        if self._start and self._start.position and self._start.position["drawn"]:
            self._skip(batches, self._start, self._start.position)
        return batches

    def _skip(self, batches: Iterator[Any], start: Start, position: Mapping[str, Any]) -> None:
        """Skip the batches that an earlier run used."""
        whole = self._whole
        if whole.is_stateful:
            self._drawn, self._state.state = position["drawn"], position["drawing"]
            set_global_state(start.before, whole.sources)
            return
        before = start.attributes.take()
        with self._state.drawing():
            for batch in itertools.islice(batches, position["drawn"]):
                self._note(batch)
        expected = position.get("checksum")
        if expected is not None and (self._drawn, self._checksum) != (position["drawn"], expected):
            raise other_batches(
                name_of(whole.loader),
                f"the first {self._drawn} of the pass have the checksum {self._checksum}, and the {position['drawn']} "
                f"there had {expected}",
            )
        start.attributes.put_others(start.plain, before)  # the state has what batches fetched ahead have changed, too

    def _note(self, batch: Any) -> None:
        self._drawn += 1
        self._checksum = checksum_of_content(batch, self._checksum)
        self._checksums.append((self._drawn, self._checksum))
        self._first = self._first or self._checksum

    def draw(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the remaining batches, the same ones on every rank. A collective."""
        for number in itertools.count():
            if self._whole.draws_here and self._start is None and (number == 0 or self._state.has_drawn):
                self._state.follow()
            with self._state.drawing():
                batch = next(batches, _END)
            if batch is _END:
                return
            if number == 0:
                self._whole.require_divisible(batch)
            self._note(batch)
            self._whole.warn_of_turns(self._state, self._start)
            yield batch

    def checksum(self, drawn: int) -> int:
        return dict(self._checksums).get(min(drawn, self._drawn), 0)

    def position(self, drawn: int) -> Mapping[str, Any]:
        whole, drawn = self._whole, min(drawn, self._drawn)
        found = {
            "drawn": drawn,
            "checksum": self.checksum(drawn) or None,
            "again": {"drawn": 1, "checksum": self._first},
            "begin": self._state.begin,
            "attributes": self._attributes,
        }
        if not whole.is_stateful:
            return found
        return found | {"drawing": self._state.state, "loader": whole.loader.state_dict()}


class AfterLoading(DividedLoader):
    """A loader that produces whole batches.

    Args:
        loader: The user's loader; it is not changed.
        is_resumable: Whether a later run may resume in the middle of a pass.

    Attributes:
        is_stateful: Whether the loader resumes by a ``state_dict`` of its own, like torchdata's
            ``StatefulDataLoader``.
        draws_here: Whether what loads batches may draw from this process's random state meanwhile.
    """

    def __init__(
        self, loader: Any, divider: Divider, group: dist.ProcessGroup | None, is_resumable: bool = False
    ) -> None:
        self._items_are_samples = _yields_samples(loader)
        # Hosts draw a batch ahead from a loader without a length, so its state would include a batch too many.
        self.is_stateful = is_resumable and has_state(loader) and length_of(loader) is not None
        if is_resumable and is_data_loader(loader):
            if keeps_iterator(loader):
                raise ConfigurationError(
                    f"{type(loader).__name__} keeps an iterator of its own from pass to pass, and where it is cannot "
                    "be saved. Use a plain DataLoader with persistent_workers=True, or do not make the run resumable."
                )
            loader = copied_loader(loader)
            if not self.is_stateful:
                override(loader, persistent_workers=False)  # otherwise workers' draws depend on earlier passes
        self.draws_here = divider.world_size > 1 and not getattr(loader, "num_workers", 0)
        roots = {"loader": loader, "sampler": getattr(loader, "sampler", None)}
        super().__init__(loader, objects_of_order(**roots, dataset=getattr(loader, "dataset", None)), divider, group)
        self.loads_all = divider.division != "own"

    def iterate(self, steps: deque[Step], limit: int | None, start: Start | None) -> ShardedIterator:
        if start and start.last:
            end_workers(_Produced(self, start.of_last()).open())
            start.put_back(self.sources)
        produced = _Produced(self, start)
        batches, current = produced.open(), Pass(self, produced, limit, start)
        parts = (step.part for step in current.draw(produced.draw(batches)))
        return ShardedIterator(self, current, batches, parts, steps)

    def size_of(self, drawn: Any) -> int:
        """Return the number of samples in a batch; 1 for a batch that is not divided.

        Raises:
            ConfigurationError: The batch must be divided, but cannot be.
        """
        size = None if self._items_are_samples else common_size(drawn)
        if size is None and self.divider.division == "global" and self.divider.world_size > 1:
            shapes = ", ".join(str(list(array.shape)) for array in itertools.islice(arrays_in(drawn), 4))
            why = "is taken for one sample" if self._items_are_samples else "has no common first dimension"
            raise undividable(name_of(self.loader), f"({type(drawn).__name__}: {shapes or 'no tensors'}) {why}")
        return 1 if size is None else size

    def part_of(self, drawn: Any, part: slice) -> Any:
        return slice_samples(drawn, self.size_of(drawn), part)

    def compared(self, drawn: list[Any]) -> WholeBatch | None:
        if self.divider.division != "global":
            return None
        part, share = self.divider.to_compare(self.size_of(drawn[0]))
        return WholeBatch(drawn[0], self.part_of(drawn[0], part), share)

    def require_divisible(self, batch: Any) -> None:
        """Raise unless the first batch is equal on all ranks, with samples along its first dimension. A collective."""
        if self.divider.world_size == 1:
            return
        name = name_of(self.loader)
        require_agreement(
            {f"{name}: checksum of the first batch": checksum_of_content(batch)},
            f"the batches that {name} yields",
            f"Every process yields the batches of {name} under rank 0's random state (torch's, Python's and "
            "NumPy's global ones), and takes its part of each. Yield the same on every process. (In Lightning, "
            "Trainer(use_distributed_sampler=False) leaves loaders alone that yield each process's own.)",
            self.group,
        )
        _require_samples_first(self.loader, batch)


def checksum_of_content(batch: Any, checksum: int = 0) -> int:
    """Return a checksum of the shape and the first 64 numbers of each tensor and array in a batch.

    Args:
        checksum: That of the batches before.
    """
    arrays = [array for array in arrays_in(batch) if not isinstance(array, torch.Tensor) or is_dense(array)]
    # A subclass may have a reshape of its own.
    plain = [array.as_subclass(torch.Tensor) if isinstance(array, torch.Tensor) else array for array in arrays]
    return checksum_of([(list(array.shape), array.reshape(-1)[:64]) for array in plain], checksum)


def _yields_samples(loader: Any) -> bool:
    """Whether the loader yields single items of a map-style data set, whose first dimension can be anything."""
    data = loader.dataset if is_data_loader(loader) else loader
    is_map_style = isinstance(data, Dataset) and not isinstance(data, IterableDataset)
    return is_map_style and getattr(loader, "batch_sampler", None) is None


def _require_samples_first(loader: Any, batch: Any) -> None:
    """Raise if the loader's ``collate_fn`` has put the samples of the first batch along the second dimension."""
    if not is_data_loader(loader) or not loader.batch_size or loader.collate_fn is default_collate:
        return
    size = loader.batch_size
    shapes = [list(tensor.shape) for tensor in arrays_in(batch) if tensor.ndim > 1]
    if size > 1 and shapes and all(first != size == second for first, second, *_ in shapes):
        raise ConfigurationError(
            "samples must lie along the first dimension of a batch, which is divided, got tensors of shape "
            f"{', '.join(map(str, shapes))} with batch_size={size}. Let collate_fn put the samples first "
            "(batch_first), and transpose in the model."
        )
