"""The gradient engine: all-reduces the weighted gradients while backward still runs.

:mod:`.synchronizer` is the interface for programs, :mod:`.backward_hooks` notes complete gradients, and :mod:`.reducer`
decides which buckets to send when. :mod:`ddp_callbacks.comm.bucket_sums` sums them, :mod:`ddp_callbacks.comm.metadata`
encodes the numbers that are known only at the end, and :mod:`ddp_callbacks.weighing` weights the contributions.
"""

from ddp_callbacks.gradients.synchronizer import GradientSynchronizer

__all__ = ["GradientSynchronizer"]
