"""All uses of torch's private names: one function each, listed in :data:`PRIVATE`.

A new version of torch may change any of them, so the supported versions have an upper bound.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from ddp_callbacks.versions import require_names

__all__ = ["Backend", "BatchNorm", "Dropout", "OpOverload", "TorchDispatchMode"]

PRIVATE = (
    "torch:_C._current_autograd_node",
    "torch:_C._functorch.is_functorch_wrapped_tensor",
    "torch:_C._dispatch_has_kernel_for_dispatch_key",
    "torch:_C._storage_Use_Count",
    "torch:_C._will_engine_execute_node",
    "torch:_foreach_copy_",
    "torch:_lazy_clone",
    "torch:Tensor._post_accumulate_grad_hooks",
    "torch:UntypedStorage._cdata",
    "torch:UntypedStorage._new_shared_fd_cpu",
    "torch:UntypedStorage._share_fd_cpu_",
    "torch._C._distributed_c10d:Backend.Options._timeout",
    "torch:_ops.OpOverload.__init__ uses _op_dk",
    "torch:utils._python_dispatch.TorchDispatchMode",
    "torch:_C._len_torch_function_stack",
    "torch.overrides:_pop_mode()",
    "torch.overrides:_push_mode(mode)",
    "torch.autograd:Variable._execution_engine.queue_callback",
    "torch.cuda:_lazy_call(callable)",
    "torch.distributed:ProcessGroup._allgather_base",
    "torch.distributed:ProcessGroup._device_types",
    "torch.distributed:ProcessGroup._get_backend",
    "torch.distributed:ProcessGroup._get_sequence_number_for_group",
    "torch.distributed:distributed_c10d._get_process_group_store",
    "torch.distributed:distributed_c10d._set_pg_timeout(timeout, group)",
    "torch.distributed:distributed_c10d._world.group_count",
    "torch.distributed:distributed_c10d._world.pg_map",
    "torch.distributed:distributed_c10d._world.pg_names",
    "torch.nn:Module.add_module uses _modules",
    "torch.nn:Module.register_forward_hook uses _forward_hooks",
    "torch.nn:Module.register_forward_pre_hook uses _forward_pre_hooks",
    "torch.nn:Module.register_buffer uses _non_persistent_buffers_set",
    "torch.nn:Module.register_parameter uses _parameters",
    "torch.nn.modules.batchnorm:_BatchNorm.forward(self, input)",
    "torch.nn.modules.batchnorm:_BatchNorm._check_input_dim(self, input)",
    "torch.nn.modules.dropout:_DropoutNd",
    "torch.optim.lr_scheduler:LRScheduler.step uses _opt_called",
    "torch.optim.lr_scheduler:ChainedScheduler.step uses _schedulers",
    "torch.optim.lr_scheduler:SequentialLR.step uses _schedulers",
    "torch.utils.data:DataLoader.__iter__ uses _iterator",
    "torch.utils.data.dataloader:_BaseDataLoaderIter",
    "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter.__init__ uses _index_queues",
    "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter._shutdown_workers(self)",
)
"""The private names, in the format of :func:`ddp_callbacks.versions.require_names`."""


def require_torch() -> None:
    """Raise :class:`ImportError` if the installed torch lacks a private name. The message names supported versions."""
    require_names("torch", PRIVATE)


try:
    from torch._C._distributed_c10d import Backend
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
    from torch.nn.modules.dropout import _DropoutNd as Dropout
    from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
    from torch.utils.data.dataloader import _BaseDataLoaderIter
except ImportError:
    require_torch()  # its error names the supported versions of torch
    raise


# --- autograd -----------------------------------------------------------------------------------------------------


def current_node() -> Node | None:
    """Return the graph node that backward is executing in this thread; ``None`` outside, or at the end of a graph."""
    return torch._C._current_autograd_node()


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of the graph of the running backward."""
    Variable._execution_engine.queue_callback(callback)


def hooks_on_accumulation(parameter: torch.nn.Parameter) -> Mapping[int, Callable[..., Any]]:
    """Return the hooks that run after a gradient is accumulated, by the id of the handle that removes them."""
    return parameter._post_accumulate_grad_hooks or {}


# --- operators that draw random numbers --------------------------------------------------------------------------


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether the tensor is one of ``torch.func``, as inside of ``vmap``."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


@functools.cache
def composite_kernel(operator: OpOverload) -> Callable[..., Any] | None:
    """Return torch's C++ code that computes this operator from others; ``None`` if it is none of those."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key):
        return None
    return functools.partial(operator._op_dk, key)


def change_function_modes(change: Callable[[list[TorchFunctionMode]], list[TorchFunctionMode]]) -> None:
    """Replace this thread's function modes by what ``change`` returns for them, the innermost first."""
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    for mode in reversed(change(modes)):
        _push_mode(mode)


# --- memory -------------------------------------------------------------------------------------------------------


def count_of_tensors(storage: torch.UntypedStorage) -> int:
    """Return the number of tensors and storage objects that refer to this memory."""
    return torch._C._storage_Use_Count(storage._cdata)


def shared_storage(fd: int, nbytes: int) -> tuple[torch.UntypedStorage, int]:
    """Map the memory behind a file descriptor, as torch does for tensors from other processes.

    Returns:
        The storage, and the descriptor that it keeps, by which other processes can open the memory.
    """
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_fd_cpu(fd, nbytes)  # type: ignore[attr-defined]
    return storage, storage._share_fd_cpu_()[0]


def lazy_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that shares its memory until either is written. RuntimeError: the memory is not torch's own."""
    return torch._lazy_clone(tensor)


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to the target at the same list position, in one call."""
    torch._foreach_copy_(targets, sources)


# --- modules and loaders ------------------------------------------------------------------------------------------


def content_of(layer: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the layer's direct parameters and layers by name: the dicts in which it holds them."""
    return layer._parameters, layer._modules


def mark_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell a scheduler that the optimizer has taken steps before its state was loaded, or the scheduler would warn.

    :data:`PRIVATE` cannot check the attribute itself, only that torch's code uses it. A test resumes right before a
    scheduler's first step.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def schedulers_within(scheduler: Any) -> Sequence[Any]:
    """Return the schedulers that a ``SequentialLR`` or ``ChainedScheduler`` is made of."""
    return getattr(scheduler, "_schedulers", ())


def forward_hooks(layer: torch.nn.Module) -> list[Any]:
    """Return the hooks that run in the layer's forward."""
    return [*layer._forward_pre_hooks.values(), *layer._forward_hooks.values()]


def non_persistent_buffers(layer: torch.nn.Module) -> set[str]:
    """Return the names of the layer's direct buffers that its ``state_dict`` omits."""
    return layer._non_persistent_buffers_set


def copied_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a copy of a loader with workers of its own. It keeps the user's class and options."""
    copied = copy.copy(loader)
    copied._iterator = None
    return copied


def override(loader: DataLoader[Any], **attributes: Any) -> None:
    """Change attributes of a copy of a loader; ``DataLoader`` refuses this after construction."""
    loader.__dict__.update(attributes)


def forget_workers(loader: DataLoader[Any]) -> None:
    """Make a loader with ``persistent_workers`` start new workers for its next pass, and draw a seed for them."""
    loader._iterator = None
    note_workers(loader, False)


def note_workers(loader: DataLoader[Any], has_some: bool) -> None:
    """Note whether the user's loader would have persistent workers now, if a copy had not made its passes."""
    override(loader, ddp_callbacks_has_workers=has_some)


def has_persistent_workers(loader: DataLoader[Any]) -> bool:
    """Whether workers of an earlier pass, or of a copy's, wait for the next pass, which then draws no seed for them."""
    noted = getattr(loader, "ddp_callbacks_has_workers", False)
    return loader.persistent_workers and (noted or loader._iterator is not None)


def keeps_iterator(loader: DataLoader[Any]) -> bool:
    """Whether a loader's subclass keeps an iterator of its own across all passes, as endless loaders do."""
    kept = {name: value for name, value in vars(loader).items() if name != "_iterator"}
    return any(isinstance(value, _BaseDataLoaderIter) for value in kept.values())


def iterates_as_torch(loader: DataLoader[Any]) -> bool:
    """Whether a pass is one over the loader's own sampler: ``__iter__`` is torch's, or a subclass's that calls it."""
    code = getattr(type(loader).__iter__, "__code__", None)
    return type(loader).__iter__ is DataLoader.__iter__ or code is None or "__iter__" in code.co_names


def is_torchs_iterator(batches: object) -> bool:
    """Whether this is an iterator as a ``DataLoader`` makes it, which yields what its ``collate_fn`` returns."""
    return isinstance(batches, _BaseDataLoaderIter)


def surround_loading(around: Callable[[Callable[[Any], Any]], Callable[[Any], Any]]) -> None:
    """Let the iterators of all DataLoaders call ``around(__next__)`` for a batch."""
    _BaseDataLoaderIter.__next__ = around(_BaseDataLoaderIter.__next__)  # type: ignore[assignment, method-assign]


def worker_queues(batches: Iterator[Any]) -> Any:
    """Return the queues for requests from a ``DataLoader``'s iterator to its workers; ``None`` without workers."""
    return getattr(batches, "_index_queues", None)


def end_workers(batches: Iterator[Any]) -> None:
    """End the workers of a ``DataLoader``'s iterator, if it has any."""
    shut_down = getattr(batches, "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()


# --- accelerators -------------------------------------------------------------------------------------------------


def when_cuda_starts(call: Callable[[], None]) -> None:
    """Call ``call`` when torch starts CUDA, in the thread that first uses it; at once if CUDA has started."""
    torch.cuda._lazy_call(call)


# --- process groups -----------------------------------------------------------------------------------------------


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return the store through which the group's ranks have met. (torch 2.8 has no ``group.get_group_store()``.)"""
    return dist.distributed_c10d._get_process_group_store(group)


def devices_of(group: dist.ProcessGroup) -> list[torch.device]:
    """Return the devices that the group supports."""
    return group._device_types


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of the group's collectives."""
    return timeout_in(group._get_backend(devices_of(group)[0]).options)


def forget_failed_group() -> None:
    """After ``init_process_group`` has raised, let the next one name its group as on processes that have made none."""
    if not dist.is_initialized():
        dist.distributed_c10d._world.group_count = 0


def set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    """Set the timeout of a group's collectives; ``None`` is the default group."""
    setter = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # torch 2.14 has the first
    setter(timeout, group)


def timeout_in(options: Backend.Options) -> timedelta:
    """Return the timeout in a backend's options."""
    return options._timeout


def is_ordered_by_stream(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group's collectives on ``device`` run in a stream, so that the host does not wait for them."""
    if device.type == "cpu" or torch.device(device.type) not in devices_of(group):
        return False
    return group._get_backend(device).name() == "nccl"


def backends_of(group: dist.ProcessGroup) -> list[Backend]:
    """Return the group's backends, one per supported device."""
    return [group._get_backend(device) for device in devices_of(group)]


def accelerators_of(group: dist.ProcessGroup) -> list[Backend]:
    """Return the group's backends for accelerators only. gloo, if it serves all devices, is none of them."""
    backends = {device.type: group._get_backend(device) for device in devices_of(group)}
    on_cpu = backends.pop("cpu", None)
    return [backend for backend in backends.values() if backend is not on_cpu]


def computes_gradient_of(parameters: Iterable[torch.nn.Parameter]) -> bool:
    """Whether the backward in which this is called, by a hook, computes the gradient of one of the parameters."""
    nodes = [get_gradient_edge(parameter).node for parameter in parameters if parameter.requires_grad]
    try:
        return any(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:  # one is returned by torch.autograd.grad
        return True


def sequence_number(group: dist.ProcessGroup | None) -> int:
    """Return the number of collectives that this rank has started in the group; -1 if the backend does not count."""
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[union-attr]
    except (RuntimeError, AttributeError):
        return -1


def all_gather_flat(group: dist.ProcessGroup, received: torch.Tensor, sent: torch.Tensor) -> dist.Work:
    """Start an all-gather into one flat tensor, ``received``, which is world size times as large as ``sent``."""
    return group._allgather_base(received, sent)


def known_groups() -> list[dist.ProcessGroup]:
    """Return the process groups that this rank is a member of."""
    return list(dist.distributed_c10d._world.pg_map)


def count_of_own_groups() -> int:
    """Return the number of process groups that this rank is a member of."""
    return len(dist.distributed_c10d._world.pg_names)


def divisor_of(node: Any) -> float | None:
    """Return the divisor of a mean cross entropy, by its autograd node; ``None``: it is another one, or has none."""
    if not node.name().startswith("NllLoss") or getattr(node, "_saved_reduction", None) != 1:  # of "mean"
        return None
    divisor = getattr(node, "_saved_total_weight", None)
    return None if divisor is None else float(divisor)
