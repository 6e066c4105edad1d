"""Train a Lightning ``Trainer`` or a Torchbearer ``Trial`` on many processes by adding one line.

:mod:`ddp_callbacks.lightning` has the strategy for a Trainer, :mod:`ddp_callbacks.torchbearer` the callbacks for a
Trial. This module has the functions for a training loop in plain PyTorch and needs only torch;
:mod:`ddp_callbacks.comm` sends small messages between the ranks. The submodules have what few loops need.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ddp_callbacks.versions import __version__ as __version__

if TYPE_CHECKING:
    from ddp_callbacks._api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Import torch only at the first use (PEP 562): ``ddprun`` has to install its signal handlers before."""
    public = {key: value for key, value in vars(import_module(f"{__name__}._api")).items() if not key.startswith("_")}
    globals().update(public, __all__=["__version__", *public])
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]
