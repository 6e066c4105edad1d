"""The classes for ``pytorch_lightning``, whatever else is installed."""

from __future__ import annotations

from typing import Any

from ddp_callbacks.lightning.package import make

CallbackStrategy: Any
DDPCallback: Any
CallbackStrategy, DDPCallback = make("pytorch_lightning", __name__)

__all__ = ["CallbackStrategy", "DDPCallback"]
