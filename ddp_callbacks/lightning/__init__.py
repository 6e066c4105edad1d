"""Train a Lightning ``Trainer`` on many processes by a strategy's name.

Importing this registers the strategy ``"ddp_callbacks"`` in ``lightning.pytorch`` and in ``pytorch_lightning``,
whichever is installed. What happens in a training step, in Lightning's order::

    Trainer(strategy="ddp_callbacks")    the strategy finds its rank: world
    setup                                processes compared, parameters broadcast: strategy; a run begins: run
      batch_to_device                    what this rank has of the batch: batches
      training_step                      self.log records: logs; torchmetrics: metrics
        its end                          the step's logged values are sent
      backward                           gradients are synchronized, hidden in it; the loss is weighed before
      on_after_backward                  the gradients are those of the whole batch: clip here
      on_train_batch_end                 the logged values are those of the whole batch
    end of an epoch or an evaluation     epoch values and running statistics are merged, before any hook reads them

With ``sync=LocalSGD(...)`` or ``DiLoCo(...)`` the gradients stay the rank's own, the parameters are averaged every so
many steps and at the moments in ``local_steps``, and the ranks meet in those steps only.

``package`` makes the classes for both packages; ``callback`` is for a Trainer whose strategy is another; ``reductions``
are what users ask the strategy for.
"""

from typing import Any

from ddp_callbacks.lightning import package as _package

_packages = [_package.make(name) for name in _package.wanted()]

#: For the package that the program uses; for ``lightning`` where both are installed and none was imported before.
CallbackStrategy: Any = _packages[0].CallbackStrategy
DDPCallback: Any = _packages[0].DDPCallback

__all__ = ["CallbackStrategy", "DDPCallback"]
