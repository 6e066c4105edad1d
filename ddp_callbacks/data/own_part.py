"""Loaders with a ``DistributedSampler``: they are this rank's part already, and go on where an earlier run stopped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from ddp_callbacks._torch import copied_loader, end_workers, forget_workers, replace_batch_sampler, replace_sampler
from ddp_callbacks.data.drawing import CountedSampler
from ddp_callbacks.data.passes import Pass
from ddp_callbacks.data.workers import StartingWorkers


def is_distributed(loader: Any) -> bool:
    """Whether the loader's sampler gives each rank its part."""
    samplers = [getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)]
    return any(isinstance(sampler, DistributedSampler) for sampler in samplers)


class OwnPart:
    """A copy of the user's loader, and the record of the pass under way."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = copied_loader(loader)
        self.record: Pass | None = None
        self.sources = (loader, loader.batch_sampler, loader.sampler)
        replace = replace_sampler if loader.batch_sampler is None else replace_batch_sampler
        sampler = loader.batch_sampler or loader.sampler
        self.counted = CountedSampler(sampler, is_alike=False, has_workers=loader.num_workers > 0)
        replace(self.loader, self.counted)

    def position(self, batches: int | None) -> dict[str, Any]:
        """The state of the pass under way."""
        assert self.record is not None
        return self.record.position(batches)


class OwnIterator(Iterator[Any]):
    """Iterates over this rank's part."""

    def __init__(self, part: OwnPart) -> None:
        assert part.record is not None
        self._part = part
        self._record = part.counted.record = part.record
        with StartingWorkers(part.loader):
            self.batches = iter(part.loader)
        if self._record.can_skip:
            part.counted.drawing.begin()

    def __next__(self) -> Any:
        try:
            batch = next(self.batches)
        except StopIteration:
            self._record.is_over = True
            raise
        self._record.hand_out(self._part.counted.draw.ends.popleft())
        return batch

    def end(self) -> None:
        """End the workers that load the batches."""
        end_workers(self.batches)


class OwnLoader:
    """This rank's part of the data, as its ``DistributedSampler`` gives it. It has the loader's attributes, too.

    Args:
        loader: The user's; it is not changed.
    """

    def __init__(self, loader: DataLoader[Any], *_: Any) -> None:
        self.loader = loader
        self.iterator: OwnIterator | None = None
        self._group: dist.ProcessGroup | None = None
        self._batch_size = "of each process"
        self._passes = 0
        self._part = OwnPart(loader)

    def __reduce__(self) -> Any:
        return type(self), (self.loader,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        self.iterator = OwnIterator(self._part)
        return self.iterator

    def end(self) -> None:
        """End the last pass. Its workers, if any, have ended when this returns."""
        iterator, self.iterator = self.iterator, None
        if iterator is not None:
            iterator.end()
        forget_workers(self._part.loader)
