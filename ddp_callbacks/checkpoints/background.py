"""A write beside training: a copy of the state in memory, and the thread that writes it."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from ddp_callbacks.errors import say
from ddp_callbacks.process_group.presence import OWN_THREADS

_FIXED = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


class BackgroundWriter:
    """At most one write at a time, in a thread that the interpreter waits for at its end."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a write is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, action: Callable[[], None]) -> None:
        """Call ``action`` in the thread; :meth:`wait` comes first. Doesn't block."""
        self._thread = threading.Thread(target=self._run, args=(action,), name=f"{OWN_THREADS} checkpoint")
        self._thread.start()

    def join(self) -> None:
        """Block until no write is under way."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Block until the last write is complete.

        Raises:
            Exception: What it has raised; once.
        """
        self.join()
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # wait raises it, but that may be an hour later
            self._failure = error
            say(f"{error}", logging.ERROR)


def copy_to_memory(value: Any) -> Any:
    """A copy of nested dicts, lists and tuples with tensors, which are copied to the CPU.

    Tensors that share memory do so in the copy.
    """
    return _Copy().of(value)


class _Copy:
    def __init__(self) -> None:
        self._made: dict[int, Any] = {}  # by the id of the original container
        self._memories: dict[tuple[torch.device, int], torch.UntypedStorage] = {}

    def of(self, value: Any) -> Any:
        if isinstance(value, _FIXED):
            return value
        if id(value) in self._made:
            return self._made[id(value)]
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, dict):
            return self._of_dict(value)
        if type(value) is list:
            made = self._made[id(value)] = []
            made.extend(map(self.of, value))
            return made
        if type(value) is tuple:
            return tuple(map(self.of, value))
        return copy.deepcopy(value)

    def _of_dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        made = self._made[id(value)] = copy.copy(value)  # of its class, and with the attributes of a state_dict
        for key, item in value.items():
            made[key] = self.of(item)
        return made

    def _of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and not tensor.is_quantized
        if not is_plain or tensor.is_conj() or tensor.is_neg() or not tensor.untyped_storage().data_ptr():
            return copy.deepcopy(tensor.detach())
        made = torch.empty(0, dtype=tensor.dtype)
        made.set_(self._memory(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
        return made.requires_grad_(tensor.requires_grad)

    def _memory(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        storage = tensor.untyped_storage()
        key = (storage.device, storage.data_ptr())
        if key not in self._memories:
            self._memories[key] = storage.clone() if storage.device.type == "cpu" else storage.cpu()
        return self._memories[key]
