"""What a rank has for itself at a moment of a fit, beside the Trainer's own checkpoint: taken for a file, and put back.

It is put back behind the hooks that open a run, an epoch or a validation, right before the first batch that is left.
What those hooks have done twice is overwritten by that. The random states come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp_callbacks.data.random_state import RunRandomState
from ddp_callbacks.lightning._lightning import (
    load_trainer_state,
    restore_again,
    results_of_evaluation,
    results_of_training,
    trainer_state,
)
from ddp_callbacks.lightning.saved_attributes import Checksums, load_attributes, save_attributes
from ddp_callbacks.lightning.saved_logs import load_logs, logs_of
from ddp_callbacks.lightning.saved_metrics import load_metrics, save_metrics
from ddp_callbacks.lightning.saved_module import load_module, load_optimizers, save_module, save_optimizers

Own = dict[str, Any]


def take(trainer: Any, at_start: Checksums) -> Own:
    """This rank's, between two batches. A collective.

    Args:
        at_start: Of the module's attributes when the fit began.
    """
    strategy = trainer.strategy
    own = {
        "trainer": trainer_state(trainer),
        "training": logs_of(results_of_training(trainer)),
        "evaluation": logs_of(results_of_evaluation(trainer)),
        "metrics": save_metrics([trainer.lightning_module, *trainer.callbacks]),
        "module": save_module(trainer),
        "attributes": save_attributes(trainer.lightning_module, at_start),
        "strategy": strategy.own_state(),
        "optimizers": save_optimizers(trainer),
    }
    return own | {"random": random_state_of(trainer).state_dict()}


class Taken:
    """What the ranks of an earlier run had, to be put back on a rank of this one.

    Args:
        ranks: Of all ranks that wrote the file; if there were as many as now, only this rank's.
        checkpoint: The Trainer's, for all.
        rank, world_size: Of this run.
        is_same: Whether there were as many.
    """

    def __init__(
        self, ranks: Sequence[Own], checkpoint: dict[str, Any], rank: int, is_same: bool, world_size: int
    ) -> None:
        self._ranks = ranks
        self._mine = 0 if is_same else None
        self._checkpoint = checkpoint
        self._rank, self._world_size = rank, world_size

    def put_back(self, trainer: Any) -> None:
        """Everything but the loaders' positions. Local."""
        first, mine = self._ranks[0], self._mine
        restore_again(trainer, self._checkpoint)
        load_trainer_state(trainer, first["trainer"])
        loop = trainer.fit_loop.epoch_loop
        for name, results, batches in (
            ("training", results_of_training(trainer), loop.batch_progress.current.ready),
            ("evaluation", results_of_evaluation(trainer), loop.val_loop.batch_progress.current.ready),
        ):
            load_logs(results, self._all(name), mine, trainer, batches)
        owners = [trainer.lightning_module, *trainer.callbacks]
        load_metrics(owners, self._all("metrics"), mine, self._rank, self._world_size)
        attributes = self._all("attributes")
        load_attributes(trainer.lightning_module, attributes, mine, trainer.strategy.root_device, self._rank == 0)
        weights = [own["trained"] for own in self._all("strategy")]
        load_module(trainer, self._all("module"), mine, weights)
        states = self._all("strategy") * (1 if mine is None else self._world_size)
        trainer.strategy.load_own_state(states, mine is not None)
        if mine is not None:
            load_optimizers(trainer, first["optimizers"])
        random_state_of(trainer).load_state_dict(first["random"])

    def _all(self, name: str) -> list[Any]:
        return [own[name] for own in self._ranks]


def random_state_of(trainer: Any) -> RunRandomState:
    """That of the run on several processes; on one, the process's."""
    found: RunRandomState | None = trainer.strategy.random_state
    return RunRandomState() if found is None else found
