"""Let a resumed fit log to the folder, and the file, of the fit that was cut.

Lightning gives each fit a new version, by which loggers and ``ModelCheckpoint`` name their folders. A ``CSVLogger``
deletes the file that it finds. So the first call of a Trainer, be it the fit or a validation in front of it, opens that
file and keeps all of it; the fit cuts it back to the checkpoint when it goes on, once nothing can be refused any more.
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
    """Give loggers without a version the one in ``places``, and open the CSV files that are there. Local.

    Call it before Lightning uses the loggers.
    """
    for logger, place in zip(loggers, places, strict=False):
        if place["version"] is not None and _progress.version_of(logger) is None:
            _progress.set_version_of(logger, place["version"])
        if _is_at(logger, place):
            _open(logger)


def cut_back(loggers: Sequence[Any], places: Sequence[Place]) -> None:
    """Remove the rows of CSV files that were logged after the checkpoint with these ``places``. Local."""
    for logger, place in zip(loggers, places, strict=False):
        if _is_at(logger, place):
            writer, kept = logger.experiment, keep_lines(str(_path(logger)), place["lines"])
            writer.metrics.clear()
            writer.metrics_keys = next(csv.reader(kept), [])
            if not kept:
                _path(logger).unlink(missing_ok=True)  # the logger begins it again, with a header


def _is_at(logger: Any, place: Place) -> bool:
    """Whether this is rank 0, and ``logger`` continues the CSV file in ``place``."""
    is_same = _is_csv(logger) and _progress.version_of(logger) == place["version"]
    return is_same and place["lines"] is not None and get_rank() == 0


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


def _open(logger: Any) -> None:
    path = _path(logger)
    aside = path.with_suffix(".kept")  # Lightning deletes the file that it finds; this one survives a kill
    if path.exists() and not aside.exists():
        path.replace(aside)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning warns that it deletes the file
        logger.experiment  # noqa: B018 - this makes it
    if aside.exists():
        aside.replace(path)
        with path.open(newline="") as file:
            logger.experiment.metrics_keys = next(csv.reader(file), [])
