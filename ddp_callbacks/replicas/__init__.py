"""The ranks' models start equal and stay equal.

- :mod:`.parameters`: all ranks start from rank 0's parameters, and running statistics are merged
- :mod:`.equality`: are tensors equal on all ranks
- :mod:`.checks`: every few steps, are the replicas equal, and is a rank slow; :mod:`.step_times`: how long each rank
  computes
"""

from ddp_callbacks.replicas.parameters import describe_checkpoint, require_equal_replicas, require_same_checkpoint

__all__ = ["describe_checkpoint", "require_equal_replicas", "require_same_checkpoint"]
