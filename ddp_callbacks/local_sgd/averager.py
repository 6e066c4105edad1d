"""Average the parameters over the ranks every few steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ddp_callbacks.comm.agreement import module_settings, require_agreement
from ddp_callbacks.comm.collectives import all_gather_object
from ddp_callbacks.comm.held import Parameters
from ddp_callbacks.comm.protocol import AllReduce, allocate
from ddp_callbacks.comm.topology import choose_all_reduce
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.gradients.buckets import check_bucket_cap_mb
from ddp_callbacks.gradients.compression import DTYPES, Compress, check_compress
from ddp_callbacks.local_sgd.fragments import OUTER_MOMENTUM, Fragment, make_fragments
from ddp_callbacks.local_sgd.methods import DiLoCo, LocalSGD, check_sync
from ddp_callbacks.process_group import get_world_size, resolve_group
from ddp_callbacks.process_group.runs import begin_run
from ddp_callbacks.replicas.parameters import broadcast_all
from ddp_callbacks.reporting.recorder import recorder

_PURPOSE = "the averaging of the parameters"


class ParameterAverager:
    """Average the parameters over the ranks every few optimizer steps; the package's docstring has the algorithm.

    Before you make one, the parameters must be equal on all ranks (:func:`ddp_callbacks.broadcast_parameters`). They
    are bitwise equal after each :meth:`outer_step`. Fragments that no rank has changed in a window, for example frozen
    parameters, are not sent. Buffers and the inner optimizer's state (momentum, Adam's moments) stay local, as in the
    paper.

    Memory: one copy of the parameters, two with DiLoCo, and a fragment of ``bucket_cap_mb`` for sending.
    Half-precision parameters are averaged in float32.

    With a single process, local SGD does nothing. DiLoCo still runs, with one worker: more ranks then mean a larger
    batch, not another method.

    The constructor is a collective and blocks until every rank has called it.

    Args:
        module: The module whose parameters are averaged.
        sync: :class:`LocalSGD` or :class:`DiLoCo`.
        optimizer: The optimizer that trains ``module``. Its state holds DiLoCo's momentum, so both are saved and loaded
            together. ``None``: the momentum is lost with this object.
        bucket_cap_mb: Size in MiB of the fragments that are sent; a larger parameter is one fragment.
        compress: ``"bf16"`` or ``"fp16"``: round pseudo-gradients before sending them to another node, and sum them in
            float32. All ranks still get the same bits.
        process_group: ``None`` is the default group.

    Raises:
        ConfigurationError: ``bucket_cap_mb``, ``compress`` or ``sync`` is invalid.
        MismatchError: The ranks have different settings or models.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        module: torch.nn.Module,
        sync: LocalSGD | DiLoCo,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        bucket_cap_mb: float = 25.0,
        compress: Compress = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        check_bucket_cap_mb(bucket_cap_mb)
        check_compress(compress, None)
        check_sync(sync)
        self._sync, self._optimizer, self._group = sync, optimizer, process_group
        self._own_state: dict[Any, Any] = {}  # used without an optimizer
        self._steps, self._weight = 0, 0.0
        self._fragments: list[Fragment] = []
        self._all_reduce: AllReduce | None = None
        self._memories: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        begin_run(process_group)
        self._module, self._bucket_cap_mb, self._compress = module, bucket_cap_mb, compress
        self._settings = {"sync": repr(self._sync), "bucket_cap_mb": bucket_cap_mb, "compress": compress}
        self._is_alone = get_world_size(process_group) == 1
        self._start()
        if (own := recorder()) is not None:
            own.describe(module, self._settings)

    def _start(self) -> None:
        """Average the parameters that the module has now. A collective."""
        settings = self._settings | module_settings(self._module)
        require_agreement(settings, _PURPOSE, "Give every process the same model and the same settings.", self._group)
        self._known = Parameters(self._module)
        if self._is_alone and isinstance(self._sync, LocalSGD):
            return
        self._fragments = make_fragments(self._known.named, self._sync, self._bucket_cap_mb)
        if not self._is_alone:
            devices = [fragment.anchor.device for fragment in self._fragments]
            self._all_reduce = choose_all_reduce(resolve_group(self._group), devices, DTYPES[self._compress])

    @torch.inference_mode(False)
    def follow(self) -> None:
        """Average parameters that were added to the module, replaced, or moved to another dtype or device, too.

        The window closes, and the new parameters get rank 0's values. A collective then: every rank must change its
        model alike, between the same steps. :meth:`step` calls this; you may call it before the new parameters' first.

        Raises:
            MismatchError: The ranks' models differ.
        """
        changes = self._known.changes()
        if changes is None:
            return
        self.outer_step()
        broadcast_all([*changes.values()], "the new parameters", self._group)
        for name in changes:
            self._state.get(OUTER_MOMENTUM, {}).pop(name, None)
        self._start()

    @property
    def _state(self) -> dict[Any, Any]:
        """The state that holds the outer momentum. Loading replaces that of an optimizer."""
        return self._own_state if self._optimizer is None else self._optimizer.state

    @property
    def is_last_step(self) -> bool:
        """Whether the next :meth:`step` closes the window."""
        return self._steps + 1 >= self._sync.every

    def step(self, weight: float = 1.0) -> None:
        """Count an optimizer step; after ``every`` steps, close the window. All ranks must take equally many steps.

        Args:
            weight: The number that this rank's loss is the mean over: samples, or tokens that count. Pass 0 if this
                rank had none; it must count the step too.

        Raises:
            ConfigurationError: The weight is negative or not a number.
            MismatchError, PeerError: As in :meth:`outer_step`.
        """
        if not weight >= 0:
            raise ConfigurationError(f"the weight of a step must be 0 or more, got {weight!r}.")
        self.follow()
        self._steps += 1
        self._weight += float(weight)
        if self._steps >= self._sync.every:
            self.outer_step()

    @torch.inference_mode(False)
    @torch.no_grad()
    def outer_step(self) -> None:
        """Average the parameters now, even if the window is not full. A collective; blocks until all ranks call it.

        Call it before an evaluation, before a checkpoint and at the end of training. If no step was taken since the
        last call, nothing is sent, and the next window starts from the current parameters, which other code may have
        replaced.

        Raises:
            MismatchError: The ranks have taken different numbers of steps.
            ConfigurationError: The optimizer's state holds a momentum for other parameters.
            PeerError: Another rank failed, died or went silent.
        """
        if self._steps:
            fragments, share = self._agree()
            momentum = dict(self._state.get(OUTER_MOMENTUM, {}))
            for fragment in fragments:
                fragment.take_outer_step(self._average(fragment, share), momentum)
            if momentum:
                self._state[OUTER_MOMENTUM] = momentum
        for fragment in self._fragments:
            fragment.take_anchor()
        self._steps, self._weight = 0, 0.0

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position in the window, its parameters, anchors and optimizer, for a checkpoint. Local.

        The state differs between the ranks, and no other rank can resume from it. To resume on another number of ranks,
        load the model and the optimizer as they are after :meth:`outer_step`.
        """
        state: dict[str, Any] = {"steps": self._steps, "weight": self._weight}
        if not self._fragments:
            return state
        state["anchors"] = [fragment.anchor.clone() for fragment in self._fragments]
        state["parameters"] = {name: p.detach().clone() for f in self._fragments for name, p in f.parameters.items()}
        state["optimizer"] = None if self._optimizer is None else copy.deepcopy(self._optimizer.state_dict())
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume in the middle of a window. Local.

        Args:
            state: The result of :meth:`state_dict` on this rank, of the same number of ranks.
        """
        self._steps, self._weight = state["steps"], state["weight"]
        if "anchors" not in state:
            return
        for fragment, anchor in zip(self._fragments, state["anchors"], strict=True):
            fragment.anchor.copy_(anchor)
            for name, parameter in fragment.parameters.items():
                parameter.copy_(state["parameters"][name])
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state["optimizer"])

    def _agree(self) -> tuple[list[Fragment], float]:
        """Return the fragments that any rank has changed, and this rank's share of the total weight. A collective."""
        changed = [fragment.has_changed() for fragment in self._fragments]
        rows = all_gather_object([self._steps, self._weight, changed], _PURPOSE, self._group)
        if len({steps for steps, _, _ in rows}) > 1:
            steps = {"steps since the last time": self._steps}
            remedy = "Every rank must count each step, even one for which it has no sample (weight 0)."
            require_agreement(steps, _PURPOSE, remedy, self._group)
        total = sum(weight for _, weight, _ in rows)
        share = self._weight / total if total else 1 / len(rows)
        by_fragment = zip(*(flags for _, _, flags in rows), strict=True)
        return [fragment for fragment, flags in zip(self._fragments, by_fragment, strict=True) if any(flags)], share

    def _average(self, fragment: Fragment, share: float) -> torch.Tensor:
        """Return the averaged pseudo-gradient of a fragment, valid until the next call. A collective."""
        numel, kind = fragment.anchor.numel(), (fragment.anchor.dtype, fragment.anchor.device)
        if kind not in self._memories or self._memories[kind].numel() < numel:
            make = allocate if self._all_reduce is None else self._all_reduce.allocate
            self._memories[kind] = make(numel, *kind)
        memory = fragment.write_pseudo_gradient(self._memories[kind][:numel], share)
        if self._all_reduce is not None:
            self._all_reduce.launch(memory, _PURPOSE).wait()
        return memory


def set_gradients_aside(module: torch.nn.Module) -> Callable[[], None]:
    """Remove the gradients from the parameters; call the result to restore them, replacing newer ones.

    Use it around the backward of a batch without samples on this rank: its loss, a mean over nothing, is NaN.
    """
    aside = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in aside:
        parameter.grad = None

    def put_back() -> None:
        for parameter, gradient in aside:
            parameter.grad = gradient

    return put_back
