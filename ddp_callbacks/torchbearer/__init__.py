"""Train a Torchbearer ``Trial`` on many processes by adding one callback.

Torchbearer's events in order, and the callbacks that handle them::

    on_init                    RankZeroOutput silences the other ranks' writers, StopTogether moves to the end
    on_start                   BroadcastParameters, ShardData, SynchronizeBuffers
      on_start_training        AllReduceGradients and ReduceMetrics begin
        on_sample              ShardData sets this rank's share; AllReduceGradients may verify the first batch; Flatten
        optimizer.step(closure)
          forward, on_forward, criterion
          on_criterion         AllReduceGradients may end the closure here, or sets the weight of the backward
          backward             gradients are synchronized during backward
          on_backward          the gradients are those of the global batch: clip here
        on_step_training       StopTogether, if a callback may stop there
      on_end_training          SynchronizeBuffers, after ReduceMetrics has merged the metrics
      ... validation likewise; in predict() ShardData gathers the outputs
      on_end_epoch, on_checkpoint   with the merged metrics; then StopTogether compares the replicas
    on_end                     removes hooks, restores generators; BatchNorm layers when run() returns or raises

:class:`Resume` acts after all of them: it may end the run after a batch, a training pass or an epoch. A resumed run
gets the opening events again, and then everything is put back: before the next batch, or after ``on_start``.

With ``sync=LocalSGD(...)`` or ``DiLoCo(...)``, AverageParameters replaces AllReduceGradients: gradients stay local, and
windows close in on_step_training and on_end_training.
"""

from ddp_callbacks.versions import how_to_install

try:
    import torchbearer as _installed  # noqa: F401
except ImportError as error:
    raise ImportError(f"Torchbearer is not installed: {how_to_install('torchbearer', 'packaging', 'tqdm')}") from error

from ddp_callbacks.torchbearer.base import SHARE
from ddp_callbacks.torchbearer.bundle import DDPCallback
from ddp_callbacks.torchbearer.data import Flatten, ShardData
from ddp_callbacks.torchbearer.gradients import AllReduceGradients
from ddp_callbacks.torchbearer.metrics import ReduceMetrics
from ddp_callbacks.torchbearer.output import RankZeroOutput
from ddp_callbacks.torchbearer.replicas import BroadcastParameters
from ddp_callbacks.torchbearer.resume import Resume

__all__ = [
    "SHARE",
    "AllReduceGradients",
    "BroadcastParameters",
    "DDPCallback",
    "Flatten",
    "RankZeroOutput",
    "ReduceMetrics",
    "Resume",
    "ShardData",
]
