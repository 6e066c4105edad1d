"""The strategy: Lightning's ``DDPStrategy`` without DDP. Lightning calls its methods; this package synchronizes."""

from __future__ import annotations

import functools
import inspect
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from ddp_callbacks.batch_norm.layers import samples_needed
from ddp_callbacks.checkpoints.recovery import Recovery, is_wanted
from ddp_callbacks.comm.agreement import VERSIONS, module_settings, require_agreement
from ddp_callbacks.comm.collectives import all_gather_object, broadcast_object
from ddp_callbacks.comm.held import Held, trained_by
from ddp_callbacks.data.bad_batches import SkipBatch, check_skip_batch
from ddp_callbacks.data.shares import BatchSize
from ddp_callbacks.errors import ConfigurationError, Preempted, say
from ddp_callbacks.gradients import GradientSynchronizer
from ddp_callbacks.gradients.bucket_sums import EngineOptions
from ddp_callbacks.gradients.comm_hooks import CommHook
from ddp_callbacks.gradients.compression import Compress
from ddp_callbacks.gradients.verification import Verify, check_verify, is_to_verify
from ddp_callbacks.lightning import _logged, _parts, loggers
from ddp_callbacks.lightning.batches import (
    Batches,
    Reduction,
    Weight,
    give_loaders_back,
    shard,
    show_whole_loaders,
    weight_function,
)
from ddp_callbacks.lightning.checkpoints import follow_rank_zero, load_on_all
from ddp_callbacks.lightning.keep_going import RecoveringLauncher
from ddp_callbacks.lightning.local_steps import LocalSteps
from ddp_callbacks.lightning.loggers import Place
from ddp_callbacks.lightning.logs import JointResults
from ddp_callbacks.lightning.run import Run
from ddp_callbacks.lightning.skipping import Skipping
from ddp_callbacks.lightning.steps import StepsMixin
from ddp_callbacks.lightning.strategy_processes import (
    SAME_EVERYWHERE,
    ProcessesMixin,
    reduce,
    refuse_plugin,
    require_same_optimizers,
)
from ddp_callbacks.lightning.synced_metrics import samples_of_metrics
from ddp_callbacks.local_sgd import Sync, check_sync
from ddp_callbacks.process_group import DEFAULT_TIMEOUT
from ddp_callbacks.process_group.failures import report_failure
from ddp_callbacks.process_group.presence import alone_in
from ddp_callbacks.randomness.option import Randomness
from ddp_callbacks.replacement import Replacements
from ddp_callbacks.replicas.equality import OnDivergence, check_on_divergence
from ddp_callbacks.replicas.parameters import broadcast_parameters, describe_checkpoint, require_same_checkpoint
from ddp_callbacks.reporting.recorder import end_training

_PLACES = "the places of the logs"
_RESUMED = ("state_dict", "optimizer_states", "lr_schedulers", "loops")  # keys of a checkpoint


class CallbackStrategyMixin(StepsMixin, ProcessesMixin):
    """Mixin that makes a ``DDPStrategy`` of either package synchronize by callbacks; see ``CallbackStrategy``."""

    user = "Trainer"
    ddp_strategy: Any  # the base class
    model: Any
    chosen_by: Any = None  # the callback that has made the strategy
    results_class: Callable[..., JointResults]
    _divides = True  # use_distributed_sampler, as the user has set it
    places: Sequence[Place] = ()  # of rank 0's logs at the last begin or end of a call, if it may begin again

    def __init__(
        self,
        batch_size: BatchSize = "global",
        *,
        weight: Literal["cross_entropy"] | Weight | None = None,  # this first, or LightningCLI imports the word
        reduction: Reduction = "mean",
        randomness: Randomness = "global",
        sync: Sync = "every_step",
        verify: Verify | None = "warn",
        skip_batch: SkipBatch | None = None,
        on_divergence: OnDivergence = "raise",
        bucket_cap_mb: float = 25.0,
        comm_hook: CommHook | None = None,
        comm_state: Any = None,
        compress: Compress = None,
        process_group_backend: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] | None = None,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        check_sync(sync, reduction, comm_hook=comm_hook)
        check_verify(verify, sync)
        check_skip_batch(skip_batch, sync)
        check_on_divergence(on_divergence)
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
            precision_plugin=precision_plugin,
        )
        self._sync, self._skip_batch, self.on_divergence = sync, skip_batch, on_divergence
        self._verify = verify if is_to_verify(verify, sync, weight, reduction, batch_size) else None
        evaluations = {"validation_step", "test_step"}
        steps = evaluations if self._verify is not None else evaluations | {"training_step"}
        self.compares = frozenset() if verify is None else frozenset(steps)
        self.operations = {}
        self.recovery = Recovery() if is_wanted() else None
        self._met = Replacements()  # from joining the processes until teardown
        self._exit = Replacements()  # during a run

    # --- the world ----------------------------------------------------------------------------------------------------

    @property
    def _layer_sync(self) -> Any:
        """The user's own ``LayerSync``, which Lightning calls; this class itself implements ``sync_batchnorm=True``."""
        return self._foreign_layer_sync

    @_layer_sync.setter
    def _layer_sync(self, chosen: Any) -> None:
        self._syncs_batch_norm = type(chosen).__name__ == "TorchSyncBatchNorm"
        self._foreign_layer_sync = None if self._syncs_batch_norm else chosen

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The arguments for a ``DistributedSampler`` that the user makes."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def connect(self, model: Any) -> None:
        """Begin a run: from now on divide loaders, also those that a hook requests before :meth:`setup`."""
        super().connect(model)
        self._reader = None
        if self._trainer is not model.trainer:
            self._trainer, connector = model.trainer, _parts.connector(model.trainer, "accelerator")
            self._divides = connector.use_distributed_sampler
            connector.use_distributed_sampler = False  # the loaders are divided in process_dataloader

    def setup_distributed(self) -> None:
        """Meet the other processes, and begin a run with them. Blocks until all are there."""
        self.set_world_ranks()
        self._meet()
        self.set_world_ranks()  # if a process was lost, the others have new ranks
        self._met.close()
        if self.world_size > 1:
            follow_rank_zero(self._trainer, self._met)
            self._met.replace_once(_parts.connector(self._trainer, "data"), _parts.PREPARE_DATA, _prepare_data)
        self.begin_resuming(self._trainer)
        if self.recovery is not None:
            self.agree_on_logs()

    def agree_on_logs(self) -> None:
        """Log to where the call has logged so far, and join it as before: rank 0 may be a new process. A collective."""
        of_ranks = all_gather_object([list(self.places), self.operations], _PLACES)
        known, operations = (next(filter(None, each), None) for each in zip(*of_ranks, strict=True))
        self.operations = operations or {}
        if known is None:
            self.note_places()
        elif not self.places:
            self.follow_places(known)

    def follow_places(self, places: Sequence[Place]) -> None:
        """Log to these places, which rank 0 had. Local."""
        self.places = places
        loggers.follow(self._trainer.loggers, places)
        if self.recovery is not None and self.recovery.copy is None:  # which knows later places
            loggers.go_on(self._trainer.loggers, places)
            loggers.cut_back(self._trainer.loggers, places)

    def note_places(self) -> None:
        """Note the places of rank 0's logs, which another rank may continue. A collective."""
        self.places = broadcast_object(loggers.places_of(self._trainer.loggers), _PLACES)

    # --- a run of the Trainer -----------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Begin a run: compare the processes, broadcast rank 0's parameters, add gradient hooks. A collective."""
        refuse_plugin(self.precision_plugin)
        check_sync(self._sync, sync_batchnorm=self._syncs_batch_norm)
        if trainer.state.fn == "fit" and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        super(self.ddp_strategy, self).setup(trainer)
        if self.resume is not None:
            self.resume.note_start()

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self.recovery is not None and self.launcher is None:
            self._launcher: Any = RecoveringLauncher(self.recovery)

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        self._close()
        if self.world_size > 1 or self.resume is not None:
            _refuse_steps_that_draw(self.lightning_module)
        if self.world_size > 1:
            settings = {"batch_size": self._batch_size, "randomness": self.randomness, "skip_batch": self._skip_batch}
            _require_same_run(self._trainer, model, settings | {"on_divergence": self.on_divergence})
        held = Held(model, trained=self._trained_now)
        if self._trainer.state.fn == "fit":
            if self._sync == "every_step":
                self._synchronizer = GradientSynchronizer(held, **vars(self._engine), compare_replicas=False)
                self._exit.callback(self._synchronizer.close)
            else:
                self._local = LocalSteps(self._trainer, held, self._sync, self._engine, self._exit)
        if self._batch_size == "global" and (self.world_size > 1 or self._divides_alone):
            show_whole_loaders(self._trainer, self._exit)
        if self.world_size == 1:
            _logged.silence_advice(self.package, self._exit)
        else:
            broadcast_parameters(held)
            weight = weight_function(self._weight, model) if self._trainer.state.fn != "predict" else None
            batches = Batches(weight, self._reduction, sums_weights=self._local is None)
            self._run = Run(self._trainer, held, batches, self._local, self._synchronizer, self._verify, self._exit)
            if self._syncs_batch_norm and not self._trainer.predicting:  # in predictions, a rank has whole batches
                self._run.synchronize_batch_norm()
        if self._skip_batch is not None and self._trainer.state.fn == "fit":
            self._skipping = Skipping(self._trainer, self._skip_batch, self._run, self._exit)
        return model

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the module's optimizers, and compare those of the processes. A collective."""
        super().setup_optimizers(trainer)
        if self._skipping is not None:
            self._skipping.check(self.optimizers)
        require_same_optimizers(self.optimizers)
        self._of_callbacks = self._of_callbacks or []  # a hook may call this once more

    def teardown(self) -> None:
        """End a run: remove hooks, and restore Lightning's objects, the user's loaders and the module's layers."""
        end_training()
        if self._run is not None or self._divides_alone:
            give_loaders_back(self._trainer)
        self._close()
        self.end_resuming()
        self._met.close()
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other processes why this one fails; they raise ``PeerError`` within about two seconds.

        After SIGTERM, Lightning ends the process with code 0, as if it had trained to the end: let it end with 143.
        """
        if isinstance(exception, SystemExit) and exception.code is None and self._trainer.received_sigterm:
            exception.code = 128 + signal.SIGTERM
            say(f"the training ends at step {self._trainer.global_step}, before its end: a process got SIGTERM")
        if dist.is_initialized():
            report_failure(exception)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Like Lightning's, but rank 0 reads the file for processes that lack it. A collective.

        Raises:
            MismatchError: The processes' files have different content.
        """
        load = functools.partial(super().load_checkpoint, checkpoint_path, weights_only)
        is_alone = self._is_alone()
        checkpoint: dict[str, Any] = load() if is_alone else load_on_all(load, checkpoint_path, weights_only)
        if not is_alone and isinstance(checkpoint, dict):
            counters = {name: checkpoint[name] for name in ("epoch", "global_step") if name in checkpoint}
            state = [checkpoint.get(name) for name in _RESUMED]
            require_same_checkpoint(describe_checkpoint(state, **counters), str(checkpoint_path))
        return checkpoint

    def process_dataloader(self, dataloader: object) -> object:
        """Return this rank's part of a loader. A collective. Outside of a run, return the loader itself."""
        if self._trainer is None or self._trainer.state.stage is None:
            return dataloader
        name, needed = str(self._trainer.state.stage.dataloader_prefix), 1
        if not self._divides:
            return dataloader if self.resume is None else self.resume.take_undivided(name, dataloader)
        if self.world_size == 1 and not self._divides_alone:
            return dataloader
        # If all ranks load the same batches and divide them afterwards, their workers must draw alike.
        loads_all = isinstance(getattr(dataloader, "dataset", None), IterableDataset)
        _parts.seed_workers(self.package, dataloader, 0 if loads_all else self.global_rank)
        if name == "train" and self._batch_size == "global" and not self._syncs_batch_norm:
            needed = samples_needed(self.lightning_module, getattr(dataloader, "batch_size", None), self.world_size)
        if self._trainer.state.fn == "fit":  # the first loader may be that of the sanity check
            self.warn_of_reader(dataloader)
        needed = max(needed, samples_of_metrics([self.lightning_module, *self._trainer.callbacks]))
        sharded = shard(dataloader, self._batch_size, name, needed, is_resumable=self._divides_alone)
        if self.resume is not None:
            self.resume.take_loader(name, sharded)
        return sharded

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle the settings, without the objects of a run."""
        state: dict[str, Any] = super().__getstate__()
        ended = dict.fromkeys(("_synchronizer", "_local", "_run", "_skipping", "resume"))
        return state | ended | {"_met": Replacements(), "_exit": Replacements()}

    # --- what Lightning and its users ask -----------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean or the sum over the ranks, or the result of another ``ReduceOp``. A collective.

        The mean of integers is exact: that of 3 and 4 is 3.5. Shapes must be equal on all ranks. The result is a new
        tensor. A value that is not a tensor is returned unchanged.
        """
        if not isinstance(tensor, torch.Tensor) or self._is_alone():
            return tensor
        return reduce(tensor, reduce_op, group)

    # --- inside -------------------------------------------------------------------------------------------------------

    @property
    def _divides_alone(self) -> bool:
        """Whether a single process, too, iterates over parts of loaders: to resume, or to seed each sample."""
        return self.resume is not None or (self.world_size == 1 and self.randomness == "by_sample")

    def _is_alone(self) -> bool:
        """Whether this rank must communicate with no other: there is no process group, or this rank has failed.

        On an exception, callbacks that save a checkpoint run before Lightning calls :meth:`on_exception`.
        """
        if super()._is_alone():
            return True
        failure = sys.exc_info()[1]
        is_interrupted = self._trainer is not None and self._trainer.state.status == "interrupted"
        if failure is None or isinstance(failure, Preempted) or not is_interrupted:
            return False
        report_failure(failure)
        return True

    def _trained_now(self) -> list[torch.nn.Parameter]:
        return [] if self._of_callbacks is None else trained_by([*self.optimizers, *self._of_callbacks])

    def _close(self) -> None:
        self._exit.close()
        self._synchronizer = self._skipping = self._run = self._local = None
        self._of_callbacks = None


def _prepare_data(prepare: Callable[[], None]) -> None:
    """Run ``prepare_data``, in which collectives raise: the other processes wait in Lightning's barrier."""
    with alone_in("prepare_data"):
        prepare()


def _refuse_steps_that_draw(module: Any) -> None:
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        step = getattr(module, name)
        if step is not None and "dataloader_iter" in inspect.signature(step).parameters:
            raise ConfigurationError(
                f"{type(module).__name__}.{name}(dataloader_iter) draws batches that only it sees, so that several "
                f"processes cannot weigh them, nor Resume tell where it was. Write {name}(batch, batch_idx)."
            )


def _require_same_run(trainer: Any, model: torch.nn.Module, of_strategy: dict[str, Any]) -> None:
    names = ("accumulate_grad_batches", "max_epochs", "max_steps", "log_every_n_steps")
    of_trainer = {"Trainer": str(trainer.state.fn)} | {name: getattr(trainer, name) for name in names}
    settings = module_settings(model) | VERSIONS | of_strategy | of_trainer
    require_agreement(settings, "the run", SAME_EVERYWHERE)
