"""What the ranks resume from: the file that rank 0 has, on its own disk if need be."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch

from ddp_callbacks.checkpoints.transfer import broadcast_file
from ddp_callbacks.comm.agreement import require_agreement
from ddp_callbacks.comm.collectives import all_gather_json
from ddp_callbacks.lightning import _parts
from ddp_callbacks.lightning.replacement import Replacements
from ddp_callbacks.process_group import get_rank

Load = Callable[[], dict[str, Any]]

_DOING = "what the ranks resume from"


def load_on_all(load: Load, path: Any, weights_only: bool | None) -> dict[str, Any]:
    """What ``load`` returns on this rank; if some rank has not the file, what it returns on rank 0. A collective.

    Args:
        path: For messages.
        weights_only: As for :func:`torch.load`, by which the other ranks read what rank 0 sends.

    Raises:
        FileNotFoundError: On every rank, if rank 0 has not the file.
    """
    try:
        loaded, missing = load(), None
    except FileNotFoundError as error:
        loaded, missing = {}, error
    has_file = all_gather_json(missing is None, _DOING)
    if all(has_file):
        return loaded
    if not has_file[0]:
        raise missing or FileNotFoundError(
            f"Checkpoint file not found on rank 0: {path}. Ranks that have it: "
            f"{[rank for rank, has in enumerate(has_file) if has]}. Copy it to the host of rank 0, which reads for all."
        )
    received = _broadcast(loaded, weights_only)
    return loaded if missing is None else received


def follow_rank_zero(trainer: Any, replacements: Replacements) -> None:
    """Let ranks that have found nothing to resume from resume from what rank 0 has found.

    ``ckpt_path="last"`` and a requeued job's checkpoint are looked for on the disk of each rank.
    """

    def resume(resume_start: Callable[..., None], path: Any = None, *args: Any, **kwargs: Any) -> None:
        paths = all_gather_json(None if path is None else str(path), _DOING)
        if paths[0] is None:
            remedy = "The checkpoint must be on the disk of rank 0, which decides from what all resume."
            require_agreement({"resumes from": paths[get_rank()] or "nothing"}, "what they resume from", remedy)
        resume_start(paths[0] if path is None else path, *args, **kwargs)

    replacements.replace(_parts.connector(trainer, "checkpoint"), "resume_start", resume)


def _broadcast(checkpoint: dict[str, Any], weights_only: bool | None) -> dict[str, Any]:
    """Rank 0's checkpoint on the others, on the CPU. A collective."""
    file = io.BytesIO()
    if get_rank() == 0:
        torch.save(checkpoint, file)
        broadcast_file(file, _DOING)
        return checkpoint
    received: dict[str, Any] = torch.load(broadcast_file(None, _DOING), map_location="cpu", weights_only=weights_only)
    return received
