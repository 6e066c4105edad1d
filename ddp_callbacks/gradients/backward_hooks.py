"""Hooks that tell a :class:`.reducer.Reducer` of a complete gradient, of a backward's end, and of a step."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ddp_callbacks._torch import call_at_end_of_backward, current_node, hooks_on_accumulation
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.gradients.buckets import Bucket
from ddp_callbacks.gradients.reducer import Reducer
from ddp_callbacks.gradients.weighing import trainable

Hook = Callable[[torch.Tensor], None]


class Switch:
    """Whether backwards synchronize (``enabled``); otherwise gradients are only noted as used.

    Before the first gradient of a block without synchronization, ``in_forward`` is true.
    """

    enabled = True
    in_forward = False


class BackwardHooks:
    """Hooks on the parameters of a reducer, from construction to :meth:`close`.

    Args:
        reducer: The reducer that they call.
        switch: Whether the backwards synchronize.
    """

    def __init__(self, reducer: Reducer, switch: Switch) -> None:
        self._reducer, self._switch = reducer, switch
        self._graph_task: Callable[[], _GraphTask | None] = lambda: None  # returns that of the running backward
        self._is_on_gpu = any(parameter.device.type == "cuda" for parameter in reducer.parameters)
        self._lock = threading.RLock()  # autograd has a thread per device
        places = {slot: (bucket, at) for bucket in reducer.buckets for at, slot in enumerate(bucket.slots)}
        self._handles: list[RemovableHandle] = []
        for slot, parameter in enumerate(reducer.parameters):
            hook = self._hook(slot, *places.get(slot, (None, 0)))
            with trainable(parameter):
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self.after_steps(self._after_step)  # which may contain the backward

    def after_steps(self, hook: Callable[..., None]) -> None:
        """Call ``hook`` after each step of an optimizer, with it, until :meth:`close`."""
        self._handles.append(register_optimizer_step_post_hook(hook))

    def synchronize(self) -> None:
        """Synchronize now. A collective. Does nothing during a backward, whose end synchronizes."""
        if self._graph_task() is None:
            self._begin()
            self._reducer.finish()

    def close(self) -> None:
        """Remove every hook. Local; safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, slot: int, bucket: Bucket | None, position: int) -> Hook:
        def hook(parameter: torch.Tensor) -> None:
            with self._lock:
                if self._switch.enabled and self._graph_task() is None:
                    self._begin_in_backward()
                if self._switch.in_forward:
                    self._switch.in_forward = False
                    self._reducer.end_forward()
                if not parameter.requires_grad:
                    return  # frozen after the forward pass: autograd calls its hook, but adds nothing to its gradient
                self._reducer.used[slot] = True
                if self._switch.enabled and bucket is not None:  # sparse gradients are in no bucket
                    self._reducer.mark(bucket, position)

        return hook

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if self._reducer.weighing.accumulates:
            self._reducer.require_synchronized(p for group in optimizer.param_groups for p in group["params"])

    def _begin(self) -> None:
        if not self._reducer.rounds:
            refuse_foreign_hooks(self._reducer.known.named, {handle.id for handle in self._handles})
        if self._is_on_gpu and torch.cuda.is_current_stream_capturing():
            raise ConfigurationError(
                "a CUDA graph cannot contain the synchronization of gradients, in which processes exchange messages. "
                "Capture the forward pass or parts of the model with torch.cuda.make_graphed_callables, and call "
                "backward outside of a capture."
            )
        self._reducer.begin()

    def _begin_in_backward(self) -> None:
        self._begin()
        task = _GraphTask()
        self._graph_task = weakref.ref(task)
        self._call_at_end(task)

    def _call_at_end(self, task: _GraphTask) -> None:
        call_at_end_of_backward(partial(self._end_of_graph_task, task))

    def _end_of_graph_task(self, task: _GraphTask) -> None:
        if self._graph_task() is not task:
            return  # a hook of an earlier backward, left over in a retained graph
        # Reentrant checkpointing runs a backward inside a node of another one; only the outermost one ends here.
        node = current_node()
        if node is None:
            self._graph_task = lambda: None
            self._reducer.finish()
        else:
            node.register_hook(lambda *_: self._call_at_end(task))


def refuse_foreign_hooks(named: Mapping[str, torch.nn.Parameter], own: Collection[int] = ()) -> None:
    """Refuse other hooks on gradient accumulation: they would see, or consume, the local gradient.

    Args:
        named: The parameters to check, by name.
        own: The handle ids of hooks that are allowed.

    Raises:
        ConfigurationError: A parameter has another such hook.
    """
    for of_parameter, parameter in named.items():
        for key, hook in hooks_on_accumulation(parameter).items():
            if key not in own:
                name = getattr(hook, "__qualname__", type(hook).__name__)
                raise ConfigurationError(
                    f"{of_parameter} has a hook of register_post_accumulate_grad_hook: {name}. It would see "
                    "this process's gradient before it is summed over the processes. Remove it and do its work after "
                    "backward (an optimizer that steps in backward: step after it), or close the "
                    "GradientSynchronizer that made it."
                )


class _GraphTask:
    """Lives as long as autograd's graph task: an exception drops the task, and with it this object."""
