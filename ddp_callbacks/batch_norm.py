"""Batch normalization by the statistics of the whole batch, over all ranks: forward and backward, on any device.

For the time of a run the BatchNorm layers of a model get another class, derived from their own; no module is replaced,
nothing is added to them, and what is copied or pickled of them is of their own class. In a layer, ``x`` of rank r has
``n_r`` values per channel, ``N`` on all ranks::

    forward     one sum over the ranks: n_r, and the sums of x - shift and of its square; hence the mean and variance
    backward    one sum over the ranks: those of dy and dy·xhat, where xhat = (x - mean) / sqrt(var + eps)
                dx = weight / sqrt(var + eps) · (dy - sum(dy) / N - xhat · sum(dy·xhat) / N)

[Note: weights]
``dx`` mixes the ranks' gradients, so ``dy`` has to be that of one loss on all of them: each rank's loss must be
multiplied by its share before backward, as ``world_size · n_r / N``, and the parameters' gradients averaged plainly:
:meth:`GradientSynchronizer.weigh_loss`.
To weigh the gradients after backward instead, as :meth:`GradientSynchronizer.weigh` does, is right for equal shares
alone: a rank whose loss has weight 0 may hold samples that the others' losses depend on.

[Note: shift]
A variance from sums of squares loses digits where the mean is large, so values are taken relative to the mean of the
layer's batch before, which is equal on all ranks. Where the new mean is farther from it than :data:`_FAR` standard
deviations, which all ranks see alike, they sum once more, relative to the new one. (What Chan, Golub and LeVeque,
"Algorithms for computing the sample variance", 1983, call shifted data. To gather the ranks' means and variances would
do without, but grows with the square of the number of ranks.)

[Note: a channel of its own]
Sums here interleave with those of the gradients in the order in which backward comes to them, which differs between
ranks where control flow does: a bucket waits for a parameter that only some use. So they have a process group of their
own. Among themselves their order is that of the forward pass, and its reverse: autograd runs the node first that was
made last.
"""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import SyncBatchNorm

from ddp_callbacks._torch import BatchNorm, outside_inference_mode
from ddp_callbacks.comm.collectives import message_device, new_subgroup
from ddp_callbacks.comm.topology import choose_all_reduce
from ddp_callbacks.errors import ConfigurationError, MismatchError
from ddp_callbacks.process_group import get_world_size, resolve_group
from ddp_callbacks.process_group.failures import describe_rank

_FAR = 10.0  # standard deviations; the variance is then exact to 1e2 units of the last place of float64
_HEADER = 2  # numbers before a message's sums: what it is for, and the number of values per channel

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


class BatchNormSynchronizer:
    """Let the BatchNorm layers of a module normalize by the whole batch, from construction to :meth:`close`.

    A layer that normalizes by the batch (in training, or without running statistics) gives on each rank what one
    process gives for these samples of the whole batch, and keeps the running statistics of the whole batch; gradients
    are exact if the ranks' losses are weighed before backward (see the module's note on weights). All ranks must then
    run these layers in the same order, forward and backward; both block until all have. A rank may have an empty
    batch, or one that does not count. Layers that use their running statistics communicate nothing. Second derivatives
    are refused by torch.

    In a world of one nothing changes. The constructor is a collective. Copies and pickles of a layer, made while this
    is open, are of the layer's own class and not synchronized.

    Args:
        module: Its BatchNorm layers, ``SyncBatchNorm`` included unless it has a process group of its own.
        counts: Whether this rank's batch counts; asked in each forward of a layer. ``None``: always.
        process_group: ``None`` is the default group.

    Raises:
        ConfigurationError: A layer cannot be synchronized: it has a forward of its own, is compiled by TorchScript, or
            has no parameters yet.
        ValueError: From a layer's forward, on all ranks, as torch's: there is one value per channel on all together.
        MismatchError: From forward or backward, where the ranks are at different layers.
        PeerError: From forward or backward, where another rank failed or died.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        counts: Callable[[], bool] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._made: dict[type, type] = {}
        self._layers: dict[BatchNorm, _Layer] = {}
        if get_world_size(process_group) == 1:
            return
        layers = _find_layers(module)
        if not layers:
            return
        first = next(iter([*module.parameters(), *module.buffers()]), None)
        device = message_device(process_group) if first is None else first.device
        channel = _Channel(_own_group(resolve_group(process_group)), device)
        for index, (name, layer) in enumerate(layers.items()):
            self._layers[layer] = _Layer(index, name, channel, counts or _always)
        for layer in self._layers:
            layer.__class__ = self._synchronized(type(layer))

    def close(self) -> None:
        """Give the layers their own class back. Local; safe to call twice."""
        for layer in self._layers:
            if type(layer) in self._made.values():  # else somebody has given it another class since
                layer.__class__ = type(layer).original  # type: ignore[attr-defined]
        self._layers.clear()

    def _synchronized(self, original: type) -> type:
        if original not in self._made:
            members = {"original": original, "states": self._layers, "__module__": __name__}
            if "torch._dynamo" in sys.modules:  # a compiled model calls the layer in between of its graphs
                members["forward"] = torch.compiler.disable(SynchronizedLayer.forward)
            name = "Synchronized" + original.__name__.removeprefix("Sync")
            self._made[original] = type(name, (SynchronizedLayer, original), members)
        return self._made[original]


def samples_needed(module: torch.nn.Module, batch_size: int | None, world_size: int) -> int:
    """How many samples of a batch a rank needs at least, if it gets any: 2 with BatchNorm, which a single one may fail.

    Where a batch is short, the last of an epoch say, fewer ranks then compute it. That is so of whole batches as well
    where they have less than two samples for each rank and a layer is a ``BatchNorm1d``, and said by a warning.

    Args:
        module: Its BatchNorm layers that normalize by the rank's part are asked for.
        batch_size: Of the loader; ``None`` if that is unknown.
        world_size: The number of ranks that divide a batch.
    """
    layers = [
        layer
        for layer in module.modules()
        if isinstance(layer, BatchNorm) and not isinstance(layer, SynchronizedLayer) and not _has_group(layer)
    ]
    if not layers or world_size == 1:
        return 1
    if batch_size is None or batch_size >= 2 * world_size:
        return 2
    if not any(isinstance(layer, torch.nn.BatchNorm1d) for layer in layers):
        return 1
    warnings.warn(
        f"a batch of {batch_size} samples has fewer than two for each of {world_size} processes, but BatchNorm needs "
        f"two to normalize: only {max(1, batch_size // 2)} of them compute. Use sync_batchnorm=True or larger batches.",
        stacklevel=2,
    )
    return 2


class SynchronizedLayer:
    """What makes a class derived from a layer's own normalize by the whole batch; never made directly."""

    is_synchronized = True
    original: type
    states: dict[Any, _Layer]  # in the class: the layer itself holds nothing of ours

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        """As torch's."""
        layer = self.states.get(self)
        uses_batch = self.training or (self.running_mean is None and self.running_var is None)
        if layer is None or not uses_batch:
            output: torch.Tensor = BatchNorm.forward(self, input)
            return output
        self._check_input_dim(input)
        batch = layer.join(input, self.eps)
        if self.training and self.track_running_stats:
            _track(self, batch)
        normalized: torch.Tensor = _Normalize.apply(input, self.weight, self.bias, batch)  # type: ignore[no-untyped-call]
        return normalized

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is of the layer's own class."""
        reduced: Any = super().__reduce_ex__(1)  # from 2 on, pickle insists on the class that the object has
        function, arguments, *rest = reduced
        return function, tuple(self.original if entry is type(self) else entry for entry in arguments), *rest


@dataclass(frozen=True)
class _Batch:
    """The whole batch, as a layer sees it.

    Attributes:
        layer: That sees it.
        eps: Of the layer.
        counts: Whether this rank has a part in it.
        size: Number of values per channel on all ranks.
        mean, var: Shape ``[channels]``, float64; the variance is the biased one.
    """

    layer: _Layer
    eps: float
    counts: bool
    size: int
    mean: torch.Tensor
    var: torch.Tensor


class _Layer:
    """What belongs to one layer beside the module itself."""

    def __init__(self, index: int, name: str, channel: _Channel, counts: Callable[[], bool]) -> None:
        self._index, self._name, self._channel, self._counts = index, name, channel, counts
        self._shift: torch.Tensor | None = None  # the mean of the last batch

    @torch.no_grad()
    def join(self, input: torch.Tensor, eps: float) -> _Batch:
        """Exchange the statistics. A collective."""
        counts = input.numel() > 0 and self._counts()
        shift = self._shift
        if shift is None or len(shift) != input.shape[1]:
            shift = torch.zeros(input.shape[1], dtype=torch.float64, device=input.device)
        size, own = 0, (shift, shift)
        if counts:
            size = input.numel() // input.shape[1]
            mean, var = torch.batch_norm_update_stats(_at_least_float32(input), None, None, 0.0)
            own = mean.double(), var.double()
        batch, farthest = self._sum_statistics(counts, size, *own, shift, eps)
        if farthest > _FAR**2 * eps:
            batch, farthest = self._sum_statistics(counts, size, *own, batch.mean, eps)
        self._shift = batch.mean if math.isfinite(farthest) else None
        return batch

    def sum_gradients(self, sum_dy: torch.Tensor, sum_dy_xhat: torch.Tensor) -> torch.Tensor:
        """Both over all ranks, float64, shape ``[2, channels]``, until the next exchange. A collective."""
        message = self._channel.message(len(sum_dy))
        message.first.copy_(sum_dy)
        message.second.copy_(sum_dy_xhat)
        self._channel.sum(message, 2 * self._index + 2, 0, "gradients", self._name)
        return message.sums

    def _sum_statistics(
        self, counts: bool, size: int, mean: torch.Tensor, var: torch.Tensor, shift: torch.Tensor, eps: float
    ) -> tuple[_Batch, float]:
        """The batch, and the largest ``distance² - _FAR² · var``, where distance is that of its mean from ``shift``."""
        message, distance = self._channel.message(len(shift)), mean - shift
        message.first.copy_(distance).mul_(size)
        message.second.copy_(torch.addcmul(var, distance, distance)).mul_(size)
        size = self._channel.sum(message, 2 * self._index + 1, size, "statistics", self._name)
        if size == 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got 1 on all ranks together in {self._name}"
            )
        if size == 0:  # an empty batch changes nothing, as in torch
            return _Batch(self, eps, counts, 0, shift, torch.ones_like(shift)), 0.0
        first, second = (message.sums / size).to(shift.device).unbind()
        square = first.square()
        var = (second - square).clamp_(min=0)
        farthest = torch.sub(square, var, alpha=_FAR**2).max()
        return _Batch(self, eps, counts, size, shift + first, var), float(farthest)


class _Message:
    """Memory of one exchange: the header, and two sums over this rank's values for each channel."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.header, self.sums = memory, memory[:_HEADER], memory[_HEADER:].view(2, -1)
        self.first, self.second = self.sums.unbind()


class _Channel:
    """Sums messages over the ranks, one at a time, and notices if they are not for the same."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device, self._world_size = group, device, group.size()
        self._all_reduce = choose_all_reduce(group, [device])
        self._messages: dict[int, _Message] = {}

    @outside_inference_mode
    def message(self, channels: int) -> _Message:
        """The one for so many channels; its sums hold until it is wanted again."""
        if channels not in self._messages:
            memory = self._all_reduce.allocate(_HEADER + 2 * channels, torch.float64, self._device)
            self._messages[channels] = _Message(memory)
        return self._messages[channels]

    def sum(self, message: _Message, tag: int, size: int, what: str, name: str) -> int:
        """Sum ``message`` over the ranks, in place; the sum of ``size``. A collective."""
        message.header.copy_(torch.tensor((tag, size), dtype=torch.float64))
        doing = f"the {what} of {name}"
        self._all_reduce.launch(message.memory, doing).wait(doing)
        tags, total = message.header.tolist()
        if tags != tag * self._world_size:
            raise MismatchError(
                f"{describe_rank(self._group, self._group.rank())} exchanges the {what} of {name}, and some rank those "
                "of a different layer: every rank must run the same BatchNorm layers in the same order, forward and "
                "backward. Leave out sync_batchnorm if control flow differs between the ranks."
            )
        return int(total)


# The graph's node is known by this name to :mod:`ddp_callbacks.weighing`.
class _Normalize(torch.autograd.Function):
    """``weight · (input - mean) / sqrt(var + eps) + bias``, where mean and variance depend on all ranks' inputs."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, batch: _Batch
    ) -> torch.Tensor:
        x = _at_least_float32(input)
        mean, var = batch.mean.to(x.dtype), batch.var.to(x.dtype)
        ctx.batch = batch
        ctx.save_for_backward(input, weight, mean, var)
        return _normalize(x, weight, bias, mean, var, batch.eps).to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        input, weight, mean, var = ctx.saved_tensors
        batch: _Batch = ctx.batch
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        x = _at_least_float32(input)
        if batch.counts:
            # As it does for evaluation: what dx has of dy alone, and the two sums over this rank's values.
            scale = None if weight is None else weight.to(x.dtype)
            dx, sum_dy_xhat, sum_dy = torch.ops.aten.native_batch_norm_backward(
                dy.to(x.dtype), x, scale, mean, var, None, None, False, batch.eps, [needs_input, True, True]
            )
        else:
            dx, sum_dy_xhat, sum_dy = torch.zeros_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
        if needs_input:
            total = batch.layer.sum_gradients(sum_dy, sum_dy_xhat)
            if batch.counts:
                slope = (var + batch.eps).rsqrt_().mul_(-1 / batch.size)
                slope = slope if weight is None else slope.mul_(weight)
                of_dy, of_dy_xhat = total.to(x) * slope
                dx += _normalize(x, of_dy_xhat, of_dy, mean, var, batch.eps)
        return dx if needs_input else None, sum_dy_xhat if needs_weight else None, sum_dy if needs_bias else None, None


def _normalize(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    var: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """By torch's kernel for evaluation, in the dtype of ``x``."""
    weight = None if weight is None else weight.to(x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, False)


@torch.no_grad()
def _track(layer: BatchNorm, batch: _Batch) -> None:
    """Update the running statistics as torch does."""
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
    if layer.running_mean is None or layer.running_var is None or batch.size == 0:
        return
    factor = layer.momentum
    if factor is None:
        factor = 0.0 if layer.num_batches_tracked is None else 1.0 / float(layer.num_batches_tracked)
    unbiased = batch.var * (batch.size / (batch.size - 1))
    layer.running_mean.lerp_(batch.mean.to(layer.running_mean), factor)
    layer.running_var.lerp_(unbiased.to(layer.running_var), factor)


def _at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _always() -> bool:
    return True


# --- set-up -----------------------------------------------------------------------------------------------------------


def _find_layers(module: torch.nn.Module) -> dict[str, BatchNorm]:
    """The layers to synchronize, by name."""
    found = {}
    for name, layer in module.named_modules():
        name = name or "the model"
        compiled = isinstance(layer, torch.jit.ScriptModule) and layer.original_name.startswith("BatchNorm")
        if compiled:
            raise ConfigurationError(f"{name} is a BatchNorm that TorchScript has compiled. {_REMEDY}")
        if isinstance(layer, BatchNorm) and not _has_group(layer):
            _check_layer(name, layer)
            found[name] = layer
    return found


_REMEDY = "Such a layer cannot use the whole batch: leave out sync_batchnorm, or replace the layer with torch's own."


def _check_layer(name: str, layer: BatchNorm) -> None:
    kind = type(layer)
    if "forward" in vars(layer) or kind.forward not in (BatchNorm.forward, SyncBatchNorm.forward):
        raise ConfigurationError(f"{name}, a {kind.__name__}, has its own forward. {_REMEDY}")
    if isinstance(layer, torch.nn.modules.lazy.LazyModuleMixin):
        raise ConfigurationError(
            f"{name}, a {kind.__name__}, has no parameters yet. Call the model on a batch before the run."
        )


def _has_group(layer: BatchNorm) -> bool:
    return isinstance(layer, SyncBatchNorm) and layer.process_group is not None


def _own_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks for batch normalization alone. A collective, the first time."""
    if group not in _groups:
        own = new_subgroup([range(group.size())], group)
        assert own is not None
        _groups[group] = own
    return _groups[group]
