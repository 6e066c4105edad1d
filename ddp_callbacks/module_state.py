"""Restore a module's buffers and attributes after a computation that must leave no trace."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def remember_module(module: nn.Module) -> Callable[[], None]:
    """Return a function that restores the buffers and attributes of a module and its layers. Local.

    It restores attributes that were replaced, and the content of tensors, and of lists, dicts, sets and deques, also
    inside each other.
    """
    undo: dict[int, Callable[[], None]] = {}
    attributes = [vars(layer) for layer in module.modules()]
    for value in (*module.buffers(), *(value for each in attributes for value in each.values())):
        if isinstance(value, torch.Tensor):
            undo[id(value)] = functools.partial(_put_back_tensor, value, value.detach().clone())
    for each in attributes:
        _remember_content(each, undo)

    def restore() -> None:
        for put_back in undo.values():
            put_back()

    return restore


@torch.no_grad()
def _put_back_tensor(tensor: torch.Tensor, before: torch.Tensor) -> None:
    if not torch.equal(tensor, before):
        tensor.copy_(before)


def _remember_content(value: Any, undo: dict[int, Callable[[], None]]) -> None:
    if type(value) not in (list, dict, set, deque) or id(value) in undo:
        return
    before = value.copy()
    undo[id(value)] = functools.partial(_put_back_content, value, before)
    for inside in before.values() if isinstance(before, dict) else before:
        _remember_content(inside, undo)


def _put_back_content(value: Any, before: Any) -> None:
    value.clear()
    (value.update if isinstance(value, dict | set) else value.extend)(before)
