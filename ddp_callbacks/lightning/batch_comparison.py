"""Compute a batch of one process by Lightning's module as well, to compare gradients and logged values."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ddp_callbacks.comm.collectives import all_gather_object
from ddp_callbacks.data.sample_seeds import generators_of
from ddp_callbacks.data.sharding import ShardedLoader
from ddp_callbacks.data.shares import WholeBatch, common_size
from ddp_callbacks.errors import ConfigurationError, say
from ddp_callbacks.gradients.first_batch import PURPOSE, Computation, FirstBatch
from ddp_callbacks.gradients.verification import OF_RANK_ZERO, Comparisons, check_logged
from ddp_callbacks.lightning import _logged, _parts
from ddp_callbacks.lightning.batches import Batches
from ddp_callbacks.lightning.synced_metrics import metrics_of
from ddp_callbacks.randomness import WholeDraws

_OPERATIONS = {"mean", "sum", "max", "min"}
_OF_METRICS = {"MaxMetric": "max", "MinMetric": "min", "SumMetric": "sum", "CatMetric": "length"}


def verify_first_batch(
    comparisons: Comparisons,
    trainer: Any,
    loaders: Sequence[Any],
    batches: Batches,
    draws: WholeDraws,
    arguments: Sequence[Any],
) -> bool:
    """Compare the gradient of the current batch with that of one process. A collective.

    This calls ``training_step`` two or three times, on copies of the module that log nothing. With manual optimization
    it stops there at the first ``manual_backward``, whose gradient is compared.

    Args:
        comparisons: Those of this fit, of which one is due.
        trainer: The Trainer, before the first ``training_step`` of an epoch.
        loaders: The loaders that the batch comes from.
        batches: Weighs this rank's part of the batch.
        draws: Gives the batches their random numbers.
        arguments: The arguments of ``training_step`` after the batch.

    Returns:
        Whether the whole batch has a loss, as far as this rank knows.

    Raises:
        MismatchError, ConfigurationError: See :func:`ddp_callbacks.verify_gradient`.
        ConfigurationError: The loss of the whole batch is not available.
    """
    module, silent, logged = trainer.lightning_module, _silent(trainer), _Logged.before(trainer, "training_step")
    has_loss = False

    def load() -> FirstBatch:
        try:
            return _load(trainer, loaders, batches)
        except _NotComparedError as error:
            if comparisons.verify == "warn" and trainer.is_global_zero:
                say(str(error))
            raise

    def loss_of(copies: Sequence[Any], batch: Any) -> torch.Tensor:
        nonlocal has_loss
        _give_data(silent, trainer.datamodule, dict(zip(layers, copies[len(parts) :], strict=True)))
        batch = _begin(copies[0], silent, logged, batch)
        if module.automatic_optimization:
            loss = _loss(copies[0].training_step(batch, *arguments))
        else:
            loss = _first_loss(copies[0], copies[1], lambda: copies[0].training_step(batch, *arguments))
        has_loss = True  # the whole batch is the first to be computed
        return loss

    parts = [module] if module.automatic_optimization else [module, trainer.optimizers]
    layers = _layers_of_data(trainer)
    with trainer.precision_plugin.train_step_context():
        of_logs, is_whole = (logged.values.copy, logged.operations, logged.fixed), module.automatic_optimization
        own = [*parts, *layers.values()]
        computation = Computation(own, loss_of, _instead(trainer, silent), *of_logs, draws, is_whole_step=is_whole)
        comparisons.compare(computation, load)
    logged.note(trainer, "training_step")
    return has_loss


def compare_what_is_logged(
    trainer: Any, loaders: Sequence[Any], batches: Batches, draws: WholeDraws, step: str, arguments: Sequence[Any]
) -> bool:
    """Compare what ``step`` logs for the current batch, the first one, with one process; warn. A collective.

    This calls the step two or three times, on copies of the module that log nothing. Arguments as above.

    Returns:
        Whether another batch would tell nothing more.
    """
    silent, logged, layers = _silent(trainer), _Logged.before(trainer, step), _layers_of_data(trainer)

    def compute(copies: Sequence[Any], batch: Any) -> Any:
        _give_data(silent, trainer.datamodule, dict(zip(layers, copies[1:], strict=True)))
        return getattr(copies[0], step)(_begin(copies[0], silent, logged, batch), *arguments)

    precision = trainer.precision_plugin
    with precision.train_step_context() if trainer.training else precision.val_step_context():
        of_logs = logged.values.copy, logged.operations, logged.fixed
        parts = [trainer.lightning_module, *layers.values()]
        computation = Computation(parts, compute, _instead(trainer, silent), *of_logs, draws)
        is_told = check_logged(computation, lambda: _load(trainer, loaders, batches), step)
    logged.note(trainer, step)
    return is_told


@dataclass(frozen=True)
class _Logged:
    """What a step logs.

    Attributes:
        values: Those of the last call, by name.
        operations: See :class:`ddp_callbacks.gradients.first_batch.Computation`.
        fixed: See there.
    """

    operations: dict[str, list[str]]
    values: dict[str, float] = field(default_factory=dict)
    fixed: set[str] = field(default_factory=set)

    @classmethod
    def before(cls, trainer: Any, step: str) -> _Logged:
        """Begin with what earlier comparisons have told: a later batch may not tell, such as one without a count."""
        known = {key.partition(".")[::2]: operation for key, operation in trainer.strategy.operations.items()}
        return cls({name: [operation] for (of, name), operation in known.items() if of == step})

    def note(self, trainer: Any, step: str) -> None:
        """Note what this comparison has told."""
        told = {f"{step}.{name}": ways[0] for name, ways in self.operations.items() if len(ways) == 1}
        trainer.strategy.operations.update(told)

    def add(self, name: str, value: Any, operation: str, is_of_samples: bool = True) -> None:
        """Add a number; NaN for one that is not to be compared."""
        self.operations[name] = [*dict.fromkeys((*self.operations.get(name, ()), operation))]
        if isinstance(value, int | float | torch.Tensor):
            number = float(value.detach() if isinstance(value, torch.Tensor) else value)
            self.values[name] = number if is_of_samples else math.nan

    def add_fixed(self, name: str, value: Any, operation: str) -> None:
        """Add a number that is joined in this way alone."""
        self.fixed.add(name)
        self.add(name, value, operation)


def _load(trainer: Any, loaders: Sequence[Any], batches: Batches) -> FirstBatch:
    """Return the batch, before the hooks that transfer it."""
    _require_hooks_without_state(trainer)
    first = _first_batch(trainer, loaders)
    whole, part = map(trainer.precision_plugin.convert_input, (first.whole, first.part))
    _note_sizes(trainer, whole, part if first.share.local else None, first.share.total)
    weigh = functools.partial(batches.weigh, part, first.share)
    return FirstBatch(whole, part, weigh, first.share.rows, functools.partial(weigh, "mean"), first.share.local)


class _NotComparedError(ConfigurationError):
    """Why the batches of a program cannot be compared, which is usual enough to be said."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the first batch is not compared with one process: {why}")


def _instead(trainer: Any, silent: Any) -> dict[int, Any]:
    """Return what copies of the module have in the place of the Trainer and its objects, by their ids."""
    instead = {id(logger): other for logger, other in zip(trainer.loggers, silent.loggers, strict=True)}
    return instead | {id(trainer): silent, id(trainer.datamodule): trainer.datamodule}


def _first_batch(trainer: Any, loaders: Sequence[Any]) -> WholeBatch:
    if not all(isinstance(loader, ShardedLoader) and loader.iterator is not None for loader in loaders):
        raise ConfigurationError(
            'verify="first_batch" needs loaders that are divided among the processes, to get their whole batch; got '
            f"{[type(loader).__name__ for loader in loaders]}. Leave out the DistributedSampler, or leave out verify."
        )
    found: list[WholeBatch] = [loader.iterator.whole_batch() for loader in loaders]
    first, *others = found
    if not others:
        return first
    if any(each.share != first.share for each in others):
        raise _NotComparedError("it comes from several loaders with batches of different sizes")
    join = functools.partial(_parts.combined_batch, _parts.active_loop(trainer))
    return WholeBatch(
        join([each.whole for each in (first, *others)]), join([each.part for each in (first, *others)]), first.share
    )


def _note_sizes(trainer: Any, whole: Any, part: Any, samples: int | None) -> None:
    """Note if Lightning takes sizes for the parts that don't add up to that of the whole batch. Then a collective."""
    package = trainer.strategy.package
    size = _parts.size_taken(package, whole)
    if size not in (None, samples):
        parts = all_gather_object(_parts.size_taken(package, part) or 0, PURPOSE)
        if sum(parts) != size:
            found = f"{size} for its first batch, which has {samples}, and {', '.join(map(str, parts))} for the parts"
            _logged.results_of(trainer).odd_sizes = found


def _require_hooks_without_state(trainer: Any) -> None:
    """Raise if hooks of the datamodule may draw, or take, what no copy of it can draw or take instead."""
    hooks = [name for name, owner in _parts.own_transfer_hooks(trainer).items() if owner is trainer.datamodule]
    held = [value for name, value in vars(trainer.datamodule).items() if name != "trainer"] if hooks else []
    used = [value for value in held if not isinstance(value, Dataset | DataLoader)]
    if generators_of(used) or any(isinstance(value, Iterator) for value in used):
        raise _NotComparedError(
            f"{hooks[0]} of the datamodule may use a generator or an iterator of its own. If the loss is no mean over "
            "the samples, give weight="
        )


def _layers_of_data(trainer: Any) -> dict[str, torch.nn.Module]:
    """Return the modules of the datamodule, such as augmentations, if its hooks transfer batches."""
    if trainer.datamodule not in _parts.own_transfer_hooks(trainer).values():
        return {}
    return {name: value for name, value in vars(trainer.datamodule).items() if isinstance(value, torch.nn.Module)}


def _give_data(silent: Any, datamodule: Any, layers: Mapping[str, Any]) -> None:
    """Give a copy of the Trainer one of its datamodule, with copies of modules; the data is shared."""
    if datamodule is not None:
        silent.datamodule, found = object.__new__(type(datamodule)), vars(datamodule)
        containers = {name: value.copy() for name, value in found.items() if type(value) in (dict, list, set)}
        vars(silent.datamodule).update({**found, **containers, **layers, "trainer": silent})


def _transfer(copied: Any, trainer: Any, batch: Any) -> Any:
    """Move a batch to the device, as Lightning's loop does, with the hooks of a copy of the module."""
    hooks = _parts.own_transfer_hooks(trainer)
    for name in _parts.TRANSFER_HOOKS:
        owner = trainer.datamodule if hooks.get(name, copied) is trainer.datamodule else copied
        device = (trainer.strategy.root_device,) * (name == "transfer_batch_to_device")
        batch = getattr(owner, name)(batch, *device, 0)
    return batch


def _loss(output: Any) -> torch.Tensor:
    loss = _parts.loss_in(output)
    if not isinstance(loss, torch.Tensor):
        raise ConfigurationError(
            f'verify="first_batch" needs a loss from training_step, got {type(loss).__name__}. Leave verify out.'
        )
    return loss


class _FirstBackward(BaseException):
    """Ends a step, past what it catches, with the loss of its first backward."""


class _Idle:
    """Stands for a copy of an optimizer, or for a scheduler: has its values, and changes nothing."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def step(self, closure: Any = None, *_: Any, **__: Any) -> None:
        if callable(closure):
            closure()

    def zero_grad(self, *_: Any, **__: Any) -> None:
        pass

    def toggle_model(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        return nullcontext()


def _first_loss(copied: Any, optimizers: Sequence[Any], step: Callable[[], Any]) -> torch.Tensor:
    """Return the loss of the first ``manual_backward`` of a step of the copy of a module."""

    def end(loss: torch.Tensor, *_: Any, **__: Any) -> None:
        raise _FirstBackward(loss)

    schedulers = [_Idle(config.scheduler) for config in copied.trainer.lr_scheduler_configs]
    copied.optimizers, copied.lr_schedulers = _giving(map(_Idle, optimizers)), _giving(schedulers)
    copied.manual_backward, copied.toggle_optimizer, copied.untoggle_optimizer = end, _ignore, _ignore
    try:
        step()
    except _FirstBackward as reached:
        return _loss(*reached.args)
    raise ConfigurationError(
        f'verify="first_batch" compares the first manual_backward, but {type(copied).__name__} calls none in its first '
        "batch. Call it instead of loss.backward(), or leave out verify."
    )


def _giving(each: Iterable[Any]) -> Callable[..., Any]:
    """Return a method that gives one object, or a list of several, as a module's do; ``None`` for none."""
    found = list(each)
    return lambda *_, **__: found if len(found) > 1 else next(iter(found), None)


def _silent(trainer: Any) -> Any:
    """Return a shallow copy of a Trainer, with loggers and a profiler that do nothing."""
    silent, package = copy.copy(trainer), trainer.strategy.package
    silent.loggers = [_parts.silent_logger(package) for _ in trainer.loggers]
    silent.profiler = _parts.silent_profiler(package)
    return silent


def _begin(copied: Any, silent: Any, logged: _Logged, batch: Any) -> Any:
    """Give the copy of a module its Trainer, and return a batch for its step.

    It logs to ``logged``, as do numbers that it gives to a logger itself, or to a metric that keeps its extremes.
    Torchmetrics do not communicate. What is of other numbers than the samples, or of one rank, is not compared.
    """
    samples = common_size(batch)  # None if unknown

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        is_of_samples = not args and "rank_zero_only" not in options and options.get("batch_size") in (None, samples)
        reduction = options.get("reduce_fx", "mean")
        operation = getattr(reduction, "__name__", reduction)
        logged.add(name, value, operation if operation in _OPERATIONS else "mean", is_of_samples)

    def log_dict(values: Mapping[str, Any], *args: Any, **options: Any) -> None:
        for name, value in values.items():
            log(name, value, *args, **options)

    def write(name: str, value: Any, *_: Any, **__: Any) -> None:
        logged.add_fixed(f"self.logger's {name}", value, OF_RANK_ZERO)

    def write_all(metrics: Any, *_: Any, **__: Any) -> None:
        for name, value in metrics.items() if isinstance(metrics, Mapping) else ():
            write(name, value)

    for logger in silent.loggers:
        logger.log_metrics = logger.experiment.log = write_all
        logger.experiment.add_scalar = write
    logged.values.clear()
    copied.trainer, copied.log, copied.log_dict = silent, log, log_dict
    _watch_metrics(copied, logged)
    return _transfer(copied, silent, batch)


def _watch_metrics(copied: Any, logged: _Logged) -> None:
    for metric in metrics_of([copied]):
        metric.distributed_available_fn = _ignore  # no process group
    for name, module in copied.named_modules():
        if (kind := type(module).__name__) in _OF_METRICS:
            module.update = functools.partial(_update, module.update, logged, f"{kind} {name}", _OF_METRICS[kind])


def _update(update: Callable[..., None], logged: _Logged, name: str, operation: str, value: Any, *args: Any) -> None:
    """Update a metric, and note what it gets if that is a single number: the parts' may not be those of the batch."""
    update(value, *args)
    if getattr(value, "numel", lambda: 1)() == 1:
        logged.add_fixed(name, *((1.0, "sum") if operation == "length" else (value, operation)))


def _ignore(*_: Any, **__: Any) -> None:
    pass
