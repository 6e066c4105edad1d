"""The gradient engine: all-reduces the weighted gradients while backward still runs.

:mod:`.synchronizer` is what a program sees, :mod:`.backward_hooks` notes what autograd does, :mod:`.reducer` decides
what is sent when. :mod:`ddp_callbacks.comm.bucket_sums` sums, :mod:`ddp_callbacks.comm.metadata` tells what is known
only at the end, and :mod:`ddp_callbacks.weighing` weights the contributions.
"""

from ddp_callbacks.gradients.synchronizer import GradientSynchronizer

__all__ = ["GradientSynchronizer"]
