"""Compare parameters and the optimizers' states of all ranks every few steps, and name ranks that are slow."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ddp_callbacks.comm.checksums import checksum_of_memory, is_dense, memory_of
from ddp_callbacks.comm.held import trained_by
from ddp_callbacks.errors import say, warn
from ddp_callbacks.process_group import get_rank
from ddp_callbacks.process_group.presence import describe
from ddp_callbacks.replicas.equality import OnDivergence, exchange_checksums, repair_or_raise
from ddp_callbacks.replicas.step_times import StepTimes, Stragglers

FIRST = 10
"""The number of steps before the first comparison."""
_SHARE = 0.005  # of the time, for comparisons: half of what they may take, as no rank sees all that they cost
_LONGEST = 300.0  # seconds between two of them
_SELDOM = 1024  # steps between two comparisons of parameters alone, later in a run
_OTHERS = (
    "each process trains parameters of its own: an optimizer steps them, no GradientSynchronizer has them, and their "
    "values differ by now. Their shapes: {shapes}. Make a synchronizer for each module that is trained, or one for "
    "nn.ModuleList([model, loss])."
)
_AT_FIRST = " (is there a broadcast_parameters in front of the training?)"


class ReplicaChecks:
    """Compares the replicas of one run every k steps; a comparison is one message.

    The ranks choose k from what comparisons cost, so that these take 1 % of the time at most. If the ranks compute on
    different kinds of processors, which may round differently, nothing is compared here, only at the ends of epochs.

    Args:
        module: The same model on every rank.
        times: This rank's times; their means travel with the comparison, and rank 0 names a rank that is slow.
        on_divergence: See :func:`ddp_callbacks.replicas.equality.repair_or_raise`.

    Attributes:
        times: As passed.
    """

    def __init__(self, module: torch.nn.Module, times: StepTimes, on_divergence: OnDivergence) -> None:
        self.times = times
        self._module, self._on_divergence = module, on_divergence
        self._steps, self._interval = 0, FIRST  # steps since the last comparison, and until the next one
        self._since, self._cost = time.perf_counter(), 0.0  # end and seconds of the last comparison
        self._stragglers = Stragglers()

    def after_step(self, optimizers: Sequence[Any], epoch: int, step: int) -> None:
        """Compare the replicas, if it is time. A collective then. Every rank must call it after the same steps.

        Args:
            optimizers: The optimizers of the module.
            epoch, step: Where this is, for messages.

        Raises:
            MismatchError: On every rank alike; see :func:`ddp_callbacks.replicas.equality.repair_or_raise`.
            PeerError: Another rank failed or died.
        """
        self.times.end_step()
        self.times.note_epoch(epoch)
        self._steps += 1
        if self._steps < self._interval:
            return
        begin = time.perf_counter()
        named = dict(_compared(self._module, optimizers))
        own = [(begin - self._since) / self._steps, self._cost, self.times.take()]
        found = exchange_checksums(named, own)
        if len({each.processor for each in found}) == 1:
            when = f"after step {step} of epoch {epoch}"
            repair_or_raise(named, found, when, self._on_divergence, optimizers=optimizers)
        seconds, costs, times = zip(*(each.note for each in found), strict=True)
        self._name_stragglers(seconds[0], times)
        self._interval, self._steps = steps_until_next(costs, seconds), 0
        self._since = time.perf_counter()
        self._cost = self._since - begin

    def _name_stragglers(self, step: float, times: Sequence[Sequence[float]]) -> None:
        for rank, text in self._stragglers.note(step * self._steps, self._steps, times):
            if get_rank() == 0:
                say(f"{describe(rank)} {text}")


class ParameterChecks:
    """Compares trainable parameters after the steps of any optimizer of them: 1, 2, 4, ..., 1024, and each 1024th.

    It also warns if any optimizer has stepped other parameters, and these differ: each rank trains its own.

    Ranks on different kinds of processors, which may round differently, are not compared.

    Args:
        named: The parameters, the same on every rank.
        group: The ranks' process group.

    Attributes:
        ids: Those of the parameters.
    """

    _all: ClassVar[weakref.WeakSet[ParameterChecks]] = weakref.WeakSet()
    _stepped: ClassVar[weakref.WeakSet[torch.optim.Optimizer]] = weakref.WeakSet()
    _told: ClassVar[set[str]] = set()

    def __init__(self, named: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> None:
        self.ids, self._named, self._group = {*map(id, named.values())}, named, group
        self._steps = 0
        self._all.add(self)

    def after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Compare them, if the optimizer has some and it is time. A collective then."""
        self._stepped.add(optimizer)
        if self.ids.isdisjoint(map(id, trained_by([optimizer]))):
            return
        self._steps += 1
        if self._steps % _SELDOM and self._steps & (self._steps - 1):
            return
        trained = {f"parameter {name}": own for name, own in self._named.items() if own.requires_grad and is_dense(own)}
        found = exchange_checksums(trained, self._others(), self._group)
        if len({each.processor for each in found}) == 1:
            when = f"after step {self._steps}" + _AT_FIRST * (self._steps == 1)
            repair_or_raise(trained, found, when, "raise", self._group, [optimizer])
            self._warn_of_others([set(map(tuple, each.note)) for each in found])

    def _others(self) -> list[tuple[str, int]]:
        """Return the shapes and checksums of what optimizers have stepped and no synchronizer has."""
        known = {each for checks in self._all for each in checks.ids}
        others = [each for each in trained_by(self._stepped) if id(each) not in known and is_dense(each)]
        return [(str([*each.shape]), checksum_of_memory(memory_of(each))) for each in others]

    def _warn_of_others(self, held: Sequence[set[tuple[str, int]]]) -> None:
        shapes = {each[0] for own in held for each in own if not all(each in of for of in held)} - self._told
        self._told.update(shapes)
        if shapes and get_rank() == 0:
            warn(_OTHERS.format(shapes=", ".join(sorted(shapes))))


def steps_until_next(costs: Sequence[float], steps: Sequence[float]) -> int:
    """Return after how many steps to compare again: at least 1, at most five minutes' worth.

    Args:
        costs: By rank, the seconds of the last comparison. The rank that came last has waited least, so the smallest
            counts.
        steps: By rank, the mean seconds of a step.
    """
    step = min(steps)
    return max(1, min(math.ceil(min(costs) / (_SHARE * step)), int(_LONGEST / step)))


def _compared(module: torch.nn.Module, optimizers: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, and what the optimizers keep for each of them, with names."""
    for name, parameter in module.named_parameters():
        if is_dense(parameter):
            yield f"parameter {name}", parameter
        for number, optimizer in enumerate(optimizers):
            own = getattr(optimizer, "state", {}).get(parameter)
            for key, value in own.items() if isinstance(own, Mapping) else ():
                if isinstance(value, torch.Tensor) and is_dense(value):
                    yield f"{key} of {name}" + f" in optimizer {number}" * (number > 0), value
