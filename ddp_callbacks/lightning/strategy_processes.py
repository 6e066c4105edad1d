"""The processes of a strategy for a Trainer or for Fabric: how they meet, and the collectives that users call."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from ddp_callbacks.cluster.environment import processes_on_host
from ddp_callbacks.comm.agreement import optimizer_settings, require_agreement
from ddp_callbacks.comm.collectives import all_gather_object, all_reduce, any_rank, broadcast_object
from ddp_callbacks.data.random_state import broadcast_rng_state
from ddp_callbacks.data.sharding import is_distributed
from ddp_callbacks.data.shares import BatchSize, check_batch_size
from ddp_callbacks.errors import ConfigurationError, MismatchError, is_called_by_us, reader_of, warn
from ddp_callbacks.gradients.bucket_sums import EngineOptions
from ddp_callbacks.lightning.batches import Reduction, Weight, check_weight
from ddp_callbacks.lightning.cluster_environment import environment_of_job, join
from ddp_callbacks.process_group import get_world_size
from ddp_callbacks.process_group.default_group import is_as_one_process
from ddp_callbacks.process_group.gpu import too_few_gpus
from ddp_callbacks.process_group.runs import begin_run
from ddp_callbacks.process_group.spawn import require_forkable
from ddp_callbacks.randomness.option import Randomness, check_randomness
from ddp_callbacks.replacement import Replaced

# Names of the strategies; Lightning looks them up in lower case. Some libraries divide their data if they find "ddp".
NAMES = ("ddp_callbacks", "callbacks")

SAME_EVERYWHERE = (
    "Run the same script with the same arguments and libraries everywhere; if it draws settings, as a search does, "
    "with a fixed seed."
)

_ACCELERATORS = ("CPUAccelerator", "CUDAAccelerator")
_FOREIGN_PLUGINS = {
    "FSDPPrecision": "FSDP divides the parameters among the processes; here each process holds all of them",
    "DeepSpeedPrecision": "DeepSpeed has an engine of its own for gradients and optimizer",
    "XLAPrecision": "TPUs need XLA's collectives",
}

_READS = (
    "{reader} reads world_size before the loaders are made. Each batch of a loader is divided among the processes "
    "already: if this code divides the batch size by their number, or scales the learning rate, leave that out, or use "
    'batch_size="per_process".'
)
_Lightnings: Any = object  # stands for either package's class, which follows in the MRO


class ProcessesMixin(_Lightnings):  # type: ignore[misc]
    """Mixin that makes a ``DDPStrategy`` of a Trainer or of Fabric use the launcher's processes.

    Attributes:
        user: The strategy's user, for messages: ``"Trainer"`` or ``"Fabric"``.
        randomness: Whose random numbers the steps and the samples draw.
    """

    package: str
    user: str
    _reader: str | None = None  # what has read world_size; "" once loaders are made

    def __init__(
        self,
        batch_size: BatchSize,
        weight: Literal["cross_entropy"] | Weight | None,
        reduction: Reduction,
        randomness: Randomness,
        engine: EngineOptions,
        start_method: str | None,
        **of_lightning: Any,
    ) -> None:
        """Check and store the options that both strategies have.

        Args:
            engine: The options of :class:`ddp_callbacks.GradientSynchronizer`.
            of_lightning: The arguments of Lightning's own strategy.
        """
        check_batch_size(batch_size)
        check_weight(weight, reduction)
        check_randomness(randomness)
        self._batch_size, self._weight, self._reduction, self._engine = batch_size, weight, reduction, engine
        self.randomness = randomness
        self._cluster_environment: Any = None
        is_interactive = hasattr(sys, "ps1") or sys.flags.interactive
        start_method = start_method or ("fork" if is_interactive else "popen")
        super().__init__(start_method=start_method, **of_lightning)

    def __repr__(self) -> str:
        """Name the package: a Trainer of the other package does not take this for a strategy, and shows it."""
        return f"<{type(self).__name__} of {type(self).__module__}>"

    @property
    def cluster_environment(self) -> Any:
        """Lightning's cluster environment, which knows this process's rank."""
        return self._cluster_environment

    @cluster_environment.setter
    def cluster_environment(self, chosen: Any) -> None:
        self._cluster_environment = None if chosen is None else environment_of_job(chosen)

    @property
    def world_size(self) -> int:
        """The number of processes. A program that reads it before it makes its loaders may divide their batch by it."""
        if is_as_one_process() and not is_called_by_us():
            return 1
        size = int(super().world_size)
        if size > 1 and self._reader is None:
            self._reader = reader_of("world_size")
        return size

    @property
    def global_rank(self) -> int:
        """This process's rank."""
        return 0 if is_as_one_process() and not is_called_by_us() else int(super().global_rank)

    def warn_of_reader(self, loader: Any) -> None:
        """Warn if what makes the first loader that is divided may have divided its batch already."""
        if self._batch_size == "global" and self._reader and not is_distributed(loader):
            warn(_READS.format(reader=self._reader))
        self._reader = ""

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        devices: list[torch.device] = self.parallel_devices
        if devices[0].type == "cpu" or torch.cuda.device_count() == 1:
            return devices[0]  # a launcher may show each process a GPU of its own
        if max(self.local_rank + 1, processes_on_host(os.environ) or 0) > len(devices):
            raise ConfigurationError(
                f'{too_few_gpus(self.local_rank, len(devices))} Let the {self.user} see all GPUs (devices="auto").'
            )
        return devices[self.local_rank]

    def _configure_launcher(self) -> None:
        """Start processes only if no other launcher has started them.

        Lightning's own launcher would also compare ``devices`` and ``num_nodes`` with the processes that are there.
        """
        alone = self.num_processes * self.num_nodes == 1
        if not alone and not self.cluster_environment.creates_processes_externally:
            super()._configure_launcher()
            if self._start_method == "fork":
                Replaced(self.launcher, "launch", _launch_forks)

    def _meet(self) -> None:
        """Meet the other processes, and begin a run with them. Blocks until all are there."""
        accelerator = type(self.accelerator).__name__
        if accelerator not in _ACCELERATORS:
            raise ConfigurationError(
                f'strategy="ddp_callbacks" runs on CPUs and CUDA GPUs, not with {accelerator}: its processes exchange '
                'gradients through gloo or NCCL. Use accelerator="cpu" or "cuda".'
            )
        self.cluster_environment = self._cluster_environment  # the group may be newer than this strategy
        join(self.cluster_environment, self.root_device, self._process_group_backend, self._timeout)
        begin_run()
        if self._batch_size == "global":
            broadcast_rng_state()  # if the program sets no seed, the ranks would split their data differently

    # --- what Lightning and its users ask -----------------------------------------------------------------------------

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether ``decision`` is true on all ranks, or with ``all=False`` on any. A collective."""
        if self._is_alone():
            return bool(decision)
        purpose = "a decision"
        return not any_rank(not decision, purpose) if all else any_rank(bool(decision), purpose)

    def barrier(self, name: str | None = None, *_: Any, **__: Any) -> None:
        """Block until every rank is here."""
        if not self._is_alone():
            any_rank(False, f"the barrier {name}" if name else "a barrier")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return ``obj`` of rank ``src``. A collective.

        Plain data and tensors are sent as such; anything else is pickled, as in Lightning.
        """
        if self._is_alone():
            return obj
        if src != 0:
            return super().broadcast(obj, src)
        mine = (True, obj) if _is_plain(obj) else (False, None)
        is_plain, received = broadcast_object(mine, "an object")
        if not is_plain:
            return super().broadcast(obj, src)
        return obj if self.global_rank == 0 else received

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the ranks' tensors, stacked: shape ``[world_size, ...]``. A collective.

        Raises:
            MismatchError: The shapes differ; names all of them.
        """
        if self._is_alone():
            return tensor
        is_lightnings = sync_grads or group not in (None, dist.group.WORLD)
        sent = all_gather_object((list(tensor.shape), None if is_lightnings else tensor), "a tensor", group)
        shapes = [shape for shape, _ in sent]
        if any(shape != shapes[0] for shape in shapes):
            raise MismatchError(
                f"all_gather needs tensors of the same shape, got {shapes} by rank. Perhaps a batch cannot be divided "
                "evenly. Sum or pad the tensors first, or use a torchmetrics metric."
            )
        if is_lightnings:
            gathered = cast(torch.Tensor, super().all_gather(tensor, group, sync_grads))
            if gathered.requires_grad:  # gloo mixes up the numbers of a gradient that is not contiguous
                gathered.register_hook(torch.Tensor.contiguous)
            return gathered
        return torch.stack([part for _, part in sent]).to(tensor.device)

    def _is_alone(self) -> bool:
        """Whether this rank communicates with no other."""
        return get_world_size() == 1


def reduce(tensor: torch.Tensor, reduce_op: Any, group: Any = None) -> torch.Tensor:
    """Return a new tensor, reduced over the ranks. A collective. Lightning's own rounds the mean of integers down.

    Args:
        tensor: Has the same shape on all ranks. The mean of integers is a floating-point number.
        reduce_op: As in Lightning: ``"mean"``, ``"sum"``, ``"max"``, ... or a ``ReduceOp``; ``None`` sums.

    Raises:
        ConfigurationError: ``reduce_op`` is another operation.
    """
    operation = _operation(reduce_op)
    exact = tensor.is_floating_point() or tensor.is_complex()
    wide = tensor.detach() if exact and tensor.element_size() > 2 else tensor.detach().double()
    wide = wide.to(torch.int64) if not exact and operation != "mean" else wide
    result = tensor.dtype if exact else (torch.get_default_dtype() if operation == "mean" else torch.int64)
    if operation in ("mean", "sum"):
        total = all_reduce(wide.clone(memory_format=torch.contiguous_format), "a reduction", group)
        return (total / dist.get_world_size(group) if operation == "mean" else total).to(result)
    parts = torch.stack(all_gather_object(wide, "a reduction", group))
    if operation == "product":
        return parts.prod(0).to(tensor.device, result)
    return (parts.amin(0) if operation == "min" else parts.amax(0)).to(tensor.device, result)


def _operation(reduce_op: Any) -> str:
    name = "sum" if reduce_op is None else str(reduce_op).rpartition(".")[2].lower()  # a ReduceOp is "RedOpType.SUM"
    if name not in ("avg", "mean", "sum", "min", "max", "product"):
        raise ConfigurationError(f"reduce_op must be one of mean, sum, min, max and product, got {reduce_op!r}.")
    return "mean" if name == "avg" else name


def refuse_plugin(plugin: object) -> None:
    """Raise :class:`ConfigurationError` if a precision plugin belongs to another strategy."""
    name = type(plugin).__name__
    if name in _FOREIGN_PLUGINS:
        raise ConfigurationError(
            f'strategy="ddp_callbacks" does not work with {name}: {_FOREIGN_PLUGINS[name]}. Leave the plugin '
            "out, or use its own strategy."
        )


def require_same_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise :class:`MismatchError` unless the ranks have equal optimizers. A collective."""
    made = list(optimizers)
    settings = {
        f"{index}: {name}" if len(made) > 1 else name: value
        for index, optimizer in enumerate(made)
        for name, value in optimizer_settings(optimizer).items()
    }
    require_agreement(settings, "the optimizers", SAME_EVERYWHERE)


def _launch_forks(launch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    require_forkable()
    return launch(*args, **kwargs)


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return type(value) in (type(None), bool, int, float, str, torch.Tensor)
