"""DDP's communication hooks, unchanged: the interface for custom all-reduce algorithms.

A hook is ``hook(state, bucket) -> Future[Tensor]``; the future's value is the flat, averaged gradient. torch's hooks
(``torch.distributed.algorithms.ddp_comm_hooks``) and hooks written for ``DistributedDataParallel.register_comm_hook``
work without changes: they get a :class:`GradBucket` with the methods of torch's ``dist.GradBucket`` (which has no
constructor in Python).

The engine guarantees to a hook:

- buckets are launched in the order of their index, each once per backward, on every rank;
- order, number and shapes never change during a run, so state can be keyed by ``bucket.index()``;
- the buffer is not yet divided by the world size; the hook averages;
- if the hook has an attribute ``allocate(numel, dtype, device) -> Tensor``, it supplies the buckets' memory, for
  example memory shared by all processes of a node.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.process_group.failures import Launched, wait

CommHook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]

_NEEDS_DDP = {
    "ddp_zero_hook": "it drives a ZeroRedundancyOptimizer from inside the DistributedDataParallel object",
    "optimizer_overlap_hooks": "it runs the optimizer from inside the DistributedDataParallel reducer",
    "mixed_precision_hooks": "it casts through the DistributedDataParallel reducer; use bf16_compress_hook instead",
}


class GradBucket:
    """A bucket of gradients, as a communication hook gets it. It has the methods of ``torch.distributed.GradBucket``.

    Args:
        index: The position of this bucket in the launch order, from 0.
        buffer: All gradients of the bucket, of shape ``[numel]``; not yet divided by the number of ranks.
        parameters: The parameters of these gradients, in the order of the buffer.
        is_last: Whether this is the last bucket of this backward.
    """

    def __init__(
        self, index: int, buffer: torch.Tensor, parameters: Sequence[torch.nn.Parameter], *, is_last: bool
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._parameters = list(parameters)
        self._is_last = is_last

    def index(self) -> int:
        """Return the position of this bucket in the launch order, from 0."""
        return self._index

    def is_last(self) -> bool:
        """Return whether this is the last bucket of this backward."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """Return all gradients of the bucket, flat."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the flat tensor, for example by a compressed ``buffer``. Don't call :meth:`gradients` afterwards."""
        self._buffer = buffer

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters, in the order of their gradients in the buffer."""
        return list(self._parameters)

    def gradients(self) -> list[torch.Tensor]:
        """Return views into the buffer, one per parameter, with the parameter's shape."""
        parts = self._buffer.split([parameter.numel() for parameter in self._parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self._parameters, strict=True)]


@dataclass(frozen=True)
class FutureWork:
    """The work handle of a hook's future; see :class:`.protocol.Work`.

    Attributes:
        future: The hook's future; its value is the averaged gradient.
        result: The flat tensor that receives this value.
        group: The ranks' process group.
        purpose: For messages.
    """

    future: torch.futures.Future[torch.Tensor]
    result: torch.Tensor
    group: dist.ProcessGroup
    purpose: str

    def wait(self) -> None:
        """Block until ``result`` has the value. Raises :class:`PeerError` if a rank fails."""
        wait(Launched(self.future), self.purpose, self.group)
        value, result = self.future.wait(), self.result  # the current stream waits, if it is on a GPU
        if result.is_complex() and not value.is_complex():  # torch's all_reduce returns it like this
            value = torch.view_as_complex(value.view(-1, 2))
        if value.data_ptr() != result.data_ptr() or value.dtype != result.dtype:
            result.copy_(value.view(-1))


def check_comm_hook(hook: CommHook) -> None:
    """Raise :class:`ConfigurationError`, with the reason, if ``hook`` cannot be a communication hook here."""
    if not callable(hook):
        raise ConfigurationError(f"comm_hook must be callable as hook(state, bucket), got {hook!r}.")
    inner: Any = hook
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = getattr(inner, "__qualname__", type(inner).__name__)
    module = (getattr(inner, "__module__", None) or "").rsplit(".", 1)[-1]
    if module in _NEEDS_DDP:
        raise ConfigurationError(f"the communication hook {name} needs DistributedDataParallel: {_NEEDS_DDP[module]}.")
    try:
        inspect.signature(hook).bind(None, None)
    except TypeError:
        raise ConfigurationError(
            f"a communication hook is called as hook(state, bucket), but {name} has the signature "
            f"{inspect.signature(hook)}."
        ) from None
    except ValueError:
        pass  # a builtin without a signature
