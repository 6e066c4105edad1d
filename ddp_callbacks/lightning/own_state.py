"""Save and restore the state that a rank has for itself in a fit, beside the Trainer's own checkpoint.

A resumed fit restores it after the hooks that open a run or an epoch, right before the next batch. This overwrites what
these hooks did a second time. The random states come last.

Parameters and optimizers are equal on all ranks, so they are in Lightning's part of the file. With local steps the
averager saves them, except optimizers beyond the first. Gradients are here if no gradient engine saves them.

On the same number of processes, each gets its own states of torchmetrics. On another, each state's
``dist_reduce_fx`` decides:

===================  ==========================================================================================
sum, lists           rank 0 gets the sum, or all entries, rank by rank; the others begin with the default
mean, maximum,       every rank gets the mean, maximum or minimum of all
minimum
any other            the rank's own, if there are no fewer ranks than before; otherwise it is an error
===================  ==========================================================================================
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torchmetrics import Metric

from ddp_callbacks.checkpoints import LocalStates
from ddp_callbacks.checkpoints.module_state import load_module, save_module
from ddp_callbacks.checkpoints.saved_attributes import attributes_of, load_attributes
from ddp_callbacks.data.attributes import Checksums, changed
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.lightning import _logged, _parts, _progress, _torchmetrics
from ddp_callbacks.lightning.logs import JointResults
from ddp_callbacks.lightning.packages import ROOTS
from ddp_callbacks.lightning.synced_metrics import metrics_of


def take(trainer: Any, at_start: Checksums) -> dict[str, Any]:
    """Return this rank's state between two batches. A collective.

    Args:
        at_start: Checksums of the module's attributes when the fit began.
    """
    training = _logged.results_of_training(trainer)
    logs = {
        "training": _logs_of(training),
        "evaluation": _logs_of(_logged.results_of_evaluation(trainer)),  # which values of a step are logged
    }
    if isinstance(training, JointResults):
        _logged.refresh_metrics(trainer, training)  # a single process reads the values of the whole batch, too
    return logs | {
        "trainer": _progress.trainer_state(trainer),
        "metrics": [*map(_torchmetrics.plain_states, metrics_of([trainer.lightning_module, *trainer.callbacks]))],
        "module": save_module(trainer.lightning_module, _has_gradients(trainer)),
        "attributes": changed(attributes_with_metrics(trainer.lightning_module), at_start),
        "strategy": trainer.strategy.own_state(),
        "optimizers": _save_optimizers(trainer),
        "random": trainer.strategy.random_state.state_dict(),
    }


def attributes_with_metrics(module: torch.nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a module, with those of its metrics in place of their states."""
    metrics = {name: part for name, part in module.named_modules() if isinstance(part, Metric)}
    found = {name: value for name, value in attributes_of(module).items() if name.rpartition(".")[0] not in metrics}
    for prefix, metric in metrics.items():
        found |= {f"{prefix}.{name}": value for name, value in _torchmetrics.attributes_beside(metric).items()}
    return found


def put_back(trainer: Any, states: LocalStates, checkpoint: dict[str, Any]) -> None:
    """Restore everything but the loaders' positions. Local.

    Args:
        states: The states that the ranks of the earlier run took.
        checkpoint: The Trainer's checkpoint, the same for all ranks.
    """
    own, module, strategy = states.mine, trainer.lightning_module, trainer.strategy
    _progress.restore_again(trainer, checkpoint)
    _progress.load_trainer_state(trainer, own["trainer"])
    loop = trainer.fit_loop.epoch_loop
    batches, validated = loop.batch_progress.current.ready, loop.val_loop.batch_progress.current.ready
    _load_logs(_logged.results_of_training(trainer), states.of("training"), trainer, batches)
    _load_logs(_logged.results_of_evaluation(trainer), states.of("evaluation"), trainer, validated)
    _load_metrics([module, *trainer.callbacks], states.of("metrics"))
    load_attributes(module, states.of("attributes"), strategy.root_device)
    load_module(module, states.of("module"), states.of("strategy").of("trained").of_ranks)
    strategy.load_own_state(states.of("strategy").of_ranks, states.is_same_world)
    if states.is_same_world:
        for optimizer, state in zip(trainer.optimizers[1:], own["optimizers"], strict=False):
            _parts.torch_optimizer(optimizer).load_state_dict(state)
    strategy.random_state.load_state_dict(own["random"])


def _logs_of(results: Any) -> dict[str, Any]:
    """Return a loop's logged values, between two batches. A collective on several processes."""
    if not isinstance(results, JointResults):
        return {"lightning": _logged.result_states(results, set()), "pass": None}
    results.join()
    return {"lightning": _logged.result_states(results, results.synced), "pass": results.pass_state()}


def _load_logs(results: Any, states: LocalStates, trainer: Any, batches: int) -> None:
    """Inverse of :func:`_logs_of`. Local.

    Args:
        batches: The number of batches that the pass has had.
    """
    joint = isinstance(results, JointResults)
    synced = _logged.load_results(results, states.mine["lightning"], trainer, joint)
    if joint:
        results.synced = synced
        state = states.mine["pass"] or {"position": batches - 1}
        results.load_pass_state(state if states.is_same_world else state | {"samples": 0})


# --- torchmetrics --------------------------------------------------------------------------------------------------


def _load_metrics(owners: Sequence[Any], states: LocalStates) -> None:
    """Restore the states of the metrics in ``owners``: a module and callbacks. Local.

    Raises:
        ConfigurationError: A metric's states cannot be given to fewer ranks.
    """
    for index, metric in enumerate(metrics_of(owners)):
        if index < len(states.mine):
            own = states.mine[index]
            saved = own["states"] if states.is_same_world else _merged_states(metric, states, index)
            _torchmetrics.set_states(metric, saved, own["updates"])


def _merged_states(metric: Metric, by_rank: LocalStates, index: int) -> dict[str, Any]:
    rank, world_size = by_rank.rank, by_rank.world_size
    defaults = _torchmetrics.default_states(metric)
    found: dict[str, Any] = {}
    for name, reduction in _torchmetrics.reductions_of(metric).items():
        states = [each[index]["states"][name] for each in by_rank.of_ranks]
        if isinstance(defaults[name], list):
            found[name] = [part for state in states for part in state] if rank == 0 else []
        elif reduction in ("mean", "max", "min"):
            stacked = torch.stack(states)
            found[name] = getattr(stacked, "mean" if reduction == "mean" else f"a{reduction}")(0)
        elif reduction == "sum" or (reduction == "cat" and len(states) == 1):
            found[name] = torch.stack(states).sum(0).to(states[0].dtype) if rank == 0 else defaults[name]
        elif reduction == "cat":
            found[name] = torch.cat(states) if rank == 0 else defaults[name]
        elif world_size >= len(states):
            found[name] = states[rank] if rank < len(states) else defaults[name]
        else:
            raise ConfigurationError(
                f"{type(metric).__name__} keeps {name!r} in a way (dist_reduce_fx) that cannot be put together: in the "
                f"middle of an epoch it can resume with {len(states)} processes or more, not with {world_size}."
            )
    return found


def _save_optimizers(trainer: Any) -> list[dict[str, Any]]:
    """Return the states of the optimizers that the averager does not save; only with local steps. Local."""
    if not trainer.strategy.takes_local_steps:
        return []
    return [copy.deepcopy(_parts.torch_optimizer(optimizer).state_dict()) for optimizer in trainer.optimizers[1:]]


def _has_gradients(trainer: Any) -> bool:
    """Whether an optimizer's next step may use gradients that the gradient engine does not save."""
    averaging = importlib.import_module(f"{ROOTS[trainer.strategy.package]}.callbacks").StochasticWeightAveraging
    if not trainer.lightning_module.automatic_optimization or any(isinstance(c, averaging) for c in trainer.callbacks):
        return True  # its last epoch, for BatchNorm, takes a step with the gradients of the one before
    return bool(trainer.strategy.takes_local_steps and _parts.is_accumulating(trainer))
