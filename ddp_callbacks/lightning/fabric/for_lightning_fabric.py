"""The class for ``lightning_fabric``, whatever else is installed."""

from __future__ import annotations

from typing import Any

from ddp_callbacks.lightning.fabric.package import make

CallbackFabricStrategy: Any = make("pytorch_lightning", __name__)

__all__ = ["CallbackFabricStrategy"]
