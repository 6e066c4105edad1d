"""Shared parts of the callbacks: joining the process group, this rank's share of a batch, the weight of its loss."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch
import torch.distributed as dist
import torchbearer
from torchbearer import Callback
from torchbearer.callbacks import AggregatePredictions, CallbackList

from ddp_callbacks.checkpoints import LocalStates as LocalStates
from ddp_callbacks.comm.held import Held, optimizers_in, trained_by
from ddp_callbacks.cross_entropy import cross_entropy_weight
from ddp_callbacks.data.shares import Share, common_size
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.process_group import get_rank, get_world_size, join_process_group
from ddp_callbacks.process_group.failures import announce_join

State: TypeAlias = Any  # torchbearer.State, a dict whose keys are torchbearer.StateKey
Method: TypeAlias = Callable[..., Any]
Weight: TypeAlias = Callable[[State], float | torch.Tensor]

CALLS = ("run", "evaluate", "predict")
"""The methods of a Trial that are collectives."""

DATA_KEYS = (torchbearer.TRAIN_DATA, torchbearer.VALIDATION_DATA, torchbearer.TEST_DATA)

SHARE = torchbearer.state_key("ddp_callbacks_share")
"""State key of this rank's :class:`ddp_callbacks.Share` of the current batch."""

WEIGHS_LOSS = torchbearer.state_key("ddp_callbacks_weighs_loss")
"""State key, set if the loss must be weighted before backward because layers (SyncBatchNorm) communicate in it."""

STEP_TIMES = torchbearer.state_key("ddp_callbacks_step_times")
"""State key of the :class:`ddp_callbacks.step_times.StepTimes` of the engine, if the ranks synchronize gradients."""

RUN_RANDOM_STATE = torchbearer.state_key("ddp_callbacks_run_random_state")
"""State key of the run's :class:`ddp_callbacks.data.random_state.RunRandomState`, if the ranks draw apart."""

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
    """Base class of callbacks that use a process group. It joins the default group unless you pass one.

    Args:
        process_group: The ranks' process group; ``None`` is the default group, joined from the environment when the
            Trial is made.

    Attributes:
        calls: The names of the Trial's methods that run inside of :meth:`around`.
        is_outermost: Whether this :meth:`around` is outside of those of other callbacks.
    """

    calls: ClassVar[tuple[str, ...]] = CALLS
    is_outermost: ClassVar[bool] = False

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.process_group = process_group

    def on_init(self, state: State) -> None:
        if self.process_group is None:
            join_process_group()
        elif self.world_size > 1:
            announce_join()
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

    @contextmanager
    def calling(self, call: Call) -> Iterator[None]:
        """Surround a call."""
        yield

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
        return get_rank(self.process_group)

    @property
    def world_size(self) -> int:
        """The number of processes in the group; 1 before a group is joined."""
        return get_world_size(self.process_group)


class LossWeight:
    """The weight of a rank's loss, and how the ranks' losses combine to the loss of the global batch.

    Args:
        weight: A function of the Trial's state, called after the loss is computed. It returns the number that this
            rank's loss is the mean over, for example tokens that count. ``None``: the number of samples; for cross
            entropy and negative log likelihood torch's divisor, the sum of the class weights of the targets that are
            not ignored.
        reduction: ``"mean"`` or ``"sum"``. ``None``: the criterion's ``reduction`` if it has one, else ``"mean"``. With
            a sum, what callbacks add in ``on_criterion`` is a sum, too, except for terms of parameters alone, such as
            weight decay: these count once.
    """

    def __init__(self, weight: Weight | None = None, reduction: str | None = None) -> None:
        if reduction not in (None, "mean", "sum"):
            raise ConfigurationError(f'reduction must be "mean", "sum" or None, got {reduction!r}.')
        if weight is not None and not callable(weight):
            raise ConfigurationError(f"weight must be a function of the Trial's state, got {weight!r}.")
        self._weight = weight or _weight_by_criterion
        self._reduction = reduction

    def reduction(self, state: State) -> str:
        """Return ``"mean"`` or ``"sum"``, for the criterion in the Trial's ``state``.

        Args:
            state: The Trial's state.
        """
        if self._reduction is not None:
            return self._reduction
        return "sum" if getattr(state[torchbearer.CRITERION], "reduction", None) == "sum" else "mean"

    def of(self, state: State) -> tuple[float, float | None]:
        """Return this rank's weight, and the sum over all ranks if it is known without communication. Local.

        Args:
            state: The Trial's state, after the loss is computed.
        """
        own = None if self.reduction(state) == "sum" else self._weight(state)
        if own is None:
            return self.of_samples(state)
        return (float(own) if share_of(state).local else 0.0), None

    def of_samples(self, state: State) -> tuple[float, float | None]:
        """Return the same from the numbers of samples alone, before the loss is computed. Local.

        Args:
            state: The Trial's state.
        """
        share = share_of(state)
        if self.reduction(state) == "sum":
            return float(share.local > 0), 1.0
        return float(share.local), None if share.total is None else float(share.total)


def _weight_by_criterion(state: State) -> float | torch.Tensor | None:
    return cross_entropy_weight(state[torchbearer.CRITERION], state.get(torchbearer.Y_TRUE))


def share_of(state: State) -> Share:
    """Return this rank's share of the current batch; without sharding, the whole batch."""
    if SHARE in state:
        share: Share = state[SHARE]
        return share
    return Share(common_size(state[torchbearer.X]) or 1, None)


def held_by(state: State) -> Held:
    """Return what the Trial trains: the modules in its state, and what else its optimizers and callbacks' have."""
    own = optimizers_in(state[torchbearer.CALLBACK_LIST])

    def trained() -> list[torch.nn.Parameter]:
        return trained_by([*own, *(value for value in state.values() if isinstance(value, torch.optim.Optimizer))])

    others = {str(key): value for key, value in state.items() if value is not state[torchbearer.MODEL]}
    return Held(state[torchbearer.MODEL], others, trained)


def fraction_of(share: Share, world_size: int) -> float:
    """Return this rank's fraction of the batch's samples; if the total is unknown, that of equal parts."""
    if share.total is None:
        return 1 / world_size
    return share.local / share.total if share.total else 0.0


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


Made = TypeVar("Made")


def in_training_pass(made: Made | None) -> Made:
    """Return ``made``, an object that a callback has made for the current training pass.

    Raises:
        ConfigurationError: It is ``None``: an evaluation within the pass has removed it.
    """
    if made is None:
        raise ConfigurationError(
            "the Trial was evaluated, or has predicted, in the middle of a training pass, which DDPCallback cannot "
            "continue. Call evaluate() and predict() between passes: in on_end_epoch for example."
        )
    return made


def wrap_event(callbacks: Any, name: str, around: Callable[[State], AbstractContextManager[None]]) -> None:
    """Let an event of the Trial's list of callbacks run inside ``around(state)``: before and after all callbacks."""
    event = getattr(callbacks, name)

    @functools.wraps(event)
    def wrapped(state: State) -> None:
        with around(state):
            event(state)

    setattr(callbacks, name, wrapped)


def _wrap_calls(trial: Any) -> None:
    """Let the methods of this Trial object call :meth:`DistributedCallback.around` of its callbacks, once."""
    if CALLS[0] not in vars(trial):
        for name in (*CALLS, "replay"):
            setattr(trial, name, _surrounded(trial, name, getattr(trial, name)))


def _surrounded(trial: Any, name: str, method: Method) -> Method:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def surrounded(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        call = Call(trial, name, bound.arguments)
        ours = [each for each in trial.state[torchbearer.CALLBACK_LIST] if isinstance(each, DistributedCallback)]
        inside: Callable[[], Any] = lambda: method(*bound.args, **bound.kwargs)  # noqa: E731
        for callback in sorted(ours, key=lambda each: each.is_outermost):
            if name in callback.calls:
                inside = functools.partial(callback.around, inside, call)
        return inside()

    return surrounded


def keep_out_of_checkpoints(callbacks: Any) -> None:
    """Save and load this list's state without the callbacks of this library, which are stateless.

    Torchbearer saves the classes of all callbacks and refuses to load into a different list. Without this, checkpoints
    from before you added the callback would not load with it, and new ones would not load without this library.
    """

    def others() -> CallbackList:
        return CallbackList([other for other in callbacks if not isinstance(other, DistributedCallback)])

    callbacks.state_dict = lambda: others().state_dict()
    callbacks.load_state_dict = lambda state_dict: others().load_state_dict(state_dict)
