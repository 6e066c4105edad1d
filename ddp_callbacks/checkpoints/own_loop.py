"""``save_checkpoint`` and ``load_checkpoint``: a loop in plain PyTorch goes on at the next batch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ddp_callbacks.checkpoints.about import describe_loader, describe_model
from ddp_callbacks.checkpoints.file import CheckpointFile
from ddp_callbacks.checkpoints.format import Saved, require_same
from ddp_callbacks.checkpoints.objects import Objects, is_own, load_own, load_shared, load_window, state_of
from ddp_callbacks.comm.checksums import checksum_of
from ddp_callbacks.comm.collectives import all_gather_json
from ddp_callbacks.data.random_state import (
    RunRandomState,
    get_global_state,
    plain_global_state,
    seed_by_rank,
    set_global_state,
)
from ddp_callbacks.data.resuming import Resumable
from ddp_callbacks.errors import CheckpointError
from ddp_callbacks.gradients import GradientSynchronizer
from ddp_callbacks.local_sgd import ParameterAverager
from ddp_callbacks.process_group import get_rank, get_world_size

_OBJECTS, _GRADIENTS, _BUFFERS, _OPTIMIZERS, _RANDOM = "objects", "gradients", "buffers", "optimizers", "random"
_COMPARE = "the comparison of what the ranks save"


def save_checkpoint(file: CheckpointFile | str | os.PathLike[str], objects: Objects) -> None:
    """Save a loop between two batches, so that :func:`load_checkpoint` resumes at the next one. A collective.

    Returns when the file is there. Call it after the last batch has been used up: after the optimizer's step, or, in
    the middle of an accumulation, after backward. Call it inside the ``for`` over a loader to resume in the middle of
    its pass: a loop that breaks has left the pass, and the next one begins afresh.

    Each rank saves for itself where it is in the data, its random state, its gradients while they are accumulated, and
    what else only it knows. Of everything else, such as the model and the optimizer, rank 0's counts.

    Args:
        file: A path; or an open :class:`CheckpointFile`, which keeps other jobs away between two saves, too, and can
            write during training (``async_save=True``).
        objects: Everything that changes, by name: what has ``state_dict`` and ``load_state_dict`` (models, optimizers,
            schedulers, scalers, a :class:`GradientSynchronizer`, loaders of :func:`resumable_loader`), dicts of numbers
            that are equal on all ranks (the epoch), and
            :class:`~ddp_callbacks.checkpoints.objects.LocalSums` of numbers that are not.

    Raises:
        CheckpointError: The file cannot be written; what was there still is. Or another job writes it.
        ConfigurationError: An object has no state.
        PeerError: Another rank failed or died.
    """
    with _opened(file) as opened:
        own = {name: state_of(name, value) for name, value in objects.items() if is_own(value)}
        shared = {name: state_of(name, value) for name, value in objects.items() if not is_own(value)}
        tensors = {_GRADIENTS: _gradients(objects, own), _BUFFERS: _buffers(objects)}
        differing = _which_differ(tensors, opened)
        mine = {name: value for name, value in tensors.items() if name in differing}
        mine[_OPTIMIZERS] = {name: shared[name] for name in _own_optimizers(objects)}
        ours = {_GRADIENTS: {} if _GRADIENTS in differing else tensors[_GRADIENTS]}
        opened.write(
            {_OBJECTS: shared, **ours}, {_OBJECTS: own, _RANDOM: plain_global_state(), **mine}, _describe(objects)
        )


def load_checkpoint(file: CheckpointFile | str | os.PathLike[str], objects: Objects) -> bool:
    """Resume from what :func:`save_checkpoint` has saved, on any number of ranks. A collective.

    Call it right before the loop, once everything has been made. On as many ranks as before, the loop resumes with the
    same bits. On another number, it resumes with the next batch of the same order; generators (torch's, Python's,
    NumPy's) that differ between the ranks when this is called get new states, derived from rank 0's.

    Args:
        file: As in :func:`save_checkpoint`. Only rank 0 needs to see it. A path reads tensors and plain data only; for
            other objects pass ``CheckpointFile(path, weights_only=False)``.
        objects: As in :func:`save_checkpoint`, with the same names.

    Returns:
        Whether there was a file. Without one, nothing changes.

    Raises:
        CheckpointError: The file cannot be read, is not ours, or of a newer version; or it belongs to another model,
            data set or batch size, or has other objects.
        PeerError: Another rank failed or died.
    """
    opened = file if isinstance(file, CheckpointFile) else CheckpointFile(file)
    saved = opened.read()
    if saved is None:
        return False
    require_same(saved.about, _describe(objects), opened.path)
    _Loading(saved, objects, opened).load()
    return True


@contextmanager
def _opened(file: CheckpointFile | str | os.PathLike[str]) -> Iterator[CheckpointFile]:
    if isinstance(file, CheckpointFile):
        yield file
    else:
        with CheckpointFile(file) as opened:
            yield opened


class _Loading:
    """One call of :func:`load_checkpoint`."""

    def __init__(self, saved: Saved, objects: Objects, file: CheckpointFile) -> None:
        self._shared, self._objects, self._process_group = saved.shared, objects, file.process_group
        self._states = [saved.own(rank) for rank in range(saved.world_size)]
        self._rank, self._world_size = get_rank(self._process_group), get_world_size(self._process_group)
        self._is_same = saved.world_size == self._world_size
        self._own = self._states[self._rank if self._is_same else 0]
        self._require_names(file.path)

    def load(self) -> None:
        """Everything, the random state last: whatever draws before it draws in vain."""
        optimizers = self._own[_OPTIMIZERS] if self._is_same else {}
        for name, value in self._objects.items():
            if not is_own(value):
                load_shared(value, optimizers.get(name, self._shared[_OBJECTS][name]))
        self._load_tensors()
        for name, value in self._objects.items():
            if is_own(value):
                self._load_own(value, [state[_OBJECTS][name] for state in self._states])
        if not any(isinstance(value, RunRandomState) for value in self._objects.values()):
            self._load_random_state()

    def _require_names(self, path: str) -> None:
        there = {*self._shared.get(_OBJECTS, ()), *self._own.get(_OBJECTS, ())}
        if there != self._objects.keys():
            raise CheckpointError(
                f"{path} must hold the objects {sorted(self._objects)}, got {sorted(there)}. Pass the names that "
                "save_checkpoint got, or another path to start from the beginning."
            )

    def _load_tensors(self) -> None:
        gradients = self._own.get(_GRADIENTS, {}) if self._is_same else {}
        gradients = self._shared[_GRADIENTS] | gradients
        buffers = self._own.get(_BUFFERS, {}) if self._is_same else {}
        for name, module in _modules(self._objects).items():
            for key, parameter in module.named_parameters():
                gradient = gradients.get(name, {}).get(key)
                parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
            for key, buffer in module.named_buffers():
                if key in buffers.get(name, {}):
                    buffer.copy_(buffers[name][key])

    def _load_own(self, value: Any, states: list[Any]) -> None:
        if isinstance(value, ParameterAverager) and not self._is_same:
            load_window(value, states, list(_modules(self._objects).values()))
        else:
            load_own(value, states, self._rank, self._world_size)

    def _load_random_state(self) -> None:
        """On another number of ranks: generators that all ranks have alike when the program starts stay alike."""
        by_rank = all_gather_json([checksum_of(part) for part in plain_global_state()], _COMPARE, self._process_group)
        saved = tuple(self._own[_RANDOM])
        set_global_state(saved)
        if not self._is_same:
            seed_by_rank(self._process_group)
            own = get_global_state(False)
            is_alike = [len(set(seen)) == 1 for seen in zip(*by_rank, strict=True)]
            set_global_state(tuple(s if alike else o for s, o, alike in zip(saved, own, is_alike, strict=True)))


def _which_differ(tensors: dict[str, Any], file: CheckpointFile) -> list[str]:
    """Of these, the names of those that the ranks have differently. A collective."""
    by_rank = all_gather_json([checksum_of(value) for value in tensors.values()], _COMPARE, file.process_group)
    return [name for name, *seen in zip(tensors, *by_rank, strict=True) if len(set(seen)) > 1]


def _gradients(objects: Objects, own: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Of models whose gradients nothing else saves: a synchronizer saves what has not been sent."""
    synchronizers = [name for name, value in objects.items() if isinstance(value, GradientSynchronizer)]
    if any(own[name]["gradients"] for name in synchronizers):
        return {}
    return {
        name: {key: parameter.grad for key, parameter in module.named_parameters() if parameter.grad is not None}
        for name, module in _modules(objects).items()
    }


def _buffers(objects: Objects) -> dict[str, dict[str, torch.Tensor]]:
    return {name: dict(module.named_buffers()) for name, module in _modules(objects).items()}


def _own_optimizers(objects: Objects) -> list[str]:
    """The names of optimizers of which each rank has a different state: local steps."""
    is_local = any(isinstance(value, ParameterAverager) for value in objects.values())
    return [name for name, value in objects.items() if is_local and isinstance(value, torch.optim.Optimizer)]


def _modules(objects: Objects) -> dict[str, torch.nn.Module]:
    return {name: value for name, value in objects.items() if isinstance(value, torch.nn.Module)}


def _describe(objects: Objects) -> dict[str, str]:
    """What must be the same in the run that goes on."""
    described = {name: describe_model(module) for name, module in _modules(objects).items()}
    for name, value in objects.items():
        if isinstance(value, Resumable):
            described |= describe_loader(value, name)
    return described
