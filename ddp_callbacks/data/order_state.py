"""The objects on whose state the order of a loader's batches depends: samplers, iterable data sets, what they hold.

Their generators are part of the random state (:mod:`.global_state`). Their plain attributes, such as a count of epochs
or a list of weights, are here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from ddp_callbacks.comm.checksums import checksum_of
from ddp_callbacks.data.attributes import checksums_of, decode, encode, plain_attributes
from ddp_callbacks.errors import ConfigurationError

Attributes = dict[str, Any]
"""Encoded attributes, by names like ``"sampler.epoch"``."""

LARGEST = 1 << 17
"""The number of values in an attribute from which on it is not saved: what depends on it is found by the order."""

_ENTRIES = 1000  # of a list in which to look for objects


def objects_of_order(**roots: object) -> dict[str, object]:
    """Return samplers and iterable data sets, and those that they hold, by names like ``"sampler.sampler"``."""
    found: dict[str, object] = {}
    left = deque(roots.items())
    while left:
        name, value = left.popleft()
        if value is not None and not any(value is known for known in found.values()):
            found[name] = value
            left.extend((f"{name}.{key}", part) for key, part in _held_by(value))
    return found


def _held_by(owner: object) -> Iterator[tuple[str, object]]:
    package = _package_of(owner)
    for name, value in getattr(owner, "__dict__", {}).items():
        entries: Any = [("", value)]
        if type(value) in (list, tuple, dict) and len(value) <= _ENTRIES:
            entries = value.items() if type(value) is dict else enumerate(value)
        for key, entry in entries:
            if _may_order(entry, package):
                yield f"{name}.{key}" if entry is not value else name, entry


def _may_order(value: object, package: str) -> bool:
    """Whether an order may depend on what a sampler of this package holds: on no samples, and on no model."""
    if not hasattr(value, "__dict__") or isinstance(value, type | torch.nn.Module | torch.Tensor):
        return False
    if isinstance(value, Dataset | Sampler):
        return isinstance(value, IterableDataset | Sampler)
    return hasattr(type(value), "__iter__") or _package_of(value) == package


def _package_of(value: object) -> str:
    return type(value).__module__.partition(".")[0]


class OrderAttributes:
    """The plain attributes of these objects. A state has those that have changed since this object was made.

    Args:
        objects: As from :func:`objects_of_order`.
    """

    def __init__(self, objects: Mapping[str, object]) -> None:
        self._objects = {name: value for name, value in objects.items() if hasattr(value, "__dict__")}
        self._start = self.take()

    def plain(self) -> dict[str, Any]:
        """Return the attributes, without copying them."""
        return {
            f"{name}.{attribute}": value
            for name, owner in self._objects.items()
            for attribute, value in plain_attributes(owner, largest=LARGEST).items()
        }

    def take(self) -> Attributes:
        """Return a copy of the attributes."""
        return {name: encode(value) for name, value in self.plain().items()}

    def changed(self, *moments: Attributes) -> tuple[Attributes, ...]:
        """Return, of each of some copies, the attributes that have changed at one of these moments."""
        start = checksums_of(self._start)
        names = {name for moment in map(checksums_of, moments) for name in moment if moment[name] != start.get(name)}
        return tuple({name: value for name, value in moment.items() if name in names} for moment in moments)

    def load(self, changed: Attributes) -> None:
        """Set the attributes of a state; those that it lacks as they were when this object was made."""
        for name in self.plain().keys() - self._start.keys() - changed.keys():
            owner, _, attribute = name.rpartition(".")
            del vars(self._objects[owner])[attribute]
        self.put(self._start | changed)

    def put(self, attributes: Attributes) -> None:
        """Set attributes to these values, unless an object that cannot be saved has taken the place of one."""
        plain = self.plain()
        for name, value in attributes.items():
            owner, _, attribute = name.rpartition(".")
            held = vars(self._objects[owner]) if owner in self._objects else {}
            is_free = owner in self._objects and attribute not in held
            if is_free or (name in plain and checksum_of(encode(plain[name])) != checksum_of(value)):
                held[attribute] = _refilled(held.get(attribute), decode(encode(value), "cpu"))

    def put_others(self, attributes: Attributes, before: Attributes) -> None:
        """Like :meth:`put`, for the attributes that are still as they were ``before``."""
        now, then = checksums_of(self.plain()), {name: checksum_of(value) for name, value in before.items()}
        self.put({name: value for name, value in attributes.items() if now.get(name) == then.get(name)})

    def start_from(self, attributes: Attributes) -> None:
        """Set attributes to these values, and save what changes from now on."""
        self.put({name: encode(value) for name, value in attributes.items()})
        self._start = self.take()


def other_batches(name: str, found: str) -> ConfigurationError:
    """Return the error for a loader or sampler that does not yield what it did in the run that was saved.

    Args:
        name: Its class.
        found: What differs.
    """
    return ConfigurationError(
        f"{name} does not yield the batches of the run that was saved: {found}. Resume with the data set, the batch "
        "size and the sampler of that run, and take its randomness from torch's, Python's or NumPy's global random "
        f"state, or from generators that are its attributes. What else it depends on must be in plain attributes of at "
        f"most {LARGEST} values, or be set before the pass, as by set_epoch."
    )


def _refilled(old: Any, value: Any) -> Any:
    """Return ``value``, in the same list or dict as before: others may hold it, too."""
    if type(old) is type(value) and isinstance(old, list | dict):
        old.clear()
        (old.extend if isinstance(old, list) else old.update)(value)
        return old
    return value
