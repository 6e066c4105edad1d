"""What ranks do with Torchbearer, on CPUs and on GPUs alike."""

from __future__ import annotations

from typing import Any

import trials
from ways import Way

# Those whose own code knows no device.
NAMES = (
    "shuffled_ragged_adam",
    "unshuffled_drop_last_momentum",
    "batches_smaller_than_the_world",
    "clipping_and_decay",
    "kept_gradients",
    "schedulers",
    "sum_reduction",
    "evaluate_and_predict",
    "synchronized_batch_norm",
    "resumed",
)


def run_scenario(device: str, name: str, ours: bool) -> Any:
    """A Trial with the callback or without it; what must not depend on the number of processes."""
    trials.DEVICE = device
    return trials.SCENARIOS[name](trials.Extra(Way() if ours else None))
