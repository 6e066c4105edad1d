"""The classes for ``pytorch_lightning``, whatever else is installed."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_callbacks.lightning.classes import CallbackStrategy, DDPCallback, Resume
else:
    from ddp_callbacks.lightning.package import make

    CallbackStrategy, DDPCallback, Resume = make("pytorch_lightning", __name__)

__all__ = ["CallbackStrategy", "DDPCallback", "Resume"]
