"""Output from rank 0 only: one progress bar, one set of files, and crash-safe checkpoints."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torchbearer
from torchbearer import Callback
from torchbearer.callbacks import ConsolePrinter, CSVLogger, LiveLossPlot, Tqdm
from torchbearer.callbacks.tensor_board import AbstractTensorBoard

from ddp_callbacks.data.global_state import get_global_state
from ddp_callbacks.files import remove_leftovers, write_atomically
from ddp_callbacks.replacement import Replaced
from ddp_callbacks.torchbearer._torchbearer import Checkpointer
from ddp_callbacks.torchbearer.base import CALLS, RANDOM_STATE, Call, DistributedCallback, has_event
from ddp_callbacks.torchbearer.state import Event, State

WRITERS = (Checkpointer, CSVLogger, AbstractTensorBoard, LiveLossPlot, ConsolePrinter, Tqdm)
EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class RankZeroOutput(DistributedCallback):
    """Only rank 0 shows a progress bar and writes checkpoints, CSV, TensorBoard and plots.

    On the other ranks, Torchbearer's writers get no events, and the Trial is silent whatever ``verbose`` is. A
    checkpoint, also of a single process, is written to a temporary file in the same folder and then renamed. The
    previous one is deleted only after that, so there is always a checkpoint that loads, even if the process is killed.
    Temporary files that killed processes have left are removed before the next one is written. A Trial's checkpoint
    also contains the random state under the key ``"ddp_callbacks_random_state"``, which a plain Trial ignores.

    Args:
        also: Further callback classes to silence on the other ranks, for example your loggers.
    """

    calls = (*CALLS, "replay")

    def __init__(self, also: tuple[type[Callback], ...] = ()) -> None:
        super().__init__()
        self._writers = WRITERS + tuple(also)

    def on_init(self, state: State) -> None:
        super().on_init(state)
        # Not at the start of a run: writers before this callback in the list open their files at that event.
        for callback in state[torchbearer.CALLBACK_LIST]:
            if isinstance(callback, Checkpointer):
                callback.save_checkpoint = types.MethodType(save_checkpoint, callback)
            if isinstance(callback, self._writers):
                self._silence(callback)

    def _silence(self, callback: Callback) -> None:
        for event in EVENTS:  # only those that it handles: all ranks must see the same ones
            if has_event(callback, event):
                Replaced(callback, event, self._on_rank_zero)

    def _on_rank_zero(self, event: Event, state: State) -> None:
        if self.rank == 0:  # it may become rank 0 during the run
            event(state)

    @contextmanager
    def calling(self, call: Call) -> Iterator[None]:
        """Let the Trial be silent on the other ranks."""
        given = dict(call.arguments)
        if self.rank != 0:
            call.arguments["verbose"] = 0
        try:
            yield
        finally:
            call.arguments.clear()
            call.arguments.update(given)  # it may be called again, on another rank


def save_checkpoint(self: Any, model_state: State, overwrite_most_recent: bool = False) -> None:
    """Torchbearer's ``save_checkpoint``, with the random state; deletes the old file after writing the new one."""
    values = {str(key): value for key, value in {**model_state, **model_state[torchbearer.METRICS]}.items()}
    path = self.fileformat.format(**values)
    remove_leftovers(re.sub(r"\{.*?\}", "*", glob.escape(self.fileformat)))
    if self.save_model_params_only:
        saved = model_state[torchbearer.MODEL].state_dict()
    else:
        saved = model_state[torchbearer.SELF].state_dict() | {RANDOM_STATE: get_global_state()}
    options = {"pickle_module": self.pickle_module, "pickle_protocol": self.pickle_protocol}
    write_atomically(path, lambda temporary: torch.save(saved, temporary, **options))
    if overwrite_most_recent and self.most_recent not in (None, path):
        with contextlib.suppress(FileNotFoundError):  # somebody has moved it
            os.remove(self.most_recent)
    self.most_recent = path
