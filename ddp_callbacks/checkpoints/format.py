"""The content of a checkpoint: the keys of the host, which it can read alone, and one key of this library.

::

    {**shared, "ddp_callbacks": {"format": 1, "version": ..., "written": ...,
                                 "world_size": N, "ranks": [N x uint8: torch.save of a rank's state], "about": {...}}}
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import torch

from ddp_callbacks.comm.checksums import checksum_of
from ddp_callbacks.comm.differences import MISSING
from ddp_callbacks.data.nested import length_of
from ddp_callbacks.errors import CheckpointError
from ddp_callbacks.versions import __version__

FORMAT = 1
KEY = "ddp_callbacks"

Shared = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
"""The part of the content that is equal on all ranks, or what returns it on rank 0."""


class Saved:
    """The content of a file, equal on all ranks.

    :meth:`CheckpointFile.read <ddp_callbacks.CheckpointFile.read>` returns it.

    Args:
        content: The dict in the file.
        weights_only: As for :func:`torch.load`, when you take a rank's state out of it.

    Attributes:
        shared: The ``shared`` that was passed to ``write``: equal for all ranks, tensors on the CPU.
        world_size: The number of ranks that wrote the file.
        about: The ``about`` that was passed to ``write``.
    """

    def __init__(self, content: Mapping[str, Any], weights_only: bool) -> None:
        header = content[KEY]
        self.shared: dict[str, Any] = {key: value for key, value in content.items() if key != KEY}
        self.world_size: int = header["world_size"]
        self.about: dict[str, str] = dict(header["about"])
        self._ranks: list[torch.Tensor] = header["ranks"]
        self._weights_only = weights_only

    def own(self, rank: int) -> dict[str, Any]:
        """Return the own state of a rank of the run that wrote the file; each call returns a new copy.

        Raises:
            IndexError: There was no such rank.
        """
        packed = io.BytesIO(self._ranks[rank].numpy().tobytes())
        own: dict[str, Any] = torch.load(packed, map_location="cpu", weights_only=self._weights_only)
        return own

    def local_states(self, rank: int, world_size: int) -> LocalStates:
        """Return the ranks' own states, for ``rank`` of ``world_size`` now; each call returns new copies."""
        if self.world_size == world_size:
            return LocalStates([self.own(rank)] * world_size, rank, world_size)
        return LocalStates([self.own(each) for each in range(self.world_size)], rank, world_size)


@dataclass(frozen=True)
class LocalStates:
    """The ranks' own states in the run that was cut, as this process of the resumed run sees them.

    Attributes:
        of_ranks: One state per rank of the run that was cut. If there are as many ranks now, each is this rank's own.
        rank, world_size: This process's rank, and the number of ranks, in the resumed run.
    """

    of_ranks: Sequence[Any]
    rank: int
    world_size: int

    @property
    def is_same_world(self) -> bool:
        """Whether there are as many ranks as before, so that each gets its own state."""
        return len(self.of_ranks) == self.world_size

    @property
    def mine(self) -> Any:
        """This rank's state; rank 0's if there was another number of ranks."""
        return self.of_ranks[self.rank if self.is_same_world else 0]

    def of(self, name: str) -> LocalStates:
        """Return the entry ``name`` of each state."""
        return LocalStates([state[name] for state in self.of_ranks], self.rank, self.world_size)


def make_file(shared: Shared, ranks: Sequence[torch.Tensor], about: Mapping[str, str]) -> io.BytesIO:
    """Return a whole file in memory.

    Args:
        ranks: Each rank's result of :func:`pack_own`.
    """
    header = {
        "format": FORMAT,
        "version": __version__,
        "written": datetime.now().astimezone().isoformat(timespec="seconds"),
        "world_size": len(ranks),
        "ranks": list(ranks),
        "about": dict(about),
    }
    file = io.BytesIO()
    torch.save({**(shared() if callable(shared) else shared), KEY: header}, file)
    return file


def pack_own(own: Mapping[str, Any]) -> torch.Tensor:
    """Return the bytes of a rank's state, so that a host can read the file without knowing its classes."""
    file = io.BytesIO()
    torch.save(dict(own), file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def require_ours(content: Any, path: str) -> None:
    """Raise :class:`CheckpointError` unless ``content`` is a checkpoint of this library, in a format that it knows."""
    header = content.get(KEY) if isinstance(content, dict) else None
    if not isinstance(header, dict) or not isinstance(header.get("format"), int):
        raise not_ours(path)
    if header["format"] > FORMAT:
        raise CheckpointError(
            f"{path} was written by ddp_callbacks {header.get('version')} in format {header['format']}; this is "
            f"ddp_callbacks {__version__}, which reads formats up to {FORMAT}. Install the newer version to resume "
            "from the file, or give another path to start from the beginning."
        )


def not_ours(path: str) -> CheckpointError:
    """Return the error for a file that this library hasn't written."""
    return CheckpointError(
        f"{path} is no checkpoint of ddp_callbacks to resume from: it has no key {KEY!r}. It stays unchanged. Load it "
        "by what has written it, or give another path."
    )


def require_same(saved: Mapping[str, str], now: Mapping[str, str], path: str = "the checkpoint") -> None:
    """Refuse to resume from a checkpoint of another model, data set or batch size. Local.

    Args:
        saved: The file's ``about``.
        now: This run's ``about``: names such as ``"batch size"``, and their values.
        path: The path of the file, for the message.

    Raises:
        CheckpointError: Some values differ; names each with both values.
    """
    differing = [
        f"{name}: {saved.get(name, MISSING)} in the file, {now.get(name, MISSING)} now"
        for name in {**saved, **now}
        if saved.get(name) != now.get(name)
    ]
    if differing:
        raise CheckpointError(
            f"{path} belongs to another run ({'; '.join(differing)}). Give the settings that the file was written "
            "with, or another path to start from the beginning."
        )


def describe_model(module: torch.nn.Module) -> str:
    """Describe a module by its class, and the names and shapes of its parameters."""
    shapes = {name: list(parameter.shape) for name, parameter in module.named_parameters()}
    numel = sum(parameter.numel() for parameter in module.parameters())
    checksum = checksum_of(shapes)
    return (
        f"{type(module).__name__} with {numel} numbers in {len(shapes)} parameters (names and shapes: {checksum:08x})"
    )


def describe_loader(loader: Any, name: str) -> dict[str, str]:
    """Describe a loader by the length of its data set, if known, and its batch size; ``name`` is for messages."""
    samples = length_of(getattr(loader, "dataset", None))
    about = {} if samples is None else {f"samples of {name}": str(samples)}
    sampler = getattr(loader, "batch_sampler", None)
    batch_size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    return about | {f"batch size of {name}": str(batch_size)}
