"""Train a Torchbearer ``Trial`` on many processes by adding one callback.

Torchbearer's events in order, and the callbacks that handle them::

    on_init                    RankZeroOutput and ReportFailures wrap, AgreeToStop goes last
    on_start                   BroadcastParameters, SynchronizeBatchNorm, ShardData
      on_start_training        AllReduceGradients and ReduceMetrics begin
        on_sample              ShardData sets this rank's share; VerifyGradient at the first batch; Flatten
        optimizer.step(closure)
          forward, on_forward, criterion
          on_criterion         SkipBatches may end the closure here; AllReduceGradients sets the weight of the backward
          backward             gradients are synchronized during backward
          on_backward          the gradients are those of the global batch: clip here
        on_step_training       AgreeToStop
      on_end_training          MergeBuffers, after ReduceMetrics has merged the metrics
      ... validation likewise; GatherPredictions in predict()
      on_end_epoch, on_checkpoint   with the merged metrics; CompareReplicas, AgreeToStop
    on_end                     removes hooks, restores generators; BatchNorm layers when run() returns or raises

:class:`Resume` acts behind all of them: it may end the run after a batch, a training pass or an epoch. A run that goes
on gets the opening events again, and then everything is put back: before the next batch, or after ``on_start``.

With ``sync=LocalSGD(...)`` or ``DiLoCo(...)``, AverageParameters replaces AllReduceGradients: gradients stay local, and
windows close in on_step_training and on_end_training.
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
from ddp_callbacks.torchbearer.decisions import AgreeToStop, CompareReplicas
from ddp_callbacks.torchbearer.flatten import Flatten
from ddp_callbacks.torchbearer.gradients import AllReduceGradients
from ddp_callbacks.torchbearer.local_sgd import AverageParameters
from ddp_callbacks.torchbearer.metrics import ReduceMetrics
from ddp_callbacks.torchbearer.output import RankZeroOutput
from ddp_callbacks.torchbearer.predictions import GatherPredictions
from ddp_callbacks.torchbearer.reports import ReportFailures
from ddp_callbacks.torchbearer.resume import Resume
from ddp_callbacks.torchbearer.skipping import SkipBatches
from ddp_callbacks.torchbearer.start import BroadcastParameters, MergeBuffers
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
    "Resume",
    "ShardData",
    "SkipBatches",
    "SynchronizeBatchNorm",
    "VerifyGradient",
]
