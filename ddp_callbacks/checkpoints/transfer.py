"""Do something on rank 0 for all ranks, and send a file's bytes from one rank to the others."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from ddp_callbacks.comm.collectives import broadcast, broadcast_object
from ddp_callbacks.errors import CheckpointError
from ddp_callbacks.process_group import get_rank, get_world_size, resolve_group
from ddp_callbacks.process_group.failures import describe_rank

T = TypeVar("T")

CHUNK_NBYTES = 1 << 26  # bytes of a file per message


def on_rank_zero(action: Callable[[], T], purpose: str, group: dist.ProcessGroup | None = None) -> T | None:
    """Call ``action`` on rank 0; the others wait for it. A collective.

    Args:
        action: Must call no collective.
        purpose: For error messages. The same on every rank.
        group: ``None`` is the default group.

    Returns:
        What ``action`` returned on rank 0, ``None`` on the others.

    Raises:
        Exception: On rank 0, the error that ``action`` raised.
        CheckpointError: On the others, with the same text, if ``action`` raised an error.
    """
    if get_rank(group) != 0:
        text = broadcast_object(None, purpose, group)
        if text is not None:
            raise CheckpointError(text)
        return None
    try:
        result = action()
    except Exception as error:
        broadcast_object(_text_for_others(error, purpose, group), purpose, group)
        raise
    broadcast_object(None, purpose, group)
    return result


def broadcast_file(
    file: io.BytesIO | None, purpose: str, group: dist.ProcessGroup | None = None, source: int = 0
) -> io.BytesIO:
    """Send the bytes of a rank's file in memory to every rank. A collective.

    Args:
        file: Not empty; ``None`` on ranks other than ``source``.
        purpose: For error messages. The same on every rank.
        group: ``None`` is the default group.
        source: The rank in the group.

    Returns:
        The file in memory, at its beginning.
    """
    size = 0 if file is None else file.seek(0, io.SEEK_END)
    size = int(broadcast(torch.tensor([size], device="cpu"), purpose, group, source))
    found = io.BytesIO(bytes(size)) if file is None else file
    for chunk in torch.frombuffer(found.getbuffer(), dtype=torch.uint8).split(CHUNK_NBYTES):
        broadcast(chunk, purpose, group, source)
    found.seek(0)
    return found


def _text_for_others(error: Exception, purpose: str, group: dist.ProcessGroup | None) -> str:
    if isinstance(error, CheckpointError) or get_world_size(group) == 1:
        return str(error)
    return f"{purpose} failed on {describe_rank(resolve_group(group), 0)}: {type(error).__name__}: {error}"
