"""What was logged in a pass under way, for a file: it is joined first, and so the same on any number of processes."""

from __future__ import annotations

from typing import Any

from ddp_callbacks.checkpoints import LocalStates
from ddp_callbacks.lightning._lightning import load_results, result_states
from ddp_callbacks.lightning.logs import JointResults


def logs_of(results: Any) -> dict[str, Any]:
    """What a loop's collection has, between two batches. A collective on several processes."""
    if not isinstance(results, JointResults):
        return {"lightning": result_states(results, set()), "pass": None}
    results.join()
    return {"lightning": result_states(results, results.synced), "pass": results.pass_state()}


def load_logs(results: Any, states: LocalStates, trainer: Any, batches: int) -> None:
    """Inverse of :func:`logs_of`. Local.

    Args:
        batches: That the pass has had.
    """
    joint = isinstance(results, JointResults)
    logged = _all_keys(states)
    synced = load_results(results, logged, trainer, joint)
    if joint:
        state = states.mine["pass"] or {"position": batches - 1}
        results.synced = synced
        results.load_pass_state(state["position"], state["samples"] if states.is_same_world else 0)


def _all_keys(states: LocalStates) -> dict[str, Any]:
    """Lightning's part of a state, with the keys that only other ranks have logged."""
    own = states.mine["lightning"]
    every = {key: metric for state in states.of_ranks for key, metric in state["lightning"]["metrics"].items()}
    return {**own, "metrics": every | own["metrics"]}
