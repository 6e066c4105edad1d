"""The strategy for Fabric: its ``DDPStrategy`` without DDP. Fabric calls its methods; this package synchronizes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset
from torchmetrics import Metric

from ddp_callbacks._torch import BatchNorm
from ddp_callbacks.batch_norm.layers import samples_needed
from ddp_callbacks.data.nested import name_of
from ddp_callbacks.data.shares import BatchSize, Share
from ddp_callbacks.data.skipped import SkippedParts
from ddp_callbacks.gradients import GradientSynchronizer
from ddp_callbacks.gradients.bucket_sums import EngineOptions
from ddp_callbacks.gradients.comm_hooks import CommHook
from ddp_callbacks.gradients.compression import Compress
from ddp_callbacks.gradients.loss_watch import LossWatch
from ddp_callbacks.lightning import _parts
from ddp_callbacks.lightning.batches import (
    Reduction,
    Weight,
    joint_loss,
    shard,
    weigh,
    weighed_backward,
    weight_function,
)
from ddp_callbacks.lightning.fabric.loader import WatchedLoader
from ddp_callbacks.lightning.fabric.loop_draws import LoopDraws
from ddp_callbacks.lightning.fabric.loss_batches import Batches, Draw, Pass, storages_of
from ddp_callbacks.lightning.fabric.loss_checks import LossChecks
from ddp_callbacks.lightning.fabric.models import Models
from ddp_callbacks.lightning.packages import require
from ddp_callbacks.lightning.strategy_processes import ProcessesMixin, reduce, refuse_plugin, require_same_optimizers
from ddp_callbacks.lightning.synced_metrics import SyncedMetrics, metrics_of_program, remember_lists, remember_padding
from ddp_callbacks.process_group import DEFAULT_TIMEOUT
from ddp_callbacks.process_group.failures import report_failure
from ddp_callbacks.randomness import WholeDraws
from ddp_callbacks.randomness.option import Randomness
from ddp_callbacks.replacement import Replaced, Replacements
from ddp_callbacks.replicas.parameters import describe_checkpoint, require_same_checkpoint


class CallbackFabricMixin(ProcessesMixin):
    """Mixin that makes Fabric's ``DDPStrategy`` synchronize by callbacks; see ``CallbackFabricStrategy``."""

    user = "Fabric"
    _weight_of: Weight | None = None  # made from the option when the first batch is drawn
    _divides_next = False  # whether to divide the loader that Fabric sets up next
    _last = Share(1, None)
    _fraction: float | None = None  # of the batch of a loop's body
    _weights = (1.0, 1.0)  # of the last backward
    _is_exiting = staticmethod(sys.is_finalizing)  # when Python closes an open loop, names of modules are gone
    _backwards = 0

    def __init__(
        self,
        batch_size: BatchSize = "global",
        *,
        weight: Literal["cross_entropy"] | Weight | None = None,
        reduction: Reduction = "mean",
        randomness: Randomness = "global",
        bucket_cap_mb: float = 25.0,
        comm_hook: CommHook | None = None,
        comm_state: Any = None,
        compress: Compress = None,
        process_group_backend: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        start_method: str | None = None,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
    ) -> None:
        require(self.package, (), _parts.PRIVATE_OF_FABRIC)
        super().__init__(
            batch_size,
            weight,
            reduction,
            randomness,
            EngineOptions(bucket_cap_mb, comm_hook, comm_state, compress),
            start_method,
            process_group_backend=process_group_backend,
            timeout=timeout,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
        )
        self._models = Models(functools.partial(GradientSynchronizer, **vars(self._engine), compare_replicas=False))
        self._backward_sync_control = self  # Fabric calls its no_backward_sync
        self._blocked: list[int] = []  # ids of the models in open contexts of no_backward_sync
        self._batches, self._losses, self._checks = Batches(), LossWatch(), LossChecks()
        self._random = LoopDraws()
        self.loading = self._random.loading

    @property
    def share(self) -> Share:
        """This rank's share of the batch drawn last, to weigh your own reductions. Local.

        It has the number of samples here (0: a padding batch, which must not count) and on all ranks; the latter is
        ``None`` if the loader is not divided.
        """
        return self._last

    # --- the world ----------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self.launcher is not None:
            Replaced(self.launcher, "launch", _launch)

    def _setup_distributed(self) -> None:
        """Meet the other processes, and begin a run with them. Blocks until all are there."""
        refuse_plugin(self.precision)
        self._set_world_ranks()
        self._meet()
        if self.world_size > 1:
            Replaced(self.precision, "convert_input", self._convert_input)

    def teardown(self) -> None:
        """Remove every hook from models."""
        self._models.close()
        super().teardown()

    # --- models and optimizers ----------------------------------------------------------------------------------------

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Compare the processes, broadcast rank 0's parameters, add gradient hooks. A collective.

        Returns:
            ``module`` itself.
        """
        _parts.allow_gradients_of_inputs(self.package)
        if self.world_size > 1:
            self._models.add(module, {"batch_size": self._batch_size})
        return module

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Compare the optimizers of the processes, and synchronize all that they train. A collective."""
        require_same_optimizers([optimizer])
        self._models.add_optimizer(optimizer)
        return optimizer

    def backward(self, tensor: torch.Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """Like Fabric's, but weigh the loss by this rank's share of the batch. Its value does not change.

        A collective, except in ``no_backward_sync`` for all models if only one batch was drawn.
        """
        synchronizer = self._models.synchronizer
        if synchronizer is None:
            super().backward(tensor, module, *args, **kwargs)
            return
        draws = self._batches.choose()
        self._weights = (draws[0].weight, draws[0].total or 0.0) if draws else (1.0, float(self.world_size))
        self._backwards += 1
        samples = sum(draw.share.local for draw in draws)
        self._losses.look(tensor, self._weights[0], samples or not draws, f"backward {self._backwards}")
        is_alone = self._models.are_all(set(self._blocked))
        if draws and not is_alone and (self._weight, self._reduction, self._batch_size) == (None, "mean", "global"):
            self._checks.look(tensor, samples, self._models.whole)
        with (
            synchronizer.no_sync() if is_alone else nullcontext(),
            weighed_backward(synchronizer, tensor, *self._weights),
        ):
            super().backward(tensor, module, *args, **kwargs)
        self._models.note_backward(samples, is_alone)

    @contextmanager
    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> Iterator[None]:
        """Accumulate gradients on this rank inside, if such contexts are open for all models.

        The next backward outside synchronizes them. If they are open for some models only, the gradients are
        synchronized nevertheless, with the same result.
        """
        with ExitStack() as stack:
            if enabled:
                self._blocked.append(id(module))
                stack.callback(self._blocked.remove, id(module))
            yield

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Like Fabric's, but LBFGS, which decides by the loss, gets that of the whole batch."""
        closure = kwargs.get("closure")
        if self._models.synchronizer is not None and closure is not None and isinstance(optimizer, torch.optim.LBFGS):
            kwargs["closure"] = functools.partial(joint_loss, closure, lambda: self._weights)
        self._models.note_step()
        return super().optimizer_step(optimizer, **kwargs)

    # --- loaders ------------------------------------------------------------------------------------------------------

    @property
    def distributed_sampler_kwargs(self) -> None:
        """``None``: no ``DistributedSampler``. Fabric reads this unless ``use_distributed_sampler=False``."""
        self._divides_next = True

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a loader that yields this rank's part of ``dataloader``. A collective."""
        divides = self._divides_next and (self.world_size > 1 or self.randomness == "by_sample")
        self._divides_next = False
        if divides:
            self.warn_of_reader(dataloader)
        if divides and isinstance(getattr(dataloader, "dataset", None), IterableDataset):
            self._seed_workers_alike(dataloader)
        return WatchedLoader(dataloader, divides, self)

    def divide(self, loader: Any, at_least: int) -> Any:
        """Return this rank's part of a loader, with at least so many samples of a batch, or none. A collective."""
        return shard(loader, self._batch_size, name_of(loader), at_least, is_resumable=self.world_size == 1)

    def samples_needed(self, loader: Any) -> int:
        """Return the least number of samples in a part. It depends on the models, and whether they train. Local."""
        models = self._models.whole()
        trains = any(layer.training for layer in models.modules() if isinstance(layer, BatchNorm))
        if self._batch_size != "global" or not trains:
            return 1
        return samples_needed(models, getattr(loader, "batch_size", None), self.world_size)

    def draws(self) -> WholeDraws:
        """Return what gives the bodies of loops over a divided loader their random numbers. Local."""
        return WholeDraws(self._models.whole(), by_rank=self.randomness == "by_process")

    @contextmanager
    def running_pass(self, draws: WholeDraws | None, skipped: SkippedParts) -> Iterator[Pass]:
        """Surround a pass over a loader. A collective if the loader is divided.

        Before a pass, and after one that was completed, buffers are merged, and all ranks get rank 0's random state.

        Args:
            draws: ``None``: the loader is not divided.
            skipped: Is told of the loader's batches.
        """
        running = Pass(skipped, is_computed=self._models.synchronizer is None)
        if draws is not None:
            self._models.merge_buffers()
            for metric in metrics_of_program():
                self._synced([metric])
            self._random.begin_pass(running)
        try:
            yield running
        except GeneratorExit:  # a break, or a return
            running.is_cut = True
            if not self._is_exiting():
                self._random.cut_pass(running)
            raise
        finally:
            self._random.end(running)
            self._batches.leave(running)
        if draws is not None:
            self._models.merge_buffers()
            self._random.end_pass(running, draws)
            self._models.require_equal()

    @contextmanager
    def computing(self, running: Pass, batch: Any, share: Share, draws: WholeDraws | None) -> Iterator[None]:
        """Note a batch drawn from a loader. Afterwards remove the traces of a padding batch. Local."""
        self._last, self._fraction, models = share, share.fraction, self._models.whole()
        undo = ExitStack()
        if not share.local:
            undo.callback(remember_padding(models, self._synced(metrics_of_program())))
            undo.callback(remember_lists(models))
        if self.world_size > 1 and torch.is_grad_enabled():
            if self._weight_of is None:
                self._weight_of = weight_function(self._weight, models)
            weights = weigh(batch, share, self._weight_of, self._reduction)
            self._batches.take(running, Draw(share, *weights, storages_of(batch)))
        if draws is not None:
            self._random.begin(running, draws, share)
        try:
            yield
        finally:
            self._random.end(running)
            self._fraction = None
            undo.close()

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Like Fabric's, with the running statistics of all ranks; rank 0 writes. A collective."""
        self._models.merge_buffers()
        super().save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Like Fabric's; all processes must load the same checkpoint. A collective, unless ``state`` is one object."""
        remainder: dict[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)
        if self.world_size > 1 and (state is None or isinstance(state, dict)):
            loaded = {name: _plain(value) for name, value in (state or {}).items()}
            require_same_checkpoint(describe_checkpoint([loaded, remainder]), str(path))
        return remainder

    # --- what users ask -----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean or the sum over the ranks, or the result of another ``ReduceOp``. A collective.

        The mean of integers is exact: that of 3 and 4 is 3.5. Shapes must be equal on all ranks. All ranks count
        equally, however many samples they have. The result is also written into ``tensor``, if that has the same dtype
        and needs no gradient. A value that is not a tensor is returned unchanged.
        """
        if not isinstance(tensor, torch.Tensor) or self._is_alone():
            return tensor
        reduced = reduce(tensor, reduce_op, group)
        if reduced.dtype == tensor.dtype and not tensor.requires_grad:
            tensor.copy_(reduced)
        return reduced

    # --- inside -------------------------------------------------------------------------------------------------------

    def _convert_input(self, convert: Callable[[Any], Any], inputs: Any) -> Any:
        """Note that a model begins its forward with these inputs."""
        if torch.is_grad_enabled():
            self._batches.compute(inputs)
        return convert(inputs)

    def _synced(self, metrics: list[Metric]) -> SyncedMetrics:
        """Let metrics merge their states by this package's messages from now on."""
        return SyncedMetrics(metrics, lambda: False, lambda: self._fraction, Replacements())

    def _seed_workers_alike(self, loader: Any) -> None:
        """Seed the workers equally on all ranks, which load the same batches and divide them afterwards."""
        chosen = loader.worker_init_fn
        if isinstance(chosen, functools.partial) and chosen.keywords.get("rank") == self.global_rank:  # Fabric's
            loader.worker_init_fn = None
            _parts.seed_workers(self.package, loader, 0)


def _plain(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _launch(launch: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return launch(functools.partial(_reporting, function), *args, **kwargs)


def _reporting(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function``; if it fails, tell the other processes why. A forked process has no other way to do so."""
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        if torch.distributed.is_initialized():
            report_failure(error)
        raise
