"""BatchNorm layers that normalize by the whole batch.

:mod:`.layers` replaces their forward, and :mod:`.statistics` has the exchanges between the ranks.
"""

from ddp_callbacks.batch_norm.layers import BatchNormSynchronizer, samples_needed

__all__ = ["BatchNormSynchronizer", "samples_needed"]
