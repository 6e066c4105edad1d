"""What is synchronized: the parameters of a module, and those of the optimizers. No communication."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from ddp_callbacks._torch import BatchNorm, content_of, non_persistent_buffers

_KIND = operator.attrgetter("dtype", "device", "shape")


class Held(torch.nn.Module):
    """A module, further modules, and parameters that none of these has but an optimizer trains, as one module.

    The names of the first module's parameters and buffers stay what they are there. Nothing is registered or changed.

    Args:
        module: The model.
        others: Further objects by name; those that are modules count.
        trained: Returns the parameters that the optimizers train now.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        others: Mapping[str, Any] | None = None,
        trained: Callable[[], list[torch.nn.Parameter]] = list,
    ) -> None:
        super().__init__()
        parts = {"": module, **(others or {})}
        self._parts = [(name, part) for name, part in parts.items() if isinstance(part, torch.nn.Module)]
        self.trained = trained

    @property
    def model(self) -> torch.nn.Module:
        """The first module."""
        return self._parts[0][1]

    def named_modules(
        self, memo: set[torch.nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield all modules, the last of which has the parameters that none of the others has."""
        found: set[torch.nn.Module] = set() if memo is None else memo
        known: set[int] = set()
        for name, part in self._parts:
            for of_layer, layer in part.named_modules(found, name, remove_duplicate):
                known.update(map(id, content_of(layer)[0].values()))
                yield of_layer, layer
        unknown = {id(each): each for each in self.trained() if id(each) not in known}
        loose = torch.nn.Module()
        content_of(loose)[0].update({str(number): each for number, each in enumerate(unknown.values())})
        yield "in an optimizer", loose


def trained_by(optimizers: Iterable[Any]) -> list[torch.nn.Parameter]:
    """Return the parameters of optimizers."""
    groups = (group for optimizer in optimizers for group in getattr(optimizer, "param_groups", ()))
    return [parameter for group in groups for parameter in group["params"]]


def optimizers_in(objects: Iterable[Any]) -> list[torch.optim.Optimizer]:
    """Return the optimizers that are attributes of these objects, such as callbacks."""
    values = (value for each in objects for value in vars(each).values())
    return [value for value in values if isinstance(value, torch.optim.Optimizer)]


class Parameters:
    """The differentiable parameters that a module has at one moment.

    Attributes:
        named: The parameters by name.
        names: The names of the parameters, by id.
        dense, sparse: Those with dense and with sparse gradients.
        batch_norms: The module's BatchNorm layers.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.named = {name: each for name, each in module.named_parameters() if _is_differentiable(each)}
        self.names = {id(each): name for name, each in self.named.items()}
        self._kinds = [*map(_KIND, self.named.values())]
        are_sparse = _sparse_parameters(module)
        self.dense = [each for each in self.named.values() if id(each) not in are_sparse]
        self.sparse = [each for each in self.named.values() if id(each) in are_sparse]
        self.batch_norms: list[Any] = [layer for layer in module.modules() if isinstance(layer, BatchNorm)]
        self._note_content()

    def changes(self) -> dict[str, torch.nn.Parameter] | None:
        """Return the module's parameters that are new, or have another dtype or device, by name.

        The result is empty if parameters are gone, and ``None`` if nothing has changed, which costs microseconds.
        """
        content, kinds = self._content_now(), [*map(_KIND, self.named.values())]
        is_same = len(content) == len(self._content) and all(map(operator.is_, content, self._content))
        if is_same and kinds == self._kinds:
            return None
        now = Parameters(self._module)
        if [*now.names] == [*self.names] and kinds == self._kinds:
            self._note_content()
            return None
        before = dict(zip(self.names, self._kinds, strict=True))
        return {name: each for name, each in now.named.items() if before.get(id(each)) != _KIND(each)}

    def _note_content(self) -> None:
        self._views = [content.values() for layer in self._module.modules() for content in content_of(layer)]
        self._content = self._content_now()

    def _content_now(self) -> list[Any]:
        trained = self._module.trained() if isinstance(self._module, Held) else []
        return [*chain.from_iterable(self._views), *trained]


def persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that the module's ``state_dict`` has, by name."""
    caches = {id(getattr(layer, name, None)) for layer in module.modules() for name in non_persistent_buffers(layer)}
    return {name: buffer for name, buffer in module.named_buffers() if id(buffer) not in caches}


def _is_differentiable(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def _sparse_parameters(module: torch.nn.Module) -> set[int]:
    """Return the ids of the parameters with sparse gradients."""
    return {
        id(layer.weight)
        for layer in module.modules()
        if isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag) and layer.sparse
    }
