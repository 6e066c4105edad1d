"""Communicate less often: each rank takes a window of local steps, then the ranks average their parameters.

One window, on each rank::

    the window opens     the parameters, equal on all ranks, are copied: the anchor
    every - 1 steps      of this rank's optimizer, on this rank's gradients; nothing is sent
    the window closes    pseudo-gradient = anchor - parameters, averaged over the ranks;
                         the outer optimizer takes one step from the anchor; that is the new model, on all ranks

If the outer optimizer just subtracts the pseudo-gradient, this is local SGD, the plain mean of the parameters
(https://arxiv.org/abs/1805.09767). With Nesterov momentum it is DiLoCo (https://arxiv.org/abs/2311.08105, algorithm 1).

The mean is weighted by the samples that each rank has used in the window. So with ``LocalSGD(every=1)``, SGD without
momentum and a mean loss, the model equals that of a single process, even if batches are divided unevenly.

[Note: torch's averagers]
We don't use ``torch.distributed.algorithms.model_averaging``. Its averagers give every rank the same weight; skip
parameters without a gradient, which can differ between ranks and then deadlocks them; wait without a timeout; average
in the parameters' precision; and put all parameters into one buffer. The outer optimizer is torch's SGD.

:mod:`.methods` has the settings, :mod:`.fragments` the groups of parameters that are averaged together, and
:mod:`.averager` the averaging.
"""

from ddp_callbacks.local_sgd.averager import ParameterAverager, set_gradients_aside
from ddp_callbacks.local_sgd.fragments import OUTER_MOMENTUM
from ddp_callbacks.local_sgd.methods import DiLoCo, LocalSGD, Sync, check_sync

__all__ = ["OUTER_MOMENTUM", "DiLoCo", "LocalSGD", "ParameterAverager", "Sync", "check_sync", "set_gradients_aside"]
