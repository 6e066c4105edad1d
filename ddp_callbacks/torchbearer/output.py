"""Rank 0 speaks: one progress bar, one set of files, and checkpoints that survive a kill."""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torchbearer
from torchbearer import Callback
from torchbearer.callbacks import ConsolePrinter, CSVLogger, LiveLossPlot, Tqdm
from torchbearer.callbacks.tensor_board import AbstractTensorBoard

from ddp_callbacks.data.random_state import plain_global_state
from ddp_callbacks.files import remove_leftovers, write_atomically
from ddp_callbacks.torchbearer._torchbearer import Checkpointer
from ddp_callbacks.torchbearer.base import RANDOM_STATE, DistributedCallback, State, wrap_methods
from ddp_callbacks.torchbearer.decisions import flat_callbacks

WRITERS = (Checkpointer, CSVLogger, AbstractTensorBoard, LiveLossPlot, ConsolePrinter, Tqdm)
EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class RankZeroOutput(DistributedCallback):
    """Let only rank 0 show a progress bar and write checkpoints, CSV, TensorBoard and plots.

    On the other ranks Torchbearer's writers get no events, and the Trial is silent whatever ``verbose`` says. On every
    world size a checkpoint is written to a temporary file in the same folder and renamed, and the previous one is
    deleted only then, so that a kill at any moment leaves a checkpoint that loads. Temporary files that kills have left
    are removed at the next start. With a Trial's state it holds the
    random state, under the key ``"ddp_callbacks_random_state"``, which a plain Trial ignores.

    Args:
        also: Further callback classes that write, your own loggers say, to be silenced on the other ranks.
        process_group: ``None`` is the default group.
    """

    def __init__(self, also: tuple[type[Callback], ...] = (), process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(process_group)
        self._writers = WRITERS + tuple(also)

    def on_init(self, state: State) -> None:
        super().on_init(state)
        # Here and not at the start of a run: writers before us in the list open their files at that event.
        for callback in flat_callbacks(state[torchbearer.CALLBACK_LIST]):
            if isinstance(callback, Checkpointer):
                callback.save_checkpoint = types.MethodType(save_checkpoint, callback)
            if self.rank != 0 and isinstance(callback, self._writers):
                _silence(callback)
        if self.rank != 0:
            wrap_methods(state[torchbearer.SELF], ("run", "evaluate", "predict", "replay"), _not_verbose)

    def on_start(self, state: State) -> None:
        """Remove what killed processes have left of the checkpoints."""
        if self.rank == 0:
            for callback in flat_callbacks(state[torchbearer.CALLBACK_LIST]):
                if isinstance(callback, Checkpointer):
                    remove_leftovers(callback.fileformat)


def save_checkpoint(self: Any, model_state: State, overwrite_most_recent: bool = False) -> None:
    """``save_checkpoint`` of Torchbearer, with the random state; the old file goes only once the new one is there."""
    values = {str(key): value for key, value in {**model_state, **model_state[torchbearer.METRICS]}.items()}
    path = self.fileformat.format(**values)
    if self.save_model_params_only:
        saved = model_state[torchbearer.MODEL].state_dict()
    else:
        saved = model_state[torchbearer.SELF].state_dict() | {RANDOM_STATE: plain_global_state()}
    write_atomically(
        path,
        lambda temporary: torch.save(
            saved, temporary, pickle_module=self.pickle_module, pickle_protocol=self.pickle_protocol
        ),
    )
    if overwrite_most_recent and self.most_recent not in (None, path):
        try:
            os.remove(self.most_recent)
        except FileNotFoundError:
            pass  # somebody has moved it away
    self.most_recent = path


def _silence(callback: Callback) -> None:
    for event in EVENTS:
        setattr(callback, event, _nothing)


def _nothing(state: State) -> None:
    pass


def _not_verbose(method: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(method)

    def quiet(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs)
        arguments.arguments["verbose"] = 0
        return method(*arguments.args, **arguments.kwargs)

    return quiet
