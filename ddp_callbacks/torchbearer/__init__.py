"""Train a Torchbearer ``Trial`` on many processes by adding one callback.

Torchbearer's events in order, and the callbacks that handle them::

    on_init                    RankZeroOutput silences the other ranks' writers, StopTogether moves to the end
    on_start                   BroadcastParameters, ShardData, SynchronizeBuffers
      on_start_training        AllReduceGradients begins; then ReduceMetrics, after all callbacks
        on_sample              ShardData sets this rank's share; AllReduceGradients may verify the batch; Flatten
        optimizer.step(closure)
          forward, on_forward, criterion
          on_criterion         callbacks may add to the loss; then AllReduceGradients weighs it, or ends the closure
          backward             gradients are synchronized during backward
          on_backward          the gradients are those of the global batch: clip here
        on_step_training       StopTogether, every few steps, and if a callback may stop there
      on_end_training          SynchronizeBuffers, after ReduceMetrics has merged the metrics
      ... validation likewise; in predict() ShardData gathers the outputs
      on_end_epoch, on_checkpoint   with the merged metrics; then StopTogether compares the replicas
    on_end                     removes hooks, restores generators; BatchNorm layers when run() returns or raises

:class:`Resume` acts after all of them: it may end the run after a batch or an epoch. A resumed run gets the opening
events again. Then :class:`Resume` restores all state: before the next batch, or after ``on_start``.

With ``sync=LocalSGD(...)`` or ``DiLoCo(...)``, AverageParameters replaces AllReduceGradients: gradients stay local, and
windows close in on_step_training and on_end_training.

- :mod:`.replicas`: BroadcastParameters, SynchronizeBuffers, StopTogether; :mod:`.data`: ShardData, Flatten
- :mod:`.gradients`: AllReduceGradients, AverageParameters; :mod:`.loss_weight`: what each rank's loss counts
- :mod:`.metrics`: ReduceMetrics, which owns all values of an epoch; :mod:`.metric_check`: are they means over samples
- :mod:`.output`: RankZeroOutput; :mod:`.resume_run`: Resume, and :mod:`.run_state`, what it saves of a run
- :mod:`.base`: the class of all; :mod:`.state`: what they keep in the Trial's; :mod:`._torchbearer`: private names

``evaluate()`` has on_start_epoch and on_end_epoch, too, and writes its metrics into the last epoch of the history.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ddp_callbacks.versions import how_to_install

try:
    from torchbearer.callbacks import Callback, CallbackList
except ImportError as error:
    raise ImportError(f"Torchbearer is not installed: {how_to_install('torchbearer', 'packaging', 'tqdm')}") from error

from ddp_callbacks.checkpoints.recovery import is_wanted
from ddp_callbacks.data.shares import BatchSize
from ddp_callbacks.gradients.bucket_sums import EngineOptions
from ddp_callbacks.gradients.comm_hooks import CommHook
from ddp_callbacks.gradients.compression import Compress
from ddp_callbacks.gradients.verification import Verify, check_verify, is_to_verify
from ddp_callbacks.local_sgd import Sync, check_sync
from ddp_callbacks.process_group import DEFAULT_TIMEOUT, join_process_group
from ddp_callbacks.randomness.option import Randomness
from ddp_callbacks.replicas.equality import OnDivergence, check_on_divergence
from ddp_callbacks.torchbearer.data import Flatten, ShardData
from ddp_callbacks.torchbearer.gradients import AllReduceGradients, AverageParameters, SkipBatch, check_skip
from ddp_callbacks.torchbearer.loss_weight import LossWeight, Weight
from ddp_callbacks.torchbearer.metrics import ReduceMetrics
from ddp_callbacks.torchbearer.output import RankZeroOutput
from ddp_callbacks.torchbearer.replicas import BroadcastParameters, StopTogether, SynchronizeBuffers
from ddp_callbacks.torchbearer.resume_run import Recover, Resume
from ddp_callbacks.torchbearer.state import SHARE

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


class DDPCallback(CallbackList):  # type: ignore[misc]
    """Train a Trial on many processes: a list of callbacks, each for one part of the work.

    Some can also be used without the others: :class:`BroadcastParameters`, :class:`ShardData`,
    :class:`AllReduceGradients`, :class:`ReduceMetrics` and :class:`RankZeroOutput`.

    Make it in every process. It joins the process group from torchrun's environment variables and blocks until all
    processes have joined (to pass rank, world size and address, call :func:`ddp_callbacks.join_process_group` first).
    Without such variables it is a single process, and nothing changes. ``run``, ``evaluate`` and ``predict`` are then
    collectives: every process must call them, in the same order.

    Args:
        batch_size: See :class:`ShardData`.
        weight, reduction: The divisor of a mean loss, and mean or sum. The default is right for torch's criteria. See
            :class:`ddp_callbacks.torchbearer.loss_weight.LossWeight`.
        randomness: See :class:`ShardData`.
        sync: ``"every_step"``: sum the gradients of every backward over the processes, which is exact.
            :class:`ddp_callbacks.LocalSGD` or :class:`ddp_callbacks.DiLoCo`, for slow networks: each process takes
            local steps, and parameters are averaged every few steps and at the end of each training pass, so that
            evaluations and checkpoints have the averaged model, equal on all processes. The loss must be a mean.
        bucket_cap_mb, comm_hook, comm_state, compress: See :class:`ddp_callbacks.GradientSynchronizer`; with another
            ``sync``, :class:`ddp_callbacks.ParameterAverager`.
        verify: See :class:`AllReduceGradients`. ``"warn"`` compares nothing if you give ``weight``, ``reduction`` or
            ``batch_size="per_process"``; ``None`` never does.
        skip_batch: ``"non_finite"``: skip a training batch on all processes if its loss is NaN or infinite on one; see
            :class:`AllReduceGradients`. ``None``: the loss spoils the parameters, and the first one is a warning.
        on_divergence: Parameters and the optimizer's state are compared every few steps, and parameters and buffers at
            the end of each epoch. If they differ, ``"raise"`` raises :class:`ddp_callbacks.errors.MismatchError`;
            ``"repair"`` gives all processes the values that more than half of them have, and raises without such a
            majority. With another ``sync``, they are compared at the end of each epoch only.
        sync_batchnorm: Whether BatchNorm layers use the statistics of the global batch, as by
            :class:`ddp_callbacks.BatchNormSynchronizer`, until ``run``, ``evaluate`` or ``predict`` returns or raises.
            A custom closure (``with_closure``) must then call ``on_criterion`` before the backward of each loss. With a
            ``comm_hook``, all processes must use the same parameters in each backward. Otherwise each process
            normalizes by its part.
        also_rank_zero: See ``also`` of :class:`RankZeroOutput`.
        timeout: How long to wait for the other processes to join, and for a silent process.

    Raises:
        ConfigurationError: A setting or an environment variable is invalid; a ``ValueError``.
        RendezvousError: A process did not join.
    """

    def __init__(
        self,
        batch_size: BatchSize | None = "global",
        *,
        weight: Weight | None = None,
        reduction: str | None = None,
        randomness: Randomness = "global",
        sync: Sync = "every_step",
        bucket_cap_mb: float = 25.0,
        comm_hook: CommHook | None = None,
        comm_state: Any = None,
        compress: Compress = None,
        verify: Verify | None = "warn",
        skip_batch: SkipBatch | None = None,
        on_divergence: OnDivergence = "raise",
        sync_batchnorm: bool = False,
        also_rank_zero: tuple[type[Callback], ...] = (),
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        check_sync(sync, reduction, comm_hook=comm_hook, sync_batchnorm=sync_batchnorm)
        check_verify(verify, sync)
        check_skip(skip_batch, sync)
        check_on_divergence(on_divergence)
        join_process_group(timeout=timeout)
        if sync == "every_step":
            checks = verify if is_to_verify(verify, sync, weight, reduction, batch_size) else None
            synchronize: Callback = AllReduceGradients(
                weight, reduction, bucket_cap_mb, comm_hook, comm_state, compress, checks, skip_batch
            )
        else:
            options = EngineOptions(bucket_cap_mb, None, None, compress)
            synchronize = AverageParameters(sync, LossWeight(weight, reduction), options)
        callbacks = [
            BroadcastParameters(),
            ShardData(batch_size, randomness),
            SynchronizeBuffers(sync_batchnorm),
            synchronize,
            ReduceMetrics(weight, reduction),
            RankZeroOutput(also_rank_zero),
            StopTogether(on_divergence),
            *([Recover()] if is_wanted() else []),
        ]
        super().__init__(callbacks)
