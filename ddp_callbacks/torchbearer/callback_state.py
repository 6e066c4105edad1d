"""The state of a Trial's callbacks in the middle of a run: what ``state_dict`` has, and what it lacks."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import torch
from torchbearer import Callback
from torchbearer.callbacks import CSVLogger
from torchbearer.callbacks.tensor_board import AbstractTensorBoard
from torchbearer.callbacks.torch_scheduler import TorchScheduler

from ddp_callbacks.checkpoints.attributes import Checksums, changed, checksums_of, decode, plain_attributes
from ddp_callbacks.files import count_lines, keep_lines
from ddp_callbacks.torchbearer._torchbearer import scheduler_of
from ddp_callbacks.torchbearer.base import DistributedCallback


class CallbackStates:
    """The states of the callbacks that are not of this library. Every rank has its own; all is local.

    Args:
        callbacks: All callbacks of the Trial.
        known: See :func:`ddp_callbacks.checkpoints.attributes.plain_attributes`.
    """

    def __init__(self, callbacks: list[Callback], known: set[int]) -> None:
        self._callbacks = [callback for callback in callbacks if not isinstance(callback, DistributedCallback)]
        self._known = known
        self._at_start: dict[str, Checksums] = {}

    def note_start(self) -> None:
        """Know what the callbacks are set to from what changes in the run. Call it after ``on_start``."""
        self._at_start = {name: checksums_of(self._attributes(one)) for name, one in named(self._stateless())}

    def save(self) -> dict[str, Any]:
        """All that is to be put back, as tensors and plain data."""
        at_start = self._at_start
        return {
            "states": {name: one.state_dict() for name, one in named(self._callbacks)},
            "attributes": {
                name: changed(self._attributes(one), at_start.get(name, {})) for name, one in named(self._stateless())
            },
            "schedulers": {name: scheduler_of(one).state_dict() for name, one in named(self._of(TorchScheduler))},
            "rows": {name: _rows(one) for name, one in named(self._of(CSVLogger))},
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Load what ``state_dict`` has, as at the start of a run."""
        for callback, found in _pairs(self._callbacks, saved["states"]):
            callback.load_state_dict(found)

    def put_back(self, saved: dict[str, Any], device: torch.device | str) -> None:
        """Load all, after ``on_start``."""
        self.load(saved)
        for callback, found in _pairs(self._stateless(), saved["attributes"]):
            vars(callback).update(decode(found, device))
            for value in vars(callback).values():
                if isinstance(value, Iterator):  # of parameters to clip or to decay: ended in the first batch
                    deque(value, maxlen=0)
        for callback, found in _pairs(self._of(TorchScheduler), saved["schedulers"]):
            scheduler_of(callback).load_state_dict(found)

    def continue_files(self, saved: dict[str, Any]) -> None:
        """Let files of rows go on behind the rows that they had; before ``on_start``, which would begin them anew."""
        for callback, rows in _pairs(self._of(CSVLogger), saved["rows"]):
            _continue(callback, rows)

    def close_files(self, state: Any) -> None:
        """Close what the next run goes on with."""
        for callback in self._of(CSVLogger | AbstractTensorBoard):
            callback.on_end(state)
            if batches := getattr(callback, "batch_log_dir", None):
                callback.close_writer(batches)

    def _attributes(self, callback: Callback) -> dict[str, Any]:
        return plain_attributes(callback, self._known)

    def _stateless(self) -> list[Callback]:
        """Torchbearer's callbacks without a ``state_dict``, whose attributes are their state."""
        return [
            callback
            for callback in self._callbacks
            if type(callback).__module__.startswith("torchbearer.")
            and type(callback).state_dict is Callback.state_dict
            and not isinstance(callback, CSVLogger)
        ]

    def _of(self, kind: Any) -> list[Any]:
        return [callback for callback in self._callbacks if isinstance(callback, kind)]


def named(callbacks: list[Any]) -> list[tuple[str, Any]]:
    """Each with its class and its place among those of its class: others may have been added since it was saved."""
    counts: Counter[str] = Counter()
    found = []
    for callback in callbacks:
        kind = type(callback).__qualname__
        found.append((f"{kind} {counts[kind]}", callback))
        counts[kind] += 1
    return found


def _pairs(callbacks: list[Any], saved: dict[str, Any]) -> list[tuple[Any, Any]]:
    """The callbacks of which something is saved, with that."""
    return [(callback, saved[name]) for name, callback in named(callbacks) if name in saved]


def _rows(callback: CSVLogger) -> int | None:
    file = getattr(callback, "csvfile", None)
    if file is None or file.closed:
        return None
    file.flush()
    return count_lines(callback.filename)


def _continue(callback: CSVLogger, rows: int | None) -> None:
    if rows is not None and os.path.exists(callback.filename):
        keep_lines(callback.filename, rows)
        callback.filemode = "a"
        callback.write_header = callback.write_header and rows == 0
