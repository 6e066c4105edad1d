"""Train a Lightning ``Trainer``, or a loop of Lightning Fabric, on many processes by a callback or a strategy's name.

Importing this package registers the strategy ``"ddp_callbacks"`` in ``lightning``. Importing
``ddp_callbacks.pytorch_lightning`` registers it in ``pytorch_lightning``, with the modules here. ``fabric`` has the
strategy of Fabric; ``strategy_processes`` is common to both. A run of a Trainer, in Lightning's order::

    Trainer(strategy="ddp_callbacks")    the strategy finds its rank: cluster_environment
    setup                                processes compared, parameters broadcast: strategy; a run begins: run
      batch_to_device                    this rank's share of the batch is noted: batches; without a sample: padding
      hooks of batches                   draw as one process: hook_draws
      training_step                      self.log records: logs; torchmetrics: synced_metrics
        its end                          a step that all ranks skip is skipped: skipping
      backward                           the loss is weighed; gradients are synchronized while backward runs
      on_after_backward                  the gradients are those of the whole batch: clip here
      on_train_batch_end                 logged values are joined, before a logger or a user's hook reads: batch_ends
      the end of the batch               the ranks may act on what one of them wants, such as to stop: decisions
    end of an epoch or an evaluation     epoch values and running statistics are merged, before any hook reads them
    predict                              each rank computes whole batches in turn: predictions

``batch_comparison`` computes a batch as one process. A run puts its methods in Lightning's objects by
:mod:`ddp_callbacks.replacement`, which takes them away at its end.

With ``sync=LocalSGD(...)`` or ``DiLoCo(...)`` each rank keeps its own gradients. The ranks average the parameters every
few steps and at the moments in ``local_steps``, and meet only then.

Logged values wait as ``logged_rows`` until the ranks join them; ``logs`` says when.

With the callback ``Resume`` a fit can stop and resume at the next batch. ``resume_fit`` reads and writes the file.
``own_state`` is each rank's state beside Lightning's checkpoint: logged values, buffers, metrics and the module's
attributes. ``keep_going`` begins a call again without processes that died. ``checkpoints`` lets all ranks read
rank 0's. ``loggers`` lets a resumed fit log to the files of the fit that was cut, ``checkpoint_files`` save to them.

Only ``_parts``, ``_logged`` and ``_progress`` use private names of Lightning, ``_torchmetrics`` those of torchmetrics,
and list them.

``packages`` checks which package is there, and that it has these names; ``classes`` makes the classes for it.
``callback`` chooses the strategy when a Trainer is made.
"""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_callbacks.lightning.classes import CallbackFabricStrategy, CallbackStrategy, DDPCallback, Resume
elif "ddp_callbacks.pytorch_lightning" not in sys.modules:
    from ddp_callbacks.lightning.packages import make

    CallbackStrategy, DDPCallback, Resume, CallbackFabricStrategy = make("lightning", __name__)
else:  # ddp_callbacks.pytorch_lightning imports this package only for its modules

    def __getattr__(name: str) -> Any:
        """Make the classes when a program that uses both packages asks for them."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from ddp_callbacks.lightning.packages import make

        order = ("CallbackStrategy", "DDPCallback", "Resume", "CallbackFabricStrategy")
        globals().update(zip(order, make("lightning", __name__), strict=True))
        return globals()[name]


__all__ = ["CallbackFabricStrategy", "CallbackStrategy", "DDPCallback", "Resume"]
