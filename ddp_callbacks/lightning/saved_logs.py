"""What was logged in a pass under way, for a file, and what becomes of it on as many processes, or on others.

On as many processes each gets its own records back, with the same bits. On others the records of all are joined to one
value and what it counts, and Lightning's accumulation gets that on every process, as if it had been joined before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ddp_callbacks.lightning._lightning import load_results, result_states
from ddp_callbacks.lightning._torchmetrics import set_step_value, step_value
from ddp_callbacks.lightning.history import History, join
from ddp_callbacks.lightning.logs import JointResults


def logs_of(results: Any) -> dict[str, Any]:
    """What a loop's collection has, between two batches. A collective on several processes."""
    joint = isinstance(results, JointResults)
    if joint:
        results.join_rest()
    return {"lightning": result_states(results), "pass": results.pass_state() if joint else None}


def load_logs(results: Any, states: Sequence[dict[str, Any]], mine: int | None, trainer: Any, batches: int) -> None:
    """Inverse of :func:`logs_of`. Local.

    Args:
        states: Of all ranks that wrote the file.
        mine: Which of them is this rank's; ``None`` if there were another number of ranks.
        batches: That the pass has had.
    """
    joint = isinstance(results, JointResults)
    own = states[0 if mine is None else mine]
    load_results(results, _all_keys(own, states), trainer.lightning_module, trainer.strategy.reduce)
    if joint and mine is not None and own["pass"] is not None:
        epoch = {key: _history(state) for key, state in own["pass"]["epoch"].items()}
        results.load_pass_state(epoch, own["pass"]["position"], own["pass"]["samples"])
        return
    if joint:
        results.load_pass_state({}, batches - 1, 0)
    passes = [state["pass"] for state in states if state["pass"] is not None]
    for key in dict.fromkeys(key for each in passes for key in each["epoch"]):
        histories = [_history(each["epoch"][key]) for each in passes if key in each["epoch"]]
        value, size = join([history.parts() for history in histories], histories[0].operation)
        joined = torch.tensor(value, dtype=histories[0].dtype)
        if joint:
            results.accumulate(key, joined, size)
        else:
            _accumulate(results[key], joined, size)


def _all_keys(own: dict[str, Any], states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Lightning's part of a state, with the keys that only other ranks have logged."""
    found: dict[str, Any] = {**own["lightning"]}
    if len({tuple(state["lightning"]["metrics"]) for state in states}) > 1 and len(states) > 1:
        every = {key: metric for state in states for key, metric in state["lightning"]["metrics"].items()}
        found["metrics"] = every | found["metrics"]
    return found


def _history(state: dict[str, Any]) -> History:
    made = History(state["operation"])
    made.load_state_dict(state)
    return made


def _accumulate(metric: Any, value: torch.Tensor, size: float) -> None:
    """Into Lightning's own, whose value of the last step stays what it is."""
    before = step_value(metric)
    metric.update(value.to(metric.value.device), int(size) if size.is_integer() else size)
    metric.has_reset = False
    set_step_value(metric, before)
