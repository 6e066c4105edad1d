"""Tensors that claim to be on a GPU on a machine without one: they compute on the CPU.

``with MadeUpGpu():`` torch makes and moves tensors "on" ``cuda:0``. Inside :meth:`MadeUpGpu.forbid_waiting`, operations
that would make the host wait for a GPU (for which ``torch.cuda.set_sync_debug_mode("error")`` raises) raise
:class:`HostWaits`. Collectives on such tensors go by gloo; they count as operations in a stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from ddp_callbacks.process_group import failures

CUDA = torch.device("cuda", 0)

_NAMES = ["item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "nonzero"]
_NAMES += ["masked_select", "unique", "coalesce", "bincount"]
_NAMES += [f"__{name}__" for name in ("bool", "float", "int", "index", "complex", "contains", "array")]
_READS = {getattr(place, name) for name in _NAMES for place in (torch, torch.Tensor) if hasattr(place, name)}
_MOVES = {torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu}
_FROM_HOST = {torch.tensor, torch.as_tensor, torch.Tensor.new_tensor}


class HostWaits(Exception):
    """The host would wait for its GPU."""


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    device = property(lambda _: CUDA)
    is_cuda = property(lambda _: True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = self.detach().clone()
            memo[id(self)] = nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied
        return memo[id(self)]


class MadeUpGpu(TorchFunctionMode):
    """Lets torch make and move tensors "on" a GPU; see the module."""

    def __init__(self) -> None:
        super().__init__()
        self._is_forbidden = False
        is_by_stream = lambda group, device: device.type == "cuda"  # noqa: E731
        self._patches: list[Any] = [
            mock.patch.object(failures, "is_ordered_by_stream", is_by_stream),
            mock.patch("torch.cuda.is_current_stream_capturing", lambda: False),
            mock.patch("torch.cuda.get_device_name", lambda _: "made up"),
        ]

    def __enter__(self) -> MadeUpGpu:
        for patch in self._patches:
            patch.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for patch in self._patches:
            patch.stop()

    @contextmanager
    def forbid_waiting(self) -> Iterator[None]:
        """Inside, operations that make the host wait raise :class:`HostWaits`."""
        self._is_forbidden = True
        try:
            yield
        finally:
            self._is_forbidden = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.backward, torch.autograd.backward):
            return self._backward(*args, **kwargs)
        if func in _MOVES:
            return self._move(func, *args, **kwargs)
        if func is torch.Tensor.pin_memory:
            return args[0].clone()  # a torch without CUDA pins nothing
        is_made_there = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda"
        if _waits(func, args, kwargs, is_made_there):
            self._note(func)
        if func in _READS and isinstance(args[0], OnGpu):
            return func(args[0].as_subclass(torch.Tensor), *args[1:], **kwargs)
        if is_made_there:
            return self._on_gpu(func(*args, **kwargs | {"device": "cpu"}))
        return func(*args, **kwargs)

    def _move(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if func is torch.Tensor.cuda:
            args, kwargs = ("cuda",), {name: value for name, value in kwargs.items() if name != "device"}
        elif func is torch.Tensor.cpu:
            args = ("cpu",)
        named = [kwargs.get("device"), kwargs.get("other"), *args]
        target = next((device for device in map(_device_of, named) if device is not None), tensor.device)
        others: list[Any] = [value.dtype for value in args if isinstance(value, torch.Tensor)]
        others += [value for value in args if isinstance(value, torch.dtype)]
        rest = {name: value for name, value in kwargs.items() if name not in ("device", "other")}
        rest |= dict(zip(("non_blocking", "copy"), (value for value in args if isinstance(value, bool)), strict=False))
        if target.type == tensor.device.type:
            return torch.Tensor.to(tensor, *others, **rest) if others or rest else tensor
        if not rest.get("non_blocking") or target.type == "cpu":
            self._note(func)
        plain = torch.Tensor.to(tensor, *others, **rest | {"copy": True})
        return plain.as_subclass(OnGpu if target.type == "cuda" else torch.Tensor)

    def _backward(
        self,
        tensors: Any,
        gradients: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = (),
        **given_by_name: Any,
    ) -> None:
        """Run torch's backward inside this mode, so that hooks are; torch has left the mode while it calls this."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        with torch.enable_grad():
            plain = tuple(tensor.as_subclass(torch.Tensor) for tensor in tensors)
        gradients = next(iter(given_by_name.values()), gradients)  # "gradient" or "grad_tensors"
        gradients = [None] * len(plain) if gradients is None else gradients
        given = (gradients,) if isinstance(gradients, torch.Tensor) else gradients
        roots = tuple(torch.ones_like(x) if y is None else y for x, y in zip(plain, given, strict=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            keeps = create_graph if retain_graph is None else retain_graph
            _engine_run_backward(
                plain, roots, keeps, create_graph, tuple(inputs or ()), allow_unreachable=True, accumulate_grad=True
            )
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _note(self, func: Any) -> None:
        if self._is_forbidden:
            raise HostWaits(getattr(func, "__name__", str(func)))

    @staticmethod
    def _on_gpu(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(MadeUpGpu._on_gpu, value))
        return value.as_subclass(OnGpu) if isinstance(value, torch.Tensor) else value


def put_on_gpu(module: nn.Module) -> nn.Module:
    """Move a module in place; layers that share a parameter still share it."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for layer in module.modules():
        for name, parameter in layer._parameters.items():
            if parameter is not None:
                data = parameter.detach().clone().as_subclass(OnGpu)
                layer._parameters[name] = moved.setdefault(parameter, nn.Parameter(data, parameter.requires_grad))
        for name, buffer in layer._buffers.items():
            if buffer is not None:
                layer._buffers[name] = buffer.detach().clone().as_subclass(OnGpu)
    return module


def _waits(func: Any, args: Any, kwargs: dict[str, Any], is_made_there: bool) -> bool:
    """Whether the host waits for its GPU in this call."""
    first = args[0] if args else None
    if func is torch.Tensor.copy_:
        is_async = kwargs.get("non_blocking", len(args) > 2 and args[2])
        return not is_async and isinstance(first, OnGpu) != isinstance(args[1], OnGpu)
    if not isinstance(first, OnGpu):
        return func in _FROM_HOST and is_made_there
    has_mask = func is torch.Tensor.__getitem__ and _has_mask(args[1])
    return has_mask or func in _READS or func is torch.Tensor.new_tensor


def _device_of(value: Any) -> torch.device | None:
    if isinstance(value, torch.Tensor):
        return value.device
    if isinstance(value, torch.device | str):
        return torch.device(value)
    return None


def _has_mask(index: Any) -> bool:
    indices = index if isinstance(index, tuple) else (index,)
    return any(isinstance(each, torch.Tensor) and each.dtype == torch.bool for each in indices)
