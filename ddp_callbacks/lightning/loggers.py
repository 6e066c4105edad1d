"""Let a resumed fit log to the folder, and the file, of the fit that was cut.

Lightning gives each fit a new version, by which loggers and ``ModelCheckpoint`` name their folders. A ``CSVLogger``
deletes the file that it finds.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_callbacks.files import count_lines, keep_lines
from ddp_callbacks.lightning import _progress
from ddp_callbacks.process_group import get_rank

Place = dict[str, Any]


def places_of(loggers: Sequence[Any]) -> list[Place]:
    """Return each logger's version and, on rank 0, the number of lines of its CSV file, which it flushes. Local."""
    lines = [_count_lines(logger) for logger in loggers]  # this chooses a version
    versions = map(_progress.version_of, loggers)
    return [{"version": version, "lines": count} for version, count in zip(versions, lines, strict=True)]


def follow(loggers: Sequence[Any], places: Sequence[Place]) -> None:
    """Give loggers the versions in ``places``, which rank 0 had: each rank may have chosen another one. Local."""
    for logger, place in zip(loggers, places, strict=False):
        if place["version"] is not None:
            _progress.set_version_of(logger, place["version"])


def go_on(loggers: Sequence[Any], places: Sequence[Place]) -> None:
    """Give loggers without a version the one in ``places``, and continue CSV files from there. Local.

    Call it before Lightning uses the loggers.
    """
    for logger, place in zip(loggers, places, strict=False):
        if place["version"] is not None and _progress.version_of(logger) is None:
            _progress.set_version_of(logger, place["version"])
        is_same = _is_csv(logger) and _progress.version_of(logger) == place["version"]
        if place["lines"] is not None and get_rank() == 0 and is_same:
            _continue(logger, place["lines"])


def _count_lines(logger: Any) -> int | None:
    if get_rank() != 0 or not _is_csv(logger):
        return None
    logger.save()
    return count_lines(str(_path(logger)))


def _is_csv(logger: Any) -> bool:
    """Whether ``logger`` is a CSVLogger whose file is on a local disk."""
    is_one = any(kind.__name__ == "CSVLogger" for kind in type(logger).__mro__)
    return is_one and "://" not in str(logger.save_dir)


def _path(logger: Any) -> Path:
    return Path(logger.log_dir, "metrics.csv")


def _continue(logger: Any, count: int) -> None:
    """Keep the first ``count`` lines of the file: the others were logged after the checkpoint."""
    path = _path(logger)
    aside = path.with_suffix(".kept")  # Lightning deletes the file that it finds; this one survives a kill
    if aside.exists():
        aside.replace(path)
    kept = keep_lines(str(path), count)
    if kept:
        path.replace(aside)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning warns that it deletes the file
        writer = logger.experiment
        writer.metrics.clear()  # it may be that of the fit that was cut, in the same process
    if kept:
        aside.replace(path)
        writer.metrics_keys = next(csv.reader(kept))
    else:
        path.unlink(missing_ok=True)  # the logger begins it again, with a header
