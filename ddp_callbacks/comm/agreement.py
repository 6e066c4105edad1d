"""Consistency checks: compare settings across ranks before a difference does harm, and name it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ddp_callbacks.comm.checksums import ADDRESS, is_dense
from ddp_callbacks.comm.collectives import all_gather_object
from ddp_callbacks.comm.differences import describe, require_equal
from ddp_callbacks.comm.held import persistent_buffers
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.versions import __version__

VERSIONS = {"version of torch": torch.__version__, "version of ddp_callbacks": __version__}
"""Settings to compare: the versions of what computes on all ranks."""


def require_agreement(
    settings: Mapping[str, Any], subject: str, remedy: str, group: dist.ProcessGroup | None = None
) -> None:
    """Raise unless ``settings`` are equal on all ranks. A collective.

    Args:
        settings: Names mapped to JSON values; they are compared as strings.
        subject: What the settings belong to: "the model".
        remedy: How to fix a difference, one sentence.
        group: The ranks' process group; ``None`` is the default group.

    Raises:
        MismatchError: On every rank alike; names each setting that differs, the ranks and their values.
    """
    require_equal(all_gather_object(dict(settings), f"the comparison of {subject}", group), subject, remedy, group)


def module_settings(module: torch.nn.Module) -> dict[str, str]:
    """Return the shape and dtype of each parameter and persistent buffer, and which parameters are frozen, by name."""
    buffers = persistent_buffers(module)
    return parameter_settings(module) | {f"buffer {name}": describe(buffer) for name, buffer in buffers.items()}


def parameter_settings(module: torch.nn.Module) -> dict[str, str]:
    """Return the shape and dtype of each parameter, and whether it is frozen, by name; and the order of the parameters.

    Raises:
        ConfigurationError: A parameter of a lazy module has no shape yet.
    """
    if lazy := [name for name, parameter in module.named_parameters() if torch.nn.parameter.is_lazy(parameter)]:
        raise ConfigurationError(
            f"parameter {lazy[0]} has no shape yet, as its module is lazy: no process can send it to the others. "
            "Pass one batch through the model before you train it."
        )
    settings = {
        f"parameter {name}": describe(parameter) + ("" if parameter.requires_grad else " frozen")
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    return settings | {"the order of the parameters": ", ".join(name for name, _ in module.named_parameters())}


def layout_settings(module: torch.nn.Module) -> dict[str, str]:
    """Return the strides of each non-contiguous parameter, by name. Gradients are sent in that memory layout."""
    return {
        f"parameter {name} in memory": f"strides {list(parameter.stride())}"
        for name, parameter in module.named_parameters()
        if is_dense(parameter) and not parameter.is_contiguous()
    }


def optimizer_settings(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the optimizer's class, and each parameter group's options and number of parameters."""
    settings = {"optimizer": type(optimizer).__name__}
    for index, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        settings |= {f"optimizer group {index}: {key}": text_of(value) for key, value in options.items()}
        settings[f"optimizer group {index}: number of parameters"] = str(len(group["params"]))
    return settings


def text_of(value: Any) -> str:
    """Return a value as text, without memory addresses, which differ between processes."""
    return ADDRESS.sub("", str(value.tolist() if isinstance(value, torch.Tensor) else value))
