"""Decide in which hooks of a Trainer all ranks draw the same random numbers ("alike").

==========================================================  ==========================================================
``*_step``                                                  for the whole batch, of which each rank keeps its rows;
                                                            see :class:`ddp_callbacks.WholeDraws`
transfers of a batch                                        differently: they handle this rank's part of the batch
hooks of an evaluation's batch                               differently
hooks of a training batch that the user defines              alike: they may change parameters
``step`` of an optimizer that is not torch's                 alike, but its closure differently
all other hooks of the module, datamodule and callbacks      alike
==========================================================  ==========================================================

A hook that draws alike must run on all ranks, and draw equally often. If one does not (it asks for the rank), the ranks
have the same state again at the end of the training data and of the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ddp_callbacks.data.random_state import RunRandomState
from ddp_callbacks.lightning.packages import ROOTS
from ddp_callbacks.lightning.replacement import Replacements

_STEPS = {"training_step", "validation_step", "test_step", "predict_step", "forward"}
_TRANSFERS = {"on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"}
_OF_EVALUATION = {f"on_{stage}_batch_{end}" for stage in ("validation", "test", "predict") for end in ("start", "end")}
_OWN = _STEPS | _TRANSFERS | _OF_EVALUATION | {"on_exception", "optimizer_step"}  # the latter contains the closure
_OF_TRAINING_BATCH = {
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "configure_gradient_clipping",
    "optimizer_zero_grad",
    "lr_scheduler_step",
}


class HookDrawing:
    """Lets the hooks of a Trainer draw as the table above says, until ``replacements`` are undone.

    It replaces ``profile`` of the Trainer's profiler, inside which Lightning calls every hook.

    Attributes:
        random_state: The random state of the run.
    """

    def __init__(self, trainer: Any, replacements: Replacements) -> None:
        self.random_state = RunRandomState()
        self._trainer = trainer
        self._package = ROOTS[trainer.strategy.package]
        self._contexts: dict[str, Callable[[], AbstractContextManager[None]] | None] = {}
        replacements.callback(self.random_state.end)
        replacements.replace(trainer.profiler, "profile", self._profile)

    def _profile(self, profile: Callable[[str], Any], action_name: str) -> AbstractContextManager[Any]:
        """Return the profiler's context; around a hook, also the context of the random state that it draws from."""
        if action_name not in self._contexts:
            self._contexts[action_name] = self._context(action_name)
        context = self._contexts[action_name]
        profiled: AbstractContextManager[Any] = profile(action_name)
        return profiled if context is None else _both(context(), profiled)

    def optimizer_step(self, optimizer: Any, step: Callable[..., Any], closure: Callable[[], Any]) -> Any:
        """Call ``step(closure)``, alike on all ranks unless it is torch's: others may add noise to the parameters."""
        if type(optimizer).__module__.startswith("torch."):
            return step(closure)

        def apart() -> Any:
            with self.random_state.apart():
                return closure()

        with self.random_state.alike_in_batch():
            return step(apart)

    def _context(self, action_name: str) -> Callable[[], AbstractContextManager[None]] | None:
        owner, _, hook = action_name.rpartition(".")
        home = next(filter(None, (_home(candidate, hook) for candidate in self._candidates(owner))), None)
        if (
            hook in _OWN
            or home is None
            or home.startswith((f"{self._package}.core.", f"{self._package}.callbacks.callback"))
        ):
            return None
        if hook not in _OF_TRAINING_BATCH:
            return self.random_state.alike
        return None if home.startswith(f"{self._package}.") else self.random_state.alike_in_batch

    def _candidates(self, owner: str) -> list[Any]:
        """Return the callbacks, or the module, that ``owner`` in the profiler's action name may stand for."""
        kind, _, name = owner.partition("]")
        if kind == "[Callback":
            return [callback for callback in self._trainer.callbacks if callback.state_key == name]
        modules = {"[LightningModule": self._trainer.lightning_module, "[LightningDataModule": self._trainer.datamodule}
        return [modules[kind]] if kind in modules else []


def _home(owner: Any, hook: str) -> str | None:
    """Return the name of the Python module that defines this hook of ``owner``; ``None`` if none does."""
    if hook in getattr(owner, "__dict__", {}):
        return "an attribute of the object"
    return next((kind.__module__ for kind in type(owner).__mro__ if hook in vars(kind)), None)


@contextmanager
def _both(outer: AbstractContextManager[None], inner: AbstractContextManager[Any]) -> Iterator[Any]:
    with outer, inner as value:
        yield value
