"""Group gradients into buckets, and track how full each bucket is in a backward. No communication."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_callbacks.comm.protocol import Work
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.gradients.flat_buffer import BufferPool, FlatBuffer, copy_in

Kind = tuple[torch.dtype, torch.device, bool]
MB = 1024 * 1024
FIRST_BUCKET_MB = 1.0  # a small first bucket starts the overlap early, as in DDP (arXiv:2006.15704, section 4.2)


def check_bucket_cap_mb(bucket_cap_mb: float) -> None:
    """Raise :class:`ConfigurationError` unless ``bucket_cap_mb`` is a positive number."""
    if not isinstance(bucket_cap_mb, int | float) or not bucket_cap_mb > 0:
        raise ConfigurationError(f"bucket_cap_mb must be positive, got {bucket_cap_mb!r}.")


def assign_buckets(parameters: Sequence[torch.Tensor], bucket_cap_mb: float) -> list[list[int]]:
    """Split parameters into buckets.

    A bucket holds one dtype and device. Frozen parameters have separate buckets, so that they cost nothing until they
    are unfrozen.

    Args:
        parameters: In the order in which the module registers them.
        bucket_cap_mb: A bucket is closed once it holds this many MiB; a larger parameter gets a separate bucket. The
            first bucket of each kind is closed at 1 MiB.

    Returns:
        Indices into ``parameters``, bucket by bucket, in the order in which backward fills them: the reverse of the
        order of registration. Every index occurs once. The order depends only on sizes, dtypes, devices and what is
        trainable, so it is the same on all ranks and during the whole run (PowerSGD keeps its state by bucket index).
    """
    open_buckets: dict[Kind, list[int]] = {}
    nbytes: dict[Kind, int] = {}
    caps: dict[Kind, float] = {}
    closed: list[list[int]] = []
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        kind = parameter.dtype, parameter.device, parameter.requires_grad
        open_buckets.setdefault(kind, []).append(index)
        nbytes[kind] = nbytes.get(kind, 0) + parameter.numel() * parameter.dtype.itemsize
        if nbytes[kind] >= caps.get(kind, min(FIRST_BUCKET_MB, bucket_cap_mb)) * MB:
            closed.append(open_buckets.pop(kind))
            nbytes[kind], caps[kind] = 0, bucket_cap_mb
    return closed + list(open_buckets.values())


class Forecast:
    """Predicts which buckets the next backward fills, from data that all ranks share, so all predict the same.

    A bucket is filled if one of its parameters is trainable. That may change between backwards: a generator and a
    discriminator take turns. The prediction repeats what followed when the last few backwards came in this order
    before. If they never did, it repeats the last backward.

    Args:
        first: The buckets that the first backward fills.
    """

    def __init__(self, first: Sequence[int]) -> None:
        self.guess = tuple(first)
        self._seen = (self.guess,) * _REMEMBERED
        self._next: dict[tuple[tuple[int, ...], ...], tuple[int, ...]] = {}

    def note(self, filled: Sequence[int]) -> None:
        """Record the buckets that the backward has filled, and update ``guess`` for the next one."""
        now = tuple(filled)
        if len(self._next) >= _PATTERNS:
            self._next.clear()
        self._next[self._seen] = now
        self._seen = (*self._seen[1:], now)
        self.guess = self._next.get(self._seen, now)


_REMEMBERED = 4  # backwards: a turn of one generator step and up to three discriminator steps
_PATTERNS = 256


class Bucket:
    """Parameters that are sent together, and their progress in this backward.

    Args:
        index: The bucket's number.
        slots: The positions of its parameters in the reducer's list.
        pool: Memory for their gradients.
        names: Their names.
        run: The run in which their synchronizer was made. Others may have parameters with these names.
    """

    def __init__(self, index: int, slots: list[int], pool: BufferPool, names: Sequence[str], run: int = 1) -> None:
        self.index = index
        which = f" (synchronizer {run})" * (run > 1)
        self.purpose = f"the gradients of {names[0]}" + f" to {names[-1]}" * (len(names) > 1) + which
        self.slots = slots
        self.pool = pool
        self.deferred = False  # a gradient came twice before: launch at the end of backward
        self.start()

    def start(self) -> None:
        """Reset for a new backward."""
        self.frozen = [not parameter.requires_grad for parameter in self.pool.parameters]
        self.ready = self.frozen.copy()
        self.missing = self.ready.count(False)
        self.active = self.missing > 0
        self.is_dirty = False
        self.memory: FlatBuffer | None = None
        self.sum: Work | None = None

    def mark(self, position: int) -> None:
        """Mark the gradient of the parameter at ``position`` in this bucket as complete."""
        if not self.ready[position]:
            self.ready[position] = True
            self.missing -= 1
        elif self.memory is not None:
            self.is_dirty = self.deferred = True

    def fill(self, scale: float, used: list[bool]) -> None:
        """Move the scaled gradients into the buffer. Until :meth:`write_back`, used parameters have no gradient.

        So memory holds the gradients once. A later contribution becomes a new gradient, and a second call moves only
        the new gradients.

        Args:
            scale: The factor for the gradients.
            used: For each parameter of the reducer, whether it has a gradient of this backward; see
                :meth:`forget_lost`.
        """
        gradients = [parameter.grad for parameter in self.pool.parameters]
        if self.memory is None:
            self.forget_lost(used)
            # If this rank has weight 0, or a parameter is unused on all ranks, earlier gradients stay: don't overwrite.
            self.memory = self.pool.take(in_place=scale != 0 and all(used[slot] for slot in self.slots))
        else:
            gradients = [gradient if used[slot] else None for slot, gradient in zip(self.slots, gradients, strict=True)]
        copy_in(self.memory, gradients, scale)
        for slot, parameter in zip(self.slots, self.pool.parameters, strict=True):
            if used[slot] and scale:
                parameter.grad = None

    def wait(self) -> None:
        """Block until the sum is complete. Raises :class:`PeerError` if a rank fails."""
        assert self.sum is not None
        self.sum.wait()

    def reduced(self) -> torch.Tensor:
        """Return the gradients in the buffer, flat."""
        assert self.memory is not None
        return self.memory.flat[: self.memory.numel]

    def forget_lost(self, used: list[bool]) -> None:
        """Clear ``used`` where the gradient is gone, as after ``no_sync`` or a failed backward."""
        for slot, parameter in zip(self.slots, self.pool.parameters, strict=True):
            used[slot] = used[slot] and parameter.grad is not None

    def write_back(self, used: list[bool], keeps: bool) -> None:
        """Set the gradients of used parameters to the reduced ones; with ``keeps``, only where they are ``None``."""
        assert self.memory is not None
        for slot, parameter, view in zip(self.slots, self.pool.parameters, self.memory.views, strict=True):
            if used[slot] and not (keeps and parameter.grad is not None):
                parameter.grad = view
