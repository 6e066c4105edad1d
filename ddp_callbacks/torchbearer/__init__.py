"""Train a Torchbearer ``Trial`` on many processes by adding one callback.

What happens in a step, Torchbearer's events in their order and what listens to them here::

    on_init                    RankZeroOutput and ReportFailures wrap, AgreeToStop goes last
    on_start                   BroadcastParameters, SynchronizeBatchNorm, ShardData
      on_start_training        AllReduceGradients and ReduceMetrics begin
        on_sample              ShardData says what this rank has of the batch; VerifyGradient at the first; Flatten
        optimizer.step(closure)
          forward, on_forward, criterion
          on_criterion         AllReduceGradients weighs the backward that follows
          backward             gradients are synchronized, hidden in it
          on_backward          the gradients are those of the whole batch: clip here
        on_step_training       AgreeToStop
      on_end_training          ReduceMetrics has merged before; MergeBuffers
      ... validation likewise; GatherPredictions in predict()
      on_end_epoch, on_checkpoint   with the merged metrics; CompareReplicas, AgreeToStop
    on_end                     hooks are removed, generators given back; BatchNorm layers when run() returns or raises

With ``sync=LocalSGD(...)`` or ``DiLoCo(...)`` AverageParameters stands in the place of AllReduceGradients: gradients
stay the rank's own, and windows close in on_step_training and on_end_training.
"""

from ddp_callbacks.versions import how_to_install

try:
    import torchbearer as _installed  # noqa: F401
except ImportError as error:
    raise ImportError(f"Torchbearer is not installed: {how_to_install('torchbearer', 'packaging', 'tqdm')}") from error

from ddp_callbacks.torchbearer.base import SHARE, DistributedCallback
from ddp_callbacks.torchbearer.batch_norm import SynchronizeBatchNorm
from ddp_callbacks.torchbearer.bundle import DDPCallback
from ddp_callbacks.torchbearer.data import ShardData
from ddp_callbacks.torchbearer.decisions import AgreeToStop
from ddp_callbacks.torchbearer.flatten import Flatten
from ddp_callbacks.torchbearer.gradients import AllReduceGradients
from ddp_callbacks.torchbearer.local_sgd import AverageParameters
from ddp_callbacks.torchbearer.metrics import ReduceMetrics
from ddp_callbacks.torchbearer.output import RankZeroOutput
from ddp_callbacks.torchbearer.predictions import GatherPredictions
from ddp_callbacks.torchbearer.reports import ReportFailures
from ddp_callbacks.torchbearer.start import BroadcastParameters, CompareReplicas, MergeBuffers
from ddp_callbacks.torchbearer.verification import VerifyGradient

__all__ = [
    "SHARE",
    "AgreeToStop",
    "AllReduceGradients",
    "AverageParameters",
    "BroadcastParameters",
    "CompareReplicas",
    "DDPCallback",
    "DistributedCallback",
    "Flatten",
    "GatherPredictions",
    "MergeBuffers",
    "RankZeroOutput",
    "ReduceMetrics",
    "ReportFailures",
    "ShardData",
    "SynchronizeBatchNorm",
    "VerifyGradient",
]
