"""What a run that goes on from a checkpoint must have in common with the one that wrote it, as names and texts."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from ddp_callbacks.comm.checksums import checksum_of


def describe_model(module: nn.Module) -> str:
    """Its class, and the names and shapes of its parameters."""
    shapes = {name: list(parameter.shape) for name, parameter in module.named_parameters()}
    numel = sum(parameter.numel() for parameter in module.parameters())
    checksum = checksum_of(shapes)
    return (
        f"{type(module).__name__} with {numel} numbers in {len(shapes)} parameters (names and shapes: {checksum:08x})"
    )


def describe_loader(loader: Any, name: str) -> dict[str, str]:
    """Its data set and batch size, where it has one; ``name`` is for messages."""
    about = {}
    with contextlib.suppress(TypeError, NotImplementedError, AttributeError):
        about[f"samples of {name}"] = str(len(loader.dataset))
    sampler = getattr(loader, "batch_sampler", None)
    batch_size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    return about | {f"batch size of {name}": str(batch_size)}
