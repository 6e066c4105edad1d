"""Fragments: parameters that local SGD averages together, with their anchor and outer optimizer. No communication."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ddp_callbacks._torch import copy_each
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.gradients.buckets import assign_buckets
from ddp_callbacks.local_sgd.methods import DiLoCo, LocalSGD

OUTER_MOMENTUM = "ddp_callbacks_outer_momentum"
"""Key of DiLoCo's momentum in ``optimizer.state``: a dict of tensors by the parameters' names.

``Optimizer.state_dict`` saves and loads state that belongs to no parameter unchanged. So a checkpoint of the optimizer
contains the momentum, and also loads without this library.
"""


class Fragment:
    """Parameters of one dtype and device that are sent together, with their anchor and outer optimizer.

    Attributes:
        parameters: The parameters by name.
        anchor: The anchor as a flat tensor in float32 or float64; complex numbers are pairs of real numbers.
    """

    def __init__(self, parameters: dict[str, torch.nn.Parameter], sync: LocalSGD | DiLoCo) -> None:
        self.parameters, self._sync = parameters, sync
        first, *_ = reals = self._reals()
        dtype = torch.promote_types(first.dtype, torch.float32)
        self.anchor = torch.empty(sum(real.numel() for real in reals), dtype=dtype, device=first.device)
        self._anchors = self._views(self.anchor)
        self.take_anchor()

    def take_anchor(self) -> None:
        """Copy the current parameters to the anchor."""
        copy_each(self._anchors, self._reals())

    def has_changed(self) -> bool:
        """Whether a parameter has changed since the window opened."""
        pairs = zip(self._anchors, self._reals(), strict=True)
        return any(not torch.equal(anchor, real.to(anchor.dtype)) for anchor, real in pairs)

    def write_pseudo_gradient(self, memory: torch.Tensor, share: float) -> torch.Tensor:
        """Write ``share * (anchor - parameters)`` into ``memory``, which has the anchor's shape, and return it."""
        if share == 0:
            return memory.zero_()  # a rank with share 0 may hold NaN
        for target, anchor, real in zip(self._views(memory), self._anchors, self._reals(), strict=True):
            torch.sub(anchor, real, out=target)
        return memory.mul_(share)

    def take_outer_step(self, pseudo_gradient: torch.Tensor, momentum: dict[str, torch.Tensor]) -> None:
        """Take the outer optimizer's step from the anchor.

        Parameters that no rank has changed stay unchanged, whatever their momentum: they may be frozen.

        Args:
            momentum: The momentum by the parameters' names; this updates it.
        """
        factor = self._sync.outer_momentum
        outer = torch.optim.SGD(self._anchors, self._sync.outer_lr, factor, nesterov=factor > 0)
        for name, anchor, gradient in zip(self.parameters, self._anchors, self._views(pseudo_gradient), strict=True):
            anchor.grad = gradient if gradient.any() else None
            outer.state[anchor]["momentum_buffer"] = _momentum_of(name, anchor, momentum)
        outer.step()
        outer.zero_grad()
        for name, anchor in zip(self.parameters, self._anchors, strict=True):
            if (buffer := outer.state[anchor]["momentum_buffer"]) is not None:
                momentum[name] = buffer
        copy_each(self._reals(), self._anchors)

    def _reals(self) -> list[torch.Tensor]:
        return [_real(parameter) for parameter in self.parameters.values()]

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        reals = self._reals()
        parts = flat.split([real.numel() for real in reals])
        return [part.view(real.shape) for part, real in zip(parts, reals, strict=True)]


def make_fragments(
    named: Mapping[str, torch.nn.Parameter], sync: LocalSGD | DiLoCo, bucket_cap_mb: float
) -> list[Fragment]:
    items = [*named.items()]
    assigned = assign_buckets([*named.values()], bucket_cap_mb)
    return [Fragment(dict(items[index] for index in indices), sync) for indices in assigned]


def _momentum_of(name: str, anchor: torch.Tensor, momentum: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Return a copy of a parameter's momentum, which may belong to a checkpoint; ``None`` if there is none."""
    if (found := momentum.get(name)) is None:
        return None
    if found.shape != anchor.shape:
        raise ConfigurationError(
            f"the optimizer's state has an outer momentum of shape {list(found.shape)} for {name}, which has "
            f"{list(anchor.shape)}: it was saved with another model. Delete its entry {OUTER_MOMENTUM!r}."
        )
    return found.to(anchor, copy=True)


def _real(parameter: torch.Tensor) -> torch.Tensor:
    """Return a view of a parameter as real numbers."""
    data = parameter.detach()
    return torch.view_as_real(data) if data.is_complex() else data
