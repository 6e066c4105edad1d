"""A fit that goes on logs to the folder, and the file, of the one that was cut.

Lightning gives each fit a version of its own, after which loggers and ``ModelCheckpoint`` name their folders, and lets
a ``CSVLogger`` begin its file anew.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from typing import Any

from ddp_callbacks.files import count_lines, keep_lines
from ddp_callbacks.lightning._lightning import keeping_csv, set_version_of, version_of
from ddp_callbacks.process_group import get_rank

Place = dict[str, Any]


def places_of(loggers: Sequence[Any]) -> list[Place]:
    """Where each logger is: its version, and on rank 0 the lines of its CSV file, which is complete then. Local."""
    return [{"version": version_of(logger), "lines": _count_lines(logger)} for logger in loggers]


def go_on(loggers: Sequence[Any], places: Sequence[Place]) -> None:
    """Let loggers without a version take that of ``places``, and CSV files go on where they were. Local.

    Call it before Lightning has used the loggers.
    """
    for logger, place in zip(loggers, places, strict=False):
        if place["version"] is not None and version_of(logger) is None:
            set_version_of(logger, place["version"])
        is_same = _is_csv(logger) and version_of(logger) == place["version"]
        if place["lines"] is not None and get_rank() == 0 and is_same:
            _continue(logger, place["lines"])


def _count_lines(logger: Any) -> int | None:
    path = _path(logger) if get_rank() == 0 else None
    if path is None:
        return None
    logger.save()
    return count_lines(path)


def _is_csv(logger: Any) -> bool:
    return any(kind.__name__ == "CSVLogger" for kind in type(logger).__mro__)


def _path(logger: Any) -> str | None:
    """Of the file of a CSVLogger on a local disk."""
    writer = logger.experiment if _is_csv(logger) else None
    path = getattr(writer, "metrics_file_path", None)
    return None if path is None or "://" in path else str(path)


def _continue(logger: Any, count: int) -> None:
    """Keep the first lines of the file: what comes behind them was logged after the checkpoint."""
    with keeping_csv(logger):
        path = _path(logger)
    if path is None or not count_lines(path):
        return
    if header := keep_lines(path, count)[:1]:
        logger.experiment.metrics_keys = next(csv.reader(header))
    else:
        os.remove(path)  # the logger begins it anew, with a header
