"""Make replicas equal and keep them so: compare settings, broadcast parameters, merge buffers."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torchbearer

from ddp_callbacks.comm.agreement import module_settings, optimizer_settings, require_agreement
from ddp_callbacks.comm.codec import pack, unpack
from ddp_callbacks.comm.collectives import all_gather_json, broadcast_tensors
from ddp_callbacks.data.random_state import set_global_state
from ddp_callbacks.data.sharding import length_of
from ddp_callbacks.replicas import (
    broadcast_optimizer_state,
    broadcast_parameters,
    describe_checkpoint,
    merge_buffers,
    require_same_checkpoint,
    running_statistics,
)
from ddp_callbacks.torchbearer.base import RANDOM_STATE, DistributedCallback, LocalStates, State, share_of, wrap_methods
from ddp_callbacks.torchbearer.data import DATA_KEYS
from ddp_callbacks.versions import __version__


class BroadcastParameters(DistributedCallback):
    """Start ``run``, ``evaluate`` and ``predict`` equal: compare the ranks' settings, then copy rank 0's state to all.

    It compares the called method, parameter names, shapes and dtypes, the optimizer's groups, the loaders' lengths, the
    epochs trained so far, and library versions. It broadcasts parameters, buffers and the optimizer's state. If only
    rank 0 has loaded a checkpoint, the other ranks also get its history and its optimizer's hyperparameters. A run that
    resumes from a checkpoint of :class:`RankZeroOutput` restores its random state, also with a single process, so it
    draws the same batches as an uninterrupted run.

    Args:
        process_group: ``None`` is the default group.

    Raises:
        MismatchError: On every rank; names the differences and the ranks.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(process_group)
        self._called = ""
        self._loaded: str | None = None
        self._random_state: Any = None  # of a checkpoint, if the next run resumes from it

    def on_init(self, state: State) -> None:
        super().on_init(state)
        wrap_methods(state[torchbearer.SELF], ("run", "evaluate", "predict", "replay"), self._noting)
        wrap_methods(state[torchbearer.SELF], ("load_state_dict",), self._noting_checkpoint)

    def on_start(self, state: State) -> None:
        if self._random_state is not None and self._called == "run":
            set_global_state(self._random_state)
            self._random_state = None
        if self.world_size == 1:
            return
        resumed = self._follow_resumed(state[torchbearer.HISTORY])
        settings = module_settings(state[torchbearer.MODEL]) | _versions() | _lengths(state)
        settings["what is called"] = self._called
        settings["epochs trained so far"] = str(len(state[torchbearer.HISTORY]))
        if resumed:
            broadcast_optimizer_state(state[torchbearer.OPTIMIZER], self.process_group)
        settings |= optimizer_settings(state[torchbearer.OPTIMIZER])
        require_agreement(
            settings,
            "the Trial",
            "Run the same script with the same arguments, data and libraries in every process.",
            self.process_group,
        )
        broadcast_parameters(state[torchbearer.MODEL], self.process_group)
        if not resumed:
            broadcast_optimizer_state(state[torchbearer.OPTIMIZER], self.process_group)

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Note which method was called. All begin alike, so different methods on the ranks would deadlock later."""

        def noting(*args: Any, **kwargs: Any) -> Any:
            self._called = method.__name__
            return method(*args, **kwargs)

        return noting

    def _noting_checkpoint(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def noting(state_dict: Any, resume: bool = True, **kwargs: Any) -> Any:
            loaded = method(state_dict, resume, **kwargs)
            self._random_state = state_dict.get(RANDOM_STATE) if resume else None
            keys = (torchbearer.MODEL, torchbearer.OPTIMIZER)
            state = [state_dict.get(key) for key in keys] if torchbearer.MODEL in state_dict else state_dict
            self._loaded = describe_checkpoint(state, epochs=len(state_dict.get(torchbearer.HISTORY, ())))
            return loaded

        return noting

    def _follow_resumed(self, history: list[dict[str, Any]]) -> bool:
        """Raise if ranks resume differently. If only rank 0 has resumed, the others follow it; return whether they do.

        Rank 0 has resumed if it has loaded a checkpoint, or has a history.
        """
        loaded, self._loaded = self._loaded, None
        found = all_gather_json([loaded, len(history)], "who resumes", self.process_group)
        by_rank, epochs = zip(*found, strict=True)
        if len(set(by_rank)) > 1 and any(by_rank[1:]):
            require_same_checkpoint(loaded, "a state", self.process_group)
        if epochs[0] == 0 or set(epochs) != {0, epochs[0]}:
            return False
        tensors: list[torch.Tensor] = []
        header, tensors = broadcast_tensors(pack(history, tensors), tensors, "the history", self.process_group)
        history[:] = unpack(header, tensors)
        return True


class MergeBuffers(DistributedCallback):
    """After each training pass: average running statistics, weighted by samples; copy other buffers from rank 0.

    Evaluations and checkpoints then use statistics of the whole data, equal on all ranks. A batch without samples on a
    rank doesn't change that rank's statistics.

    Args:
        process_group: ``None`` is the default group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(process_group)
        self._samples = 0.0
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []

    def on_start_training(self, state: State) -> None:
        self._samples = 0

    def on_sample(self, state: State) -> None:
        share = share_of(state)
        self._samples += share.local
        if share.local == 0:
            self._saved = [(buffer, buffer.clone()) for buffer in running_statistics(state[torchbearer.MODEL])]

    def on_step_training(self, state: State) -> None:
        for buffer, saved in self._saved:
            buffer.copy_(saved)
        self._saved = []

    def on_end_training(self, state: State) -> None:
        merge_buffers(state[torchbearer.MODEL], self._samples, self.process_group)
        self._samples = 0

    def local_state(self, state: State) -> dict[str, Any]:
        if self.world_size == 1:
            return {"samples": self._samples, "buffers": []}  # those of the Trial's own state
        return {"samples": self._samples, "buffers": list(state[torchbearer.MODEL].buffers())}

    def load_local_state(self, states: LocalStates, state: State) -> None:
        """On another number of ranks, all begin with the merged statistics, and count for equal parts of the pass."""
        buffers = list(state[torchbearer.MODEL].buffers())
        if states.is_same_world:
            self._samples = states.mine["samples"]
            for buffer, saved in zip(buffers, states.mine["buffers"], strict=False):
                buffer.copy_(saved)
            return
        total = sum(of_rank["samples"] for of_rank in states.of_ranks)
        self._samples = total / states.world_size
        if total and states.of_ranks[0]["buffers"]:
            averaged = {id(buffer) for buffer in running_statistics(state[torchbearer.MODEL])}
            for place, buffer in enumerate(buffers):
                if id(buffer) in averaged:
                    buffer.copy_(sum(one["buffers"][place] * (one["samples"] / total) for one in states.of_ranks))


def _versions() -> dict[str, str]:
    return {
        "version of Python": ".".join(platform.python_version_tuple()[:2]),
        "version of torch": torch.__version__,
        "version of torchbearer": torchbearer.__version__,
        "version of ddp_callbacks": __version__,
    }


def _lengths(state: State) -> dict[str, str]:
    trial_state = state[torchbearer.SELF].state
    lengths = {}
    for key in DATA_KEYS:
        generator, steps = trial_state[key] or (None, None)
        lengths[f"{key}: steps"] = str(steps)
        if hasattr(generator, "__len__"):
            length = length_of(generator)
            lengths[f"{key}: batches"] = "unknown" if length is None else str(length)
    return lengths
