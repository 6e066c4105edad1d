"""What a step must not do while it is computed again to be compared: communicate, or write files."""

from __future__ import annotations

import builtins
import functools
import io
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from ddp_callbacks.comm.collectives import all_gather_object
from ddp_callbacks.errors import ConfigurationError, frames, is_called_by_us, warn
from ddp_callbacks.process_group import get_rank
from ddp_callbacks.replacement import Replacements

COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "send", "recv", "isend", "irecv"),
)
"""Functions of ``torch.distributed`` that communicate."""

_WRITES = (
    "{who} writes {path} in {step}, of its part of a batch: the file ends with {what}. Collect them, let all processes "
    "gather them at the end (all_gather_object), and write on rank 0; or return them from predict_step."
)
_ANY_ORDER = "rows in another order than one process's, or with those of one process alone"


@contextmanager
def refusing_collectives(noted: list[str]) -> Iterator[None]:
    """Inside, :data:`COLLECTIVES` raise :class:`ConfigurationError` unless this library calls; note their names."""
    with Replacements() as replaced:
        for name in COLLECTIVES:
            replaced.set(dist, name, _refused(name, getattr(dist, name), noted))
        yield


def _refused(name: str, original: Callable[..., Any], noted: list[str]) -> Callable[..., Any]:
    @functools.wraps(original)
    def refused(*args: Any, **kwargs: Any) -> Any:
        if is_called_by_us():  # synchronized layers
            return original(*args, **kwargs)
        noted.append(name)
        raise ConfigurationError(
            f'verify="first_batch" cannot compare a step that communicates (torch.distributed.{name}): it computes '
            "other parts of the batch than training. Leave out verify."
        )

    return refused


@contextmanager
def writing_nowhere(noted: dict[str, bool]) -> Iterator[None]:
    """Inside, files that Python code opens to be written are ``os.devnull`` instead.

    Args:
        noted: Gets their names, and whether the last call has opened them to append.
    """
    original = builtins.open

    @functools.wraps(original)
    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        writes = isinstance(file, str | os.PathLike) and not {*"wax+"}.isdisjoint(mode)
        if writes and all(frame.f_globals.get("__name__") != "logging" for frame in frames()):  # which keeps its file
            noted[str(os.fspath(file))] = "a" in mode
            return original(os.devnull, mode.replace("x", "w"), *args, **kwargs)
        return original(file, mode, *args, **kwargs)

    with Replacements() as replaced:
        replaced.set(builtins, "open", opened)
        replaced.set(io, "open", opened)
        yield


def warn_of_files(written: Mapping[str, bool], step: str, group: dist.ProcessGroup | None) -> None:
    """Warn on rank 0 of a file that several ranks write in a step, or to which one alone appends. A collective.

    Args:
        written: What this rank has written of its part; see :func:`writing_nowhere`.
        step: The name of the step.
    """
    of_ranks = all_gather_object(dict(written), "the files that are written", group)
    if get_rank(group):
        return
    names = Counter(name for found in of_ranks for name in found)
    shared = [name for name, count in names.items() if count > 1]
    writers = [rank for rank, found in enumerate(of_ranks) if found]
    alone = [name for name, appends in of_ranks[writers[0]].items() if appends] if len(writers) == 1 else []
    if shared:
        warn(_WRITES.format(who="each process", path=shared[0], step=step, what=_ANY_ORDER))
    elif alone:
        warn(_WRITES.format(who=f"rank {writers[0]} alone", path=alone[0], step=step, what="the rows of that part"))
