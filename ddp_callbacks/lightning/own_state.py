"""What a rank has for itself at a moment of a fit, beside the Trainer's own checkpoint: taken for a file, and put back.

It is put back behind the hooks that open a run or an epoch, right before the first batch that is left.
What those hooks have done twice is overwritten by that. The random states come last.
"""

from __future__ import annotations

from typing import Any

from ddp_callbacks.checkpoints import LocalStates
from ddp_callbacks.checkpoints.attributes import Checksums, changed
from ddp_callbacks.data.random_state import RunRandomState
from ddp_callbacks.lightning._lightning import (
    load_trainer_state,
    restore_again,
    results_of_evaluation,
    results_of_training,
    trainer_state,
)
from ddp_callbacks.lightning.saved_attributes import attributes_of, load_attributes
from ddp_callbacks.lightning.saved_logs import load_logs, logs_of
from ddp_callbacks.lightning.saved_metrics import load_metrics, save_metrics
from ddp_callbacks.lightning.saved_module import load_module, load_optimizers, save_module, save_optimizers


def take(trainer: Any, at_start: Checksums) -> dict[str, Any]:
    """This rank's, between two batches. A collective.

    Args:
        at_start: Of the module's attributes when the fit began.
    """
    return {
        "trainer": trainer_state(trainer),
        "training": logs_of(results_of_training(trainer)),
        "evaluation": logs_of(results_of_evaluation(trainer)),  # which values of a step are logged
        "metrics": save_metrics([trainer.lightning_module, *trainer.callbacks]),
        "module": save_module(trainer),
        "attributes": changed(attributes_of(trainer.lightning_module), at_start),
        "strategy": trainer.strategy.own_state(),
        "optimizers": save_optimizers(trainer),
        "random": random_state_of(trainer).state_dict(),
    }


def put_back(trainer: Any, states: LocalStates, checkpoint: dict[str, Any]) -> None:
    """Everything but the loaders' positions. Local.

    Args:
        states: What the ranks of an earlier run have taken.
        checkpoint: The Trainer's, for all.
    """
    own, module, strategy = states.mine, trainer.lightning_module, trainer.strategy
    restore_again(trainer, checkpoint)
    load_trainer_state(trainer, own["trainer"])
    loop = trainer.fit_loop.epoch_loop
    batches, validated = loop.batch_progress.current.ready, loop.val_loop.batch_progress.current.ready
    load_logs(results_of_training(trainer), states.of("training"), trainer, batches)
    load_logs(results_of_evaluation(trainer), states.of("evaluation"), trainer, validated)
    load_metrics([module, *trainer.callbacks], states.of("metrics"))
    load_attributes(module, states.of("attributes"), strategy.root_device)
    load_module(trainer, states.of("module"), states.of("strategy").of("trained").of_ranks)
    strategy.load_own_state(states.of("strategy").of_ranks, states.is_same_world)
    if states.is_same_world:
        load_optimizers(trainer, own["optimizers"])
    random_state_of(trainer).load_state_dict(own["random"])


def random_state_of(trainer: Any) -> RunRandomState:
    """That of the run on several processes; on one, the process's."""
    found: RunRandomState | None = trainer.strategy.random_state
    return RunRandomState() if found is None else found
