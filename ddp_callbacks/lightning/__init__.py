"""Train a Lightning ``Trainer`` on many processes by a strategy's name.

Importing this registers the strategy ``"ddp_callbacks"`` in ``lightning.pytorch`` and in ``pytorch_lightning``,
whichever the program imports, before or after. What happens in a training step, in Lightning's order::

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

What is logged travels as ``rows`` say, and ``combine`` and ``history`` are the arithmetic of a step and of an epoch.

``package`` makes ``classes`` for both packages, and ``which_package`` says which the program uses; ``callback`` is for
a Trainer whose strategy is another; ``reductions`` are what users ask the strategy for.
"""

import functools
import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

from ddp_callbacks.lightning import which_package as _which_package

if TYPE_CHECKING:
    from ddp_callbacks.lightning.classes import CallbackStrategy, DDPCallback


def _home(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{_which_package.HOMES[name]}")


def _home_of_other(name: str) -> None:
    try:
        _home(name)
    except Exception as error:
        warnings.warn(f'{name} has no strategy "ddp_callbacks": {error}', stacklevel=2)


_first, *_others = _which_package.installed()

if not TYPE_CHECKING:
    #: Makes a strategy for the package that the caller uses, where both are in use.
    CallbackStrategy = _home(_first).CallbackStrategy
    DDPCallback = _home(_first).DDPCallback

for _name in _others:
    if _which_package.ROOTS[_name] in sys.modules:
        _home_of_other(_name)
    else:
        _which_package.AtImport(_which_package.ROOTS[_name], functools.partial(_home_of_other, _name))

__all__ = ["CallbackStrategy", "DDPCallback"]
