"""Let a resumed fit give its checkpoints the names that they would have in an uninterrupted one.

``ModelCheckpoint`` adds ``-v1`` to the name of a file that is there and that it does not know. A fit that was cut may
have written files after what it continues from. Those that it writes again replace them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from ddp_callbacks.process_group import get_rank
from ddp_callbacks.replacement import Replacements

Names = dict[str, list[str]]


def names_of(trainer: Any) -> Names:
    """Return, on rank 0, the names of the files in each local folder of a ``ModelCheckpoint``. Local."""
    folders = {each.dirpath for each in _callbacks(trainer)} if get_rank() == 0 else set()
    return {folder: sorted(os.listdir(folder)) if os.path.isdir(folder) else [] for folder in folders}


def replace_newer(trainer: Any, before: Mapping[str, list[str]], replacements: Replacements) -> None:
    """Let each ``ModelCheckpoint`` write a file once over one that is in its folder, but not in ``before``. Local.

    Args:
        before: Rank 0's :func:`names_of` when what the fit continues from was written.
        replacements: Ends this.
    """
    for callback in _callbacks(trainer):
        if callback.dirpath in before:
            exists = functools.partial(_is_kept, callback.dirpath, {*before[callback.dirpath]})
            replacements.replace(callback, "file_exists", exists)


def _callbacks(trainer: Any) -> list[Any]:
    found = [each for each in trainer.checkpoint_callbacks if hasattr(each, "file_exists")]
    return [each for each in found if each.dirpath and "://" not in str(each.dirpath)]


def _is_kept(folder: str, names: set[str], exists: Callable[..., bool], path: str, *args: Any, **kwargs: Any) -> bool:
    name = os.path.basename(path)
    is_newer = os.path.dirname(path) == folder and name not in names
    names.add(name)
    return exists(path, *args, **kwargs) and not is_newer  # all ranks ask, as the answer is rank 0's
