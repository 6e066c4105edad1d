"""Batch normalization with the statistics of the global batch: forward and backward, on any device.

During a run, each BatchNorm layer of a model gets a subclass of its class. No module is replaced or gets new
attributes, and copies and pickles have the original class. In a layer, ``x`` of rank r has ``n_r`` values per channel,
mean ``m_r`` and variance ``v_r``, and all ranks together have ``N`` values::

    forward     one exchange of the statistics (:mod:`ddp_callbacks.batch_norm.statistics`):
                mean = sum(n_r·m_r) / N, var = sum(n_r·(v_r + (m_r - mean)²)) / N
    backward    one all-reduce: the sums of dy and dy·xhat, where xhat = (x - mean) / sqrt(var + eps)
                dx = weight / sqrt(var + eps) · (dy - sum(dy) / N - xhat · sum(dy·xhat) / N)

[Note: weights]
``dx`` mixes the ranks' gradients, so ``dy`` must be the gradient of one loss on all ranks: multiply each rank's loss by
``world_size · n_r / N`` before backward, and average the parameters' gradients without weights
(:meth:`GradientSynchronizer.weigh_loss`). Weighting the gradients after backward, as
:meth:`GradientSynchronizer.weigh` does, is right only for equal shares: a rank whose loss has weight 0 may hold samples
that the other ranks' losses depend on.

[Note: a channel of its own]
These all-reduces interleave with those of the gradients in the order of backward. If control flow differs between
ranks, so does that order: a bucket waits for a parameter that only some ranks use. Therefore they use a separate
process group. Among themselves they follow the order of the forward pass, and its reverse: autograd runs the newest
node first.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import SyncBatchNorm
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ddp_callbacks._torch import BatchNorm
from ddp_callbacks.batch_norm.statistics import BatchStatistics, GlobalBatch, at_least_float32
from ddp_callbacks.comm.topology import new_subgroup
from ddp_callbacks.errors import ConfigurationError, warn
from ddp_callbacks.process_group import get_world_size, resolve_group

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


class BatchNormSynchronizer:
    """Make the BatchNorm layers of a module normalize with global batch statistics, from construction to :meth:`close`.

    A layer that normalizes by the batch (in training, or without running statistics) then computes on each rank what a
    single process computes for these samples of the global batch, and tracks the running statistics of the global
    batch. Gradients are exact if you weight the ranks' losses before backward
    (:meth:`ddp_callbacks.GradientSynchronizer.weigh_loss`). All ranks must run these layers in the same order, forward
    and backward; both block until all ranks have. A rank's batch may be empty, or not count. Layers that use their
    running statistics don't communicate. torch refuses second derivatives.

    Between GPUs, NCCL's exchanges block the GPU's stream, not the host, which waits only in the forward of a rank with
    fewer than two values per channel. No error is raised there if the ranks are at different layers.

    With a single process nothing changes. The constructor is a collective. Copies and pickles of a layer made meanwhile
    have the original class and are not synchronized.

    Args:
        module: The module whose BatchNorm layers are synchronized, including ``SyncBatchNorm`` without a process group
            of its own.
        counts: Returns whether this rank's batch counts; called in each forward of a layer. ``None``: it always counts.
        process_group: ``None`` is the default group.

    Raises:
        ConfigurationError: A layer cannot be synchronized: an object's ``forward`` is replaced, or a class's own one
            does not call ``torch.nn.functional.batch_norm`` (this is raised from ``forward``), it is compiled by
            TorchScript, or has no parameters yet.
        ValueError: From a layer's forward, on all ranks, as in torch: all ranks together have one value per channel.
        MismatchError: From forward or backward: the ranks are at different layers. Not under NCCL.
        PeerError: From forward or backward: another rank failed or died.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        counts: Callable[[], bool] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._made: dict[type, type] = {}
        self._layers: weakref.WeakKeyDictionary[BatchNorm, str] = weakref.WeakKeyDictionary()  # copies may end before
        if get_world_size(process_group) == 1:
            return
        layers = _find_layers(module)
        if not layers:
            return
        first = next(iter([*module.parameters(), *module.buffers()]), None)
        device = torch.device("cpu") if first is None else first.device
        group = _own_group(resolve_group(process_group))
        statistics = BatchStatistics(group, device, counts or (lambda: True))
        self._layers.update((layer, name) for name, layer in layers.items())
        for layer in self._layers:
            layer.__class__ = self._synchronized(type(layer), statistics)

    def close(self) -> None:
        """Restore the layers' original class. Local; safe to call twice."""
        for layer in self._layers:
            if type(layer) in self._made.values():  # unless other code has changed its class since
                layer.__class__ = type(layer).original  # type: ignore[attr-defined]
        self._layers.clear()

    def _synchronized(self, original: type, statistics: BatchStatistics) -> type:
        if original not in self._made:
            members = {"original": original, "names": self._layers, "statistics": statistics, "__module__": __name__}
            mixin = OwnForward if _has_own_forward(original) else SynchronizedLayer
            if "torch._dynamo" in sys.modules:  # a compiled model calls the layer between its graphs
                members["forward"] = torch.compiler.disable(mixin.forward)
            name = "Synchronized" + original.__name__.removeprefix("Sync")
            self._made[original] = type(name, (mixin, original), members)
        return self._made[original]


def unsynchronized(module: torch.nn.Module) -> dict[str, BatchNorm]:
    """Return the BatchNorm layers that normalize by each rank's part of a batch, by name."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, BatchNorm) and not isinstance(layer, SynchronizedLayer) and not _has_group(layer)
    }


def samples_needed(module: torch.nn.Module, batch_size: int | None, world_size: int) -> int:
    """Return the minimum number of samples for ranks that get any: 2 with BatchNorm, which can fail on one sample.

    If a batch is short, for example the last of an epoch, fewer ranks compute it. The same holds for every batch if
    ``batch_size`` is less than two samples per rank and a layer is a ``BatchNorm1d``; this causes a warning. Local.

    Args:
        module: The model; synchronized BatchNorm layers don't count.
        batch_size: The loader's batch size; ``None`` if unknown.
        world_size: The number of ranks that divide a batch.
    """
    layers = unsynchronized(module)
    if not layers or world_size == 1:
        return 1
    if batch_size is None or batch_size >= 2 * world_size:
        return 2
    if not any(isinstance(layer, torch.nn.BatchNorm1d) for layer in layers.values()):
        return 1
    warn(
        f"a batch of {batch_size} samples has fewer than two for each of {world_size} processes, but BatchNorm needs "
        f"two to normalize: only {max(1, batch_size // 2)} of them compute. Use sync_batchnorm=True or larger batches.",
    )
    return 2


class SynchronizedLayer:
    """Mixin of the synchronized subclasses; never instantiated directly."""

    is_synchronized = True
    original: type
    names: weakref.WeakKeyDictionary[Any, str]  # like all these, on the class: the layer itself gets no attributes
    statistics: BatchStatistics

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        """Like torch's, with the statistics of all ranks. A collective if the layer normalizes by the batch."""
        name = self.names.get(self)
        uses_batch = self.training or (self.running_mean is None and self.running_var is None)
        if name is None or not uses_batch:
            output: torch.Tensor = BatchNorm.forward(self, input)
            return output
        self._check_input_dim(input)
        batch = self.statistics.join(input, name)
        if self.training and self.track_running_stats:
            _track(self, batch)
        arguments = input, self.weight, self.bias, batch, self.eps
        normalized: torch.Tensor = _Normalize.apply(*arguments)  # type: ignore[no-untyped-call]
        return normalized

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle with the original class."""
        reduced: Any = super().__reduce_ex__(1)  # from 2 on, pickle requires the object's class
        function, arguments, *rest = reduced
        return function, tuple(self.original if entry is type(self) else entry for entry in arguments), *rest


class OwnForward(SynchronizedLayer):
    """Mixin for layers with a ``forward`` of their class, such as those that add an activation."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Like the class's, but ``F.batch_norm`` uses the statistics of all ranks. A collective then.

        Raises:
            ConfigurationError: It normalizes without that function.
        """
        name = self.names.get(self)
        joining = nullcontext() if name is None else _Joining(self.statistics, name)
        with joining:
            output: torch.Tensor = self.original.forward(self, *args, **kwargs)
        if isinstance(joining, _Joining) and not joining.has_normalized:
            text = f"{name}, a {self.original.__name__}, has its own forward, which doesn't call F.batch_norm"
            raise ConfigurationError(f"{text}. {_REMEDY}")
        return output


class _Joining(TorchFunctionMode):
    """Inside, ``F.batch_norm`` normalizes by the batch of all ranks, if by a batch."""

    def __init__(self, statistics: BatchStatistics, name: str) -> None:
        super().__init__()
        self._statistics, self._name, self.has_normalized = statistics, name, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.batch_norm:
            return func(*args, **(kwargs or {}))
        self.has_normalized = True
        return self._batch_norm(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        input: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        batch = self._statistics.join(input, self._name)
        if running_mean is not None and running_var is not None:
            _update(running_mean, running_var, batch, momentum)
        return _Normalize.apply(input, weight, bias, batch, eps)  # type: ignore[no-untyped-call]


def synchronize_copy(module: torch.nn.Module, copied: torch.nn.Module) -> None:
    """Let the BatchNorm layers of a module's copy normalize as those of the module do now. Local."""
    for layer, other in zip(module.modules(), copied.modules(), strict=True):
        if isinstance(layer, SynchronizedLayer):
            layer.names[other] = layer.names[layer]
            other.__class__ = type(layer)


@torch.no_grad()
def _track(layer: BatchNorm, batch: GlobalBatch) -> None:
    """Update the running statistics as torch does."""
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
    if layer.running_mean is None or layer.running_var is None:
        return
    factor: float | torch.Tensor = 0.0 if layer.momentum is None else layer.momentum
    if layer.momentum is None and layer.num_batches_tracked is not None:
        factor = _one_over(layer.num_batches_tracked, layer.running_mean.dtype)
    _update(layer.running_mean, layer.running_var, batch, factor)


@torch.no_grad()
def _update(mean: torch.Tensor, var: torch.Tensor, batch: GlobalBatch, factor: float | torch.Tensor) -> None:
    """Move running statistics towards those of a batch."""
    if not batch.is_empty:
        unbiased = batch.var * (batch.distinct / (batch.distinct - 1))
        mean.lerp_(batch.mean.to(mean), factor)
        var.lerp_(unbiased.to(var), factor)


def _one_over(number: torch.Tensor, dtype: torch.dtype) -> float | torch.Tensor:
    """Return ``1 / number``; on GPUs as a tensor, for which the host need not wait."""
    return number.double().reciprocal_().to(dtype) if number.is_cuda else 1.0 / float(number)


# --- the arithmetic; :mod:`ddp_callbacks.gradients.weighing` finds this function's nodes in a graph by their name -----


class _Normalize(torch.autograd.Function):
    """Computes ``weight · (input - mean) / sqrt(var + eps) + bias``; mean and variance depend on all ranks' inputs.

    The arithmetic is that of torch's kernels for evaluation, which take the mean and the variance.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        batch: GlobalBatch,
        eps: float,
    ) -> torch.Tensor:
        x = at_least_float32(input)
        mean, var = batch.mean.to(x.dtype), batch.var.to(x.dtype)
        ctx.batch, ctx.eps = batch, eps
        ctx.save_for_backward(input, weight, mean, var)
        scale, shift = (None if each is None else each.to(x.dtype) for each in (weight, bias))
        return torch.batch_norm(x, scale, shift, mean, var, False, 0.0, eps, False).to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        input, weight, mean, var = ctx.saved_tensors
        batch: GlobalBatch = ctx.batch
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        x = at_least_float32(input)
        if batch.counts:
            # The kernel for evaluation: the part of dx from dy alone, and the two sums over this rank's values.
            scale, saved = None if weight is None else weight.to(x.dtype), mean.new_empty(0)
            dx, sum_dy_xhat, sum_dy = torch.ops.aten.native_batch_norm_backward(
                dy.to(x.dtype), x, scale, mean, var, saved, saved, False, ctx.eps, [needs_input, True, True]
            )
        else:
            dx, sum_dy_xhat, sum_dy = torch.zeros_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
        if needs_input:
            total = batch.statistics.sum_gradients(sum_dy, sum_dy_xhat, batch.name)
            if batch.counts:
                slope = (var + ctx.eps).rsqrt_().mul_(-1 / batch.size)
                slope = slope if weight is None else slope.mul_(weight)
                of_dy, of_dy_xhat = total.to(x) * slope
                dx += torch.batch_norm(x, of_dy_xhat, of_dy, mean, var, False, 0.0, ctx.eps, False)
        gradients = dx if needs_input else None, sum_dy_xhat if needs_weight else None, sum_dy if needs_bias else None
        return *gradients, None, None


# --- set-up -----------------------------------------------------------------------------------------------------------


def _find_layers(module: torch.nn.Module) -> dict[str, BatchNorm]:
    """Return the layers to synchronize, by name. Raise if one of them cannot be synchronized."""
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
    if "forward" in vars(layer) or (_has_own_forward(kind) and isinstance(layer, SyncBatchNorm)):
        raise ConfigurationError(f"{name}, a {kind.__name__}, has its own forward. {_REMEDY}")
    if isinstance(layer, torch.nn.modules.lazy.LazyModuleMixin):
        raise ConfigurationError(
            f"{name}, a {kind.__name__}, has no parameters yet. Call the model on a batch before the run."
        )


def _has_own_forward(kind: type) -> bool:
    return kind.forward not in (BatchNorm.forward, SyncBatchNorm.forward)  # type: ignore[attr-defined]


def _has_group(layer: BatchNorm) -> bool:
    return isinstance(layer, SyncBatchNorm) and layer.process_group is not None


def _own_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a separate process group of the same ranks for batch normalization. A collective on first use."""
    if group not in _groups:
        own = new_subgroup(range(group.size()), group, dist.get_backend_config(group))
        assert own is not None
        _groups[group] = own
    return _groups[group]
