"""Train a Lightning ``Trainer``, or a loop of Lightning Fabric, on many processes by a strategy's name.

Importing this registers the strategy ``"ddp_callbacks"`` in ``lightning`` and in ``pytorch_lightning`` and
``lightning_fabric``, whichever the program imports, before or after. Fabric's is in ``fabric``; ``processes`` is what
both have in common. Of a Trainer, what happens in a training step, in Lightning's order::

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

With the callback ``Resume`` a fit can stop at the ``moments`` and go on there: ``resume`` reads and writes the file;
``own_state`` is what the ranks have beside Lightning's checkpoint: ``saved_logs``, ``saved_metrics``, ``saved_module``,
``saved_attributes``. ``resumable`` is the strategy's part.

``package`` makes ``classes`` for both packages, and ``which_package`` says which the program uses; ``callback`` is for
a Trainer whose strategy is another; ``reductions`` are what users ask the strategies for.
"""

import functools
import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

from ddp_callbacks.lightning import which_package as _which_package

if TYPE_CHECKING:
    from ddp_callbacks.lightning.classes import CallbackStrategy, DDPCallback, Resume
    from ddp_callbacks.lightning.fabric.strategy import CallbackFabricMixin as CallbackFabricStrategy


def _home(home: str) -> Any:
    return importlib.import_module(f"{__name__}.{home}")


def _home_of_other(package: str, home: str) -> None:
    try:
        _home(home)
    except Exception as error:
        warnings.warn(f'{package} has no strategy "ddp_callbacks": {error}', stacklevel=2)


_first, *_others = _which_package.installed()

if not TYPE_CHECKING:
    #: Makes a strategy for the package that the caller uses, where both are in use.
    CallbackStrategy = _home(_which_package.HOMES[_first]).CallbackStrategy
    DDPCallback = _home(_which_package.HOMES[_first]).DDPCallback
    #: Likewise.
    Resume = _home(_which_package.HOMES[_first]).Resume
    #: Likewise.
    CallbackFabricStrategy = _home(_which_package.HOMES_OF_FABRIC[_first]).CallbackFabricStrategy

for _name in _others:
    for _roots, _homes in (
        (_which_package.ROOTS, _which_package.HOMES),
        (_which_package.FABRIC, _which_package.HOMES_OF_FABRIC),
    ):
        if _roots[_name] in sys.modules:
            _home_of_other(_roots[_name], _homes[_name])
        else:
            _which_package.AtImport(_roots[_name], functools.partial(_home_of_other, _roots[_name], _homes[_name]))

__all__ = ["CallbackFabricStrategy", "CallbackStrategy", "DDPCallback", "Resume"]
