"""What a module has beside its parameters, to be put back after a computation that must leave no trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

Undo = Callable[[], None]


def remember_module(module: nn.Module) -> Undo:
    """What puts a module's buffers and plain attributes back, and those of its layers. Local.

    Of attributes: numbers, texts and other objects that are replaced; tensors; lists, dicts, sets and deques, also
    inside of each other. It may be called several times.
    """
    seen: set[int] = set()
    attributes = [(vars(layer), dict(vars(layer))) for layer in module.modules()]
    values = [value for _, before in attributes for value in before.values()]
    tensors = [value for value in (*values, *module.buffers()) if isinstance(value, torch.Tensor)]
    undo = [*map(_remember_tensor, tensors), *(each for value in values for each in _remember_content(value, seen))]

    def restore() -> None:
        for each in undo:
            each()
        for now, before in attributes:
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)

    return restore


def _remember_tensor(tensor: torch.Tensor) -> Undo:
    before = tensor.detach().clone()

    def restore() -> None:
        if not torch.equal(tensor, before):
            with torch.no_grad():
                tensor.copy_(before)

    return restore


def _remember_content(value: Any, seen: set[int]) -> Iterator[Undo]:
    if type(value) not in (list, dict, set, deque) or id(value) in seen:
        return
    seen.add(id(value))
    before = value.copy()

    def restore() -> None:
        value.clear()
        (value.update if isinstance(value, dict | set) else value.extend)(before)

    yield restore
    for inside in before.values() if isinstance(before, dict) else before:
        yield from _remember_content(inside, seen)
