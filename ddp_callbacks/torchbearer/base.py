"""The base class of the callbacks: it joins the process group, and surrounds the Trial's methods."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torchbearer
from torchbearer import Callback
from torchbearer.callbacks import AggregatePredictions, CallbackList

from ddp_callbacks.checkpoints import LocalStates
from ddp_callbacks.process_group import get_rank, get_world_size, join_process_group
from ddp_callbacks.replacement import Replaced
from ddp_callbacks.reporting.recorder import end_training
from ddp_callbacks.torchbearer.state import State

CALLS = ("run", "evaluate", "predict")
"""The methods of a Trial that are collectives."""

RANDOM_STATE = "ddp_callbacks_random_state"
"""Key of the random state in checkpoints written with :class:`RankZeroOutput`."""


@dataclass(frozen=True)
class Call:
    """A call of a Trial's method.

    Attributes:
        trial: The Trial.
        name: The name of the method.
        arguments: By name; changes take effect.
    """

    trial: Any
    name: str
    arguments: dict[str, Any]


class DistributedCallback(Callback):  # type: ignore[misc]
    """Base class of callbacks that use the default process group, joined from the environment when the Trial is made.

    Attributes:
        calls: The names of the Trial's methods that run inside of :meth:`around`.
        is_outermost: Whether this :meth:`around` is outside of those of other callbacks.
    """

    calls: ClassVar[tuple[str, ...]] = CALLS
    is_outermost: ClassVar[bool] = False

    def on_init(self, state: State) -> None:
        join_process_group()
        keep_out_of_checkpoints(state[torchbearer.CALLBACK_LIST])
        _wrap_calls(state[torchbearer.SELF])

    def around(self, inside: Callable[[], Any], call: Call) -> Any:
        """Return ``inside()``, the result of a call. Torchbearer has no event for an exception.

        Args:
            inside: The method, surrounded by the callbacks before this one in the list.
            call: The call.
        """
        with self.calling(call):
            return inside()

    def calling(self, call: Call) -> AbstractContextManager[object]:
        """Surround a call."""
        return nullcontext()

    def local_state(self, state: State) -> dict[str, Any]:
        """Return this rank's own state of the current run, as tensors and plain data, for :class:`Resume`. Local.

        Args:
            state: The Trial's state.
        """
        return {}

    def load_local_state(self, states: LocalStates, state: State) -> None:
        """Continue from the results of :meth:`local_state`. Every rank calls it, before its next batch or epoch.

        Args:
            states: The results of :meth:`local_state` on the ranks of the earlier run.
            state: The Trial's state.
        """

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return get_rank()

    @property
    def world_size(self) -> int:
        """The number of processes in the group; 1 before a group is joined."""
        return get_world_size()


def aggregator_of(state: State) -> AggregatePredictions | None:
    """Return the callback that this ``predict()`` injects; ``None`` in other passes, also in those that it contains.

    Torchbearer puts it behind the call's printer. It leaves both in the list after an exception.
    """
    behind_printer = getattr(state[torchbearer.CALLBACK_LIST], "callback_list", None)
    callback = getattr(behind_printer, "callback", None)
    return callback if isinstance(callback, AggregatePredictions) else None


def has_event(callback: Callback, event: str) -> bool:
    """Whether a callback handles an event."""
    return event in vars(callback) or getattr(type(callback), event, None) is not getattr(Callback, event)


def handles(callback: Callback, events: tuple[str, ...]) -> bool:
    """Whether this is a user's callback, not Torchbearer's or ours, that handles one of these events."""
    module = type(callback).__module__
    is_decorated = module == "torchbearer.callbacks.decorators"  # made from a user's function
    if module.startswith(("torchbearer.", "ddp_callbacks.")) and not is_decorated:
        return False
    return any(has_event(callback, event) for event in events)


def _wrap_calls(trial: Any) -> None:
    """Let the methods of this Trial object call :meth:`DistributedCallback.around` of its callbacks, once."""
    if CALLS[0] not in vars(trial):
        for name in (*CALLS, "replay"):
            Replaced(trial, name, functools.partial(_surround, trial, name))


def _surround(trial: Any, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    bound = inspect.signature(method).bind(*args, **kwargs)
    call = Call(trial, name, bound.arguments)
    ours = [each for each in trial.state[torchbearer.CALLBACK_LIST] if isinstance(each, DistributedCallback)]
    inside: Callable[[], Any] = lambda: method(*bound.args, **bound.kwargs)  # noqa: E731
    for callback in sorted(ours, key=lambda each: each.is_outermost):
        if name in callback.calls:
            inside = functools.partial(callback.around, inside, call)
    try:
        return inside()
    finally:
        end_training()


def keep_out_of_checkpoints(callbacks: Any) -> None:
    """Save and load this list's state without the callbacks of this library, which are stateless.

    Torchbearer saves the classes of all callbacks and refuses to load into a different list. Without this, checkpoints
    from before you added the callback would not load with it, and new ones would not load without this library.
    """

    def others() -> CallbackList:
        return CallbackList([other for other in callbacks if not isinstance(other, DistributedCallback)])

    callbacks.state_dict = lambda: others().state_dict()
    callbacks.load_state_dict = lambda state_dict: others().load_state_dict(state_dict)
