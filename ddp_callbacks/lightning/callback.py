"""The callback for a Trainer: it sees to it that the strategy is there."""

from __future__ import annotations

from typing import Any

from ddp_callbacks.environment import WorkerEnv
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.lightning.strategy import CallbackStrategyMixin

_FOREIGN = {
    "FSDPStrategy": "It divides the parameters among the processes; here each process holds all of them.",
    "DeepSpeedStrategy": "It has an engine of its own for gradients and optimizer.",
    "ModelParallelStrategy": "It divides the parameters among the processes; here each process holds all of them.",
    "XLAStrategy": "TPUs need XLA's collectives.",
    "SingleDeviceXLAStrategy": "TPUs need XLA's collectives.",
}


_Callbacks: Any = object  # of either package: the class comes after this one


class DDPCallbackMixin(_Callbacks):  # type: ignore[misc]
    """Makes a ``Callback`` of either package refuse processes that would not train together; see ``DDPCallback``."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """At the beginning of ``fit``, ``validate``, ``test`` and ``predict``.

        Raises:
            ConfigurationError: There are several processes, and the strategy is another.
        """
        strategy = trainer.strategy
        if isinstance(strategy, CallbackStrategyMixin):
            return
        started = WorkerEnv.from_environ().world_size
        if max(started, trainer.world_size) == 1:
            return
        name = type(strategy).__name__
        raise ConfigurationError(
            f'DDPCallback needs strategy="ddp_callbacks" for these {max(started, trainer.world_size)} processes: '
            f'Trainer(strategy="ddp_callbacks"). This Trainer has {name}. '
            + _FOREIGN.get(name, "A callback comes too late to tell Lightning which process this is.")
        )
