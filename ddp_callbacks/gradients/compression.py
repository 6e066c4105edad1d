"""Send fewer bytes between nodes: gradients in half precision.

Only what goes over the network is rounded: a run whose ranks all share memory is exact, whatever ``compress`` says.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from ddp_callbacks.errors import ConfigurationError

Compress = Literal["bf16", "fp16"] | None

DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype that replaces wider ones on the network."""


def check_compress(compress: Any, comm_hook: Any) -> None:
    """Raise :class:`ConfigurationError` unless ``compress`` is valid and does not conflict with a ``comm_hook``."""
    if compress not in (None, "bf16", "fp16"):
        raise ConfigurationError(
            f'compress must be "bf16", "fp16" or None, got {compress!r}. For PowerSGD, give torch\'s powerSGD_hook as '
            "comm_hook, and a PowerSGDState as comm_state."
        )
    if compress is not None and comm_hook is not None:
        raise ConfigurationError(
            f"compress={compress!r} and comm_hook both define how gradients are sent. Use one of them."
        )
