"""The options of the gradient engine, checked when a program gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddp_callbacks.comm.buckets import check_bucket_cap_mb
from ddp_callbacks.comm.compression import Compress, check_compress
from ddp_callbacks.comm.hooks import CommHook, check_comm_hook


@dataclass(frozen=True)
class EngineOptions:
    """See :class:`ddp_callbacks.GradientSynchronizer`.

    Raises:
        ConfigurationError: The hook needs DDP itself, or a setting is out of range.
    """

    bucket_cap_mb: float
    comm_hook: CommHook | None
    comm_state: Any
    compress: Compress

    def __post_init__(self) -> None:
        check_bucket_cap_mb(self.bucket_cap_mb)
        check_compress(self.compress, self.comm_hook)
        if self.comm_hook is not None:
            check_comm_hook(self.comm_hook)
