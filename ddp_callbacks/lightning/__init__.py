"""Train a Lightning ``Trainer``, or a loop of Lightning Fabric, on many processes by a callback or a strategy's name.

Importing this registers the strategy ``"ddp_callbacks"`` in ``lightning``, and ``ddp_callbacks.pytorch_lightning`` in
``pytorch_lightning``, by the modules here. Fabric's is in ``fabric``; ``processes`` is what both have in common. Of a
Trainer, what happens in a training step, in Lightning's order::

    Trainer(strategy="ddp_callbacks")    the strategy finds its rank: world
    setup                                processes compared, parameters broadcast: strategy; a run begins: run
      batch_to_device                    what this rank has of the batch: batches
      training_step                      self.log records: logs; torchmetrics: metrics
        its end                          what this rank has decided is sent
      backward                           gradients are synchronized, hidden in it; the loss is weighed before
      on_after_backward                  the gradients are those of the whole batch: clip here
      on_train_batch_end                 then a logger may write: what was logged is joined before
    end of an epoch or an evaluation     epoch values and running statistics are merged, before any hook reads them

With ``sync=LocalSGD(...)`` or ``DiLoCo(...)`` the gradients stay the rank's own, the parameters are averaged every so
many steps and at the moments in ``local_steps``, and the ranks meet in those steps only.

What is logged waits as ``rows`` until the ranks join it; ``logs`` says when.

With the callback ``Resume`` a fit can stop and go on there: ``resume`` reads and writes the file; ``own_state`` is what
the ranks have beside Lightning's checkpoint: what was logged, buffers, ``saved_metrics``, ``saved_attributes``.

What is private in Lightning is touched in ``_parts``, ``_logged`` and ``_progress``, and ``_lightning`` requires it.

``package`` makes ``classes`` for one of the ``packages``; ``callback`` chooses the strategy when a Trainer is made;
``reductions`` are what users ask the strategies for.
"""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_callbacks.lightning.classes import CallbackFabricStrategy, CallbackStrategy, DDPCallback, Resume
elif "ddp_callbacks.pytorch_lightning" not in sys.modules:
    from ddp_callbacks.lightning.package import make

    CallbackStrategy, DDPCallback, Resume, CallbackFabricStrategy = make("lightning", __name__)
else:  # which imports the modules of this package, and not for lightning

    def __getattr__(name: str) -> Any:
        """The classes, for a program that uses both packages."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from ddp_callbacks.lightning.package import make

        order = ("CallbackStrategy", "DDPCallback", "Resume", "CallbackFabricStrategy")
        globals().update(zip(order, make("lightning", __name__), strict=True))
        return globals()[name]


__all__ = ["CallbackFabricStrategy", "CallbackStrategy", "DDPCallback", "Resume"]
