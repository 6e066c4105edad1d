"""Find what a program itself collects of its batches: on several processes, each has only what it has computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ddp_callbacks.comm.checksums import checksum_of
from ddp_callbacks.data.nested import is_array
from ddp_callbacks.errors import warn
from ddp_callbacks.process_group.presence import exchanges_by_now

_LEAST = 2  # new entries: one may be that of a pass
_WARNING = (
    "{name} collects what each process computes itself, so what you compute from it is not that of all samples. Use a "
    "metric instead, or let all processes gather it first, in a hook: all_gather_object(own, 'what') of "
    "ddp_callbacks.comm returns the list of each process."
)


class Collected:
    """What a module or callbacks collect in a pass over the batches, such as a list to which each step appends."""

    def __init__(self) -> None:
        self._owners: list[Any] = []
        self._sizes: dict[str, int] = {}
        self._grown: dict[str, int] = {}
        self._exchanges: tuple[int, int] | None = None  # at the end, until the first look at what came after
        self._warned: set[str] = set()

    def begin(self, owners: Iterable[Any]) -> None:
        """Note, before the first batch, what these objects hold."""
        self._owners, self._grown = [*owners], {}
        self._sizes = {name: len(held) for name, held in _held_by(self._owners)}

    def end(self) -> None:
        """Note, after the last batch, what has grown."""
        held = {name: each for name, each in _held_by(self._owners) if name not in self._warned}
        grown = {name: each for name, each in held.items() if len(each) - self._sizes.get(name, 0) >= _LEAST}
        self._grown = {name: checksum_of(each[self._sizes.get(name, 0)]) for name, each in grown.items()}
        self._exchanges = exchanges_by_now()

    def checksums(self, is_logged: bool = False) -> dict[str, int]:
        """Return checksums of what has grown, by name. At the first call since the end, the program may have used it.

        Args:
            is_logged: Whether it has logged anything since, which is compared on its own. If so, or if the ranks have
                exchanged anything, so that the program may gather what they have, nothing counts as grown.
        """
        if is_logged or self._exchanges not in (None, exchanges_by_now()):
            self._grown = {}
        self._exchanges = None
        return self._grown

    def warn(self, of_ranks: Sequence[Mapping[str, int]], rank: int) -> None:
        """Warn on rank 0 of what differs between the ranks: see :meth:`checksums`."""
        first, *others = of_ranks
        for name in first:
            if any(other.get(name) not in (None, first[name]) for other in others):
                self._warned.add(name)
                if rank == 0:
                    warn(_WARNING.format(name=name))


def _held_by(owners: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield lists and arrays that are attributes, and lists in dictionaries that are, with their names."""
    for owner in owners:
        for attribute, value in list(getattr(owner, "__dict__", {}).items()):
            name = f"{type(owner).__name__}.{attribute}"
            if isinstance(value, list) or (is_array(value) and value.ndim):
                yield name, value
            elif isinstance(value, dict):
                yield from ((f"{name}[{key!r}]", each) for key, each in value.items() if isinstance(each, list))
