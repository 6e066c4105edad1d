"""What :mod:`ddp_callbacks.lightning` is for ``lightning``, for ``pytorch_lightning`` and ``lightning_fabric``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_callbacks.lightning.classes import CallbackFabricStrategy, CallbackStrategy, DDPCallback, Resume
else:
    from ddp_callbacks.lightning.packages import make

    CallbackStrategy, DDPCallback, Resume, CallbackFabricStrategy = make("pytorch_lightning", __name__)

__all__ = ["CallbackFabricStrategy", "CallbackStrategy", "DDPCallback", "Resume"]
