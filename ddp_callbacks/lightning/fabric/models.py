"""The models set up by Fabric: equal at the start, with one engine that synchronizes their gradients.

There is one engine because the ranks must sum the buckets of all models in the same order, although a loss may reach
some models on some ranks only. As in a Trainer's module with several parts, frozen parameters are not sent.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import torch

from ddp_callbacks.comm.agreement import VERSIONS, module_settings, require_agreement
from ddp_callbacks.comm.collectives import all_gather_object
from ddp_callbacks.comm.held import Held, trained_by
from ddp_callbacks.gradients import GradientSynchronizer
from ddp_callbacks.lightning.strategy_processes import SAME_EVERYWHERE
from ddp_callbacks.process_group.runs import begin_run
from ddp_callbacks.replicas.parameters import broadcast_parameters, merge_buffers, require_equal_replicas


class Models:
    """The models of one Fabric on several processes.

    Args:
        make: Makes the gradient engine for a module.

    Attributes:
        synchronizer: The gradient engine of all models; ``None`` before the first model.
    """

    def __init__(self, make: Callable[[torch.nn.Module], GradientSynchronizer]) -> None:
        self._make = make
        self._models: list[_Model] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self.synchronizer: GradientSynchronizer | None = None
        self._has_trained, self._samples = False, 0  # since the buffers were merged
        self._has_stepped = False  # since the models were compared
        self._is_alone = self._steps_alone = False  # whether the last backward, and any step, was of this rank alone

    def add(self, module: torch.nn.Module, settings: dict[str, object]) -> None:
        """Compare ``module`` and ``settings`` between the ranks, and broadcast rank 0's parameters. A collective.

        From now on the engine synchronizes the gradients of ``module``, too.
        """
        begin_run()
        require_agreement(module_settings(module) | VERSIONS | settings, "the model", SAME_EVERYWHERE)
        self._forget_lost()
        if all(known.user_s() is not module for known in self._models):
            self._models.append(_Model(module))
        if self.synchronizer is not None:
            self.synchronizer.close()
        self.synchronizer = self._make(Held(self.whole(), trained=lambda: trained_by(self._optimizers)))
        broadcast_parameters(module)

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Synchronize parameters of an optimizer that no model has, such as those of a criterion. A collective."""
        self._optimizers.append(optimizer)
        if self.synchronizer is not None:
            self.synchronizer.follow()

    def whole(self) -> torch.nn.Module:
        """Return all models as one module; a single model as it is."""
        parts = [model.parts for model in self._models]
        return parts[0] if len(parts) == 1 else torch.nn.ModuleList(parts)

    def are_all(self, blocked: set[int]) -> bool:
        """Whether ``blocked`` has the ids of all models that have parameters."""
        ids = [id(model.user_s()) for model in self._models if next(model.parts.parameters(), None) is not None]
        return bool(ids) and blocked.issuperset(ids)

    def note_backward(self, samples: int, is_alone: bool) -> None:
        """Note a backward, for which this rank has had ``samples``, and whether it has synchronized nothing."""
        self._has_trained, self._samples = True, self._samples + samples
        self._is_alone = is_alone

    def note_step(self) -> None:
        """Note an optimizer's step."""
        self._has_stepped = True
        self._steps_alone = self._steps_alone or self._is_alone

    def require_equal(self) -> None:
        """Raise unless the models are equal on all ranks, after steps; not if ranks step alone. A collective.

        Raises:
            MismatchError: On every rank alike; see :func:`ddp_callbacks.replicas.require_equal_replicas`.
        """
        if self._has_stepped and not self._steps_alone:
            require_equal_replicas(self.whole(), "after a loop over a loader", optimizers=self._optimizers)
        self._has_stepped = False

    def merge_buffers(self) -> None:
        """Average running statistics, and copy other buffers from rank 0, if they may differ. A collective."""
        if not self._has_trained:
            return
        for model in self._models:
            merge_buffers(model.parts, self._samples)
        self._has_trained, self._samples = False, 0

    def close(self) -> None:
        """Remove every hook from the models."""
        if self.synchronizer is not None:
            self.synchronizer.close()
            self.synchronizer = None
        self._models, self._optimizers = [], []

    def _forget_lost(self) -> None:
        """Drop the models that no rank has any more, such as those of earlier folds. A collective."""
        kept = [model.user_s() is not None for model in self._models]
        rows = all_gather_object(kept, "which models are in use")
        found = [*zip(self._models, map(any, zip(*rows, strict=True)), strict=True)]
        lost = {id(parameter) for model, is_kept in found if not is_kept for parameter in model.parts.parameters()}
        self._models = [model for model, is_kept in found if is_kept]
        self._optimizers = [each for each in self._optimizers if lost.isdisjoint(map(id, trained_by([each])))]


class _Model:
    """A model, and its parts. The parts stay if this rank drops the model earlier than the others."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.user_s = weakref.ref(module)
        self.parts = copy.copy(module)  # has the same layers, parameters and buffers
