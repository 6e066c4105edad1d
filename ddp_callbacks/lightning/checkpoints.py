"""Let all ranks resume from rank 0's checkpoint, even if only rank 0's disk has the file."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch

from ddp_callbacks.checkpoints.transfer import broadcast_file
from ddp_callbacks.comm.agreement import require_agreement
from ddp_callbacks.comm.collectives import all_gather_object
from ddp_callbacks.lightning import _parts
from ddp_callbacks.process_group import get_rank
from ddp_callbacks.replacement import Replacements

Load = Callable[[], dict[str, Any]]

_PURPOSE = "what the ranks resume from"


def load_on_all(load: Load, path: Any, weights_only: bool | None) -> dict[str, Any]:
    """Return the checkpoint that ``load`` returns here, or rank 0's, on the CPU, if this rank cannot read the file.

    A collective.

    Args:
        path: The path, for messages.
        weights_only: As for :func:`torch.load`, with which the other ranks read the checkpoint that rank 0 sends.

    Raises:
        OSError: On every rank, if a rank cannot read the file, from a disk or a URL, and rank 0 is one of them; a
            FileNotFoundError on those that can.
    """
    try:
        loaded, missing = load(), None
    except OSError as error:
        loaded, missing = {}, error
    has_file = all_gather_object(missing is None, _PURPOSE)
    if all(has_file):
        return loaded
    if not has_file[0]:
        raise missing or FileNotFoundError(
            f"Checkpoint file not found on rank 0: {path}. Ranks that have it: "
            f"{[rank for rank, has in enumerate(has_file) if has]}. Copy it to the host of rank 0, which reads for all."
        )
    file = io.BytesIO()
    if get_rank() == 0:
        torch.save(loaded, file)
    file = broadcast_file(file if get_rank() == 0 else None, _PURPOSE)
    return loaded if missing is None else torch.load(file, map_location="cpu", weights_only=weights_only)


def follow_rank_zero(trainer: Any, replacements: Replacements) -> None:
    """Let ranks that found no checkpoint resume from the one that rank 0 found.

    Each rank looks for ``ckpt_path="last"``, and for a requeued job's checkpoint, on its own disk.
    """

    def resume(resume_start: Callable[..., None], path: Any = None, *args: Any, **kwargs: Any) -> None:
        paths = all_gather_object(None if path is None else str(path), _PURPOSE)
        if paths[0] is None:
            remedy = "The checkpoint must be on the disk of rank 0, which decides from what all resume."
            require_agreement({"resumes from": paths[get_rank()] or "nothing"}, "what they resume from", remedy)
        resume_start(paths[0] if path is None else path, *args, **kwargs)

    replacements.replace(_parts.connector(trainer, "checkpoint"), "resume_start", resume)
