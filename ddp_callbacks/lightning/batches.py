"""Track this rank's share of each batch, while Lightning's loops draw, prefetch and combine batches.

This rank's part (:mod:`ddp_callbacks.data.sharding`) replaces each loader of a Trainer. A batch can come from several
loaders at once (``CombinedLoader``); then it has a share of each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from ddp_callbacks.comm.agreement import require_agreement
from ddp_callbacks.comm.collectives import all_gather_object, all_reduce
from ddp_callbacks.data.nested import length_of
from ddp_callbacks.data.resuming import resumable_loader
from ddp_callbacks.data.sharding import ShardedLoader, deal_out, shard_loader, share_of_own
from ddp_callbacks.data.shares import BatchSize, Share, loss_weight
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.gradients import GradientSynchronizer
from ddp_callbacks.gradients.cross_entropy import CrossEntropyWeight
from ddp_callbacks.lightning import _parts
from ddp_callbacks.process_group import get_world_size
from ddp_callbacks.randomness import Rows
from ddp_callbacks.replacement import Replacements

Weight = Callable[[Any], float | torch.Tensor]

Reduction = Literal["mean", "sum"]

CROSS_ENTROPY: Literal["cross_entropy"] = "cross_entropy"


def check_weight(weight: Any, reduction: str) -> None:
    """Raise :class:`ConfigurationError` unless ``weight`` and ``reduction`` are valid, and go together."""
    if reduction not in ("mean", "sum"):
        raise ConfigurationError(f'reduction must be "mean" or "sum", got {reduction!r}.')
    if weight is not None and reduction == "sum":
        raise ConfigurationError(
            'weight= defines what a loss is the mean over, but reduction="sum" makes it a sum. Use one of the two.'
        )
    if weight is not None and weight != CROSS_ENTROPY and not callable(weight):
        raise ConfigurationError(f'weight must be a function of a batch, or "{CROSS_ENTROPY}", got {weight!r}.')


def weight_function(weight: Literal["cross_entropy"] | Weight | None, module: torch.nn.Module) -> Weight | None:
    """Return the function that ``weight`` stands for, in a run of ``module``."""
    return CrossEntropyWeight.of(module) if isinstance(weight, str) else weight


def shard(loader: Any, batch_size: BatchSize, name: str, at_least: int = 1, *, is_resumable: bool = False) -> Any:
    """Return this rank's part of a loader; for predictions, whole batches in turn. A collective.

    Args:
        name: The loader's purpose, such as ``"train"`` or ``"predict"``.
        at_least: See :func:`ddp_callbacks.shard_loader`.
        is_resumable: Whether a later run may resume in the middle of a pass, or a single process seeds each sample.
    """
    if name == "predict" and get_world_size() > 1:
        sharded = deal_out(loader)
    else:
        make = resumable_loader if is_resumable else shard_loader
        sharded = make(loader, batch_size, at_least=at_least)
    if sharded is not loader:
        remedy = "Give every process the same data, or divide them yourself with a DistributedSampler."
        length = length_of(loader)
        require_agreement({"batches": "unknown" if length is None else str(length)}, f"the {name} dataloader", remedy)
    return sharded


def weigh(batch: Any, share: Share, weight_of: Weight | None, reduction: Reduction) -> tuple[float, float | None]:
    """Return the weight of the loss of this rank's part, and the total; ``None`` if unknown here. Local."""
    if weight_of is None or reduction == "sum":
        return loss_weight(share, reduction)
    return loss_weight(share, reduction, weight_of(batch) if share.local else 0.0)


@contextmanager
def weighed_backward(
    synchronizer: GradientSynchronizer, loss: torch.Tensor, weight: float, total: float
) -> Iterator[None]:
    """Weigh the backward of ``loss`` inside by ``weight / total``, and synchronize its gradients.

    A collective, except in ``no_sync``. The ranks synchronize even if the loss reaches no parameter.
    """
    rounds = synchronizer.rounds
    undo = synchronizer.weigh_loss(loss, weight, total)
    try:
        yield
        if synchronizer.rounds == rounds:
            synchronizer.synchronize()
    finally:
        undo()


def joint_loss(closure: Callable[[], Any], weight_and_total: Callable[[], tuple[float, float]]) -> Any:
    """Return the loss of the whole batch, computed from those that ``closure`` returns for the parts. A collective.

    Under NCCL the host does not wait for it.

    If ``closure`` returns ``None``, so does this.
    """
    loss = closure()
    if loss is None:
        return None
    weight, total = weight_and_total()
    wide = loss.detach().double()
    part = wide * (weight / total) if weight else torch.zeros_like(wide)  # the mean over no sample is NaN
    return all_reduce(part, "the loss").to(loss.dtype)


class Batches:
    """The batches of one Trainer on this rank.

    Args:
        weight: A function of this rank's part of a batch: returns the number that the loss is the mean over (tokens
            that count, for example). ``None``: the number of samples.
        reduction: ``"sum"``: the loss is a sum over the samples.
        sums_weights: Whether the total weight of a training batch is needed.

    Attributes:
        share: This rank's share of the current batch.
        rows: The rows of the whole batch that this rank computes; ``None`` if unknown, or if the batches of several
            loaders have different ones.
        have_other_rows: Whether those of several loaders ever had.
        weight: The weight of this rank's loss of the current batch; 0 for a padding batch.
        total: The sum of the ranks' weights; ``None`` if unknown here. Training knows it if ``sums_weights``.
    """

    def __init__(self, weight: Weight | None, reduction: Reduction, sums_weights: bool) -> None:
        self._weight_of, self._reduction, self._sums_weights = weight, reduction, sums_weights
        self.share = Share(0, None)
        self.rows: Rows | None = None
        self.have_other_rows = False
        self.weight = 0.0
        self.total: float | None = None

    @property
    def is_padding(self) -> bool:
        """Whether this rank has no sample of the batch, and computes a padding batch instead."""
        return self.share.local == 0

    @property
    def sums(self) -> bool:
        """Whether losses are sums over the samples."""
        return self._reduction == "sum"

    @property
    def counts_samples(self) -> bool:
        """Whether losses are means over the samples."""
        return self._weight_of is None and not self.sums

    @property
    def weight_and_total(self) -> tuple[float, float]:
        """The weight of this rank's loss, and the total; equal weights on all ranks if the total is unknown."""
        if self._reduction == "sum":
            return float(not self.is_padding), 1.0
        return (1.0, float(get_world_size())) if self.total is None else (self.weight, self.total)

    @property
    def counts_nothing(self) -> bool:
        """Whether this rank's loss has weight 0 in a batch that counts."""
        return bool(self.total) and not self.weight

    def take(self, batch: Any, loaders: list[Any], training: bool) -> None:
        """Note the share of a batch that comes from ``loaders``. A collective in training.

        Raises:
            ConfigurationError: The loaders' batches are divided in different proportions.
        """
        shares = [share for share in map(_next_share, loaders) if share is not None]
        if shares:
            _require_alike(shares)
        share = shares[0] if shares else share_of_own(batch)
        self.share, self.total = share, None
        self.rows = share.rows if all(each.rows == share.rows for each in shares) else None
        self.have_other_rows = self.have_other_rows or self.rows is not share.rows
        self.weight = weigh(batch, share, self._weight_of, "mean")[0]
        if self._weight_of is None and share.total is not None:
            self.total = float(share.total)
        elif training and self._sums_weights:
            self.total = float(sum(all_gather_object(self.weight, "the weight of the batch")))

    def next_rows(self, loaders: list[Any]) -> Rows | None:
        """Return the rows of the batch that comes from ``loaders``, before :meth:`take`. Local."""
        rows = {loader.steps[0].share.rows for loader in loaders if isinstance(loader, ShardedLoader) and loader.steps}
        return rows.pop() if len(rows) == 1 else None

    def weigh(self, batch: Any, share: Share, reduction: Reduction | None = None) -> tuple[float, float | None]:
        """Return the weight of the loss of this rank's part, and the total; ``None`` if unknown here. Local.

        Args:
            reduction: ``"mean"``: the weight of what a step logs; ``None``: that of the loss.
        """
        return weigh(batch, share, self._weight_of, reduction or self._reduction)


def require_alike_steps(trainer: Any) -> None:
    """Raise now if a later step of this pass would have batches that are divided unlike, as far as loaders tell. Local.

    Raises:
        ConfigurationError: As :meth:`Batches.take`.
    """
    combined = _parts.loader_of(_parts.active_loop(trainer))
    mode, loaders = _parts.mode_of(combined), [each for each in combined.flattened if isinstance(each, ShardedLoader)]
    passes = [(len(loader), shares[0], shares[1]) for loader in loaders if (shares := loader.passes_shares())]
    if mode == "sequential" or len(passes) < len(combined.flattened):
        return
    count = min(_most_batches(trainer), (min if mode == "min_size" else max)(each for each, _, _ in passes))
    ends = (step for length, _, _ in passes for step in range(length - 1, int(count), length))
    for step in sorted({0, *ends}):
        there = [each for each in passes if mode == "max_size_cycle" or step < each[0]]
        _require_alike([last if step % length == length - 1 else usual for length, usual, last in there])


def _most_batches(trainer: Any) -> float:
    if not trainer.training:  # also in a sanity check, whose loader is that of later validations
        return float(min(trainer.num_test_batches if trainer.testing else trainer.num_val_batches))
    return float(min(trainer.num_training_batches, trainer.max_steps if trainer.max_steps > 0 else math.inf))


def show_whole_loaders(trainer: Any, replacements: Replacements) -> None:
    """Let ``trainer.train_dataloader`` and the like be the user's loaders, as a hook's own loop needs all samples."""
    for loop in _loops_of(trainer):
        replacements.replace(loop, "setup_data", functools.partial(_set_up, loop))


def _set_up(loop: Any, set_up: Callable[[], None]) -> None:
    set_up()
    if (combined := _parts.loader_of(loop)) is not None:
        _parts.show(combined, [each.loader if isinstance(each, ShardedLoader) else each for each in combined.flattened])


def give_loaders_back(trainer: Any) -> None:
    """Put the user's loaders back into the Trainer's loops, and end the workers of the last passes."""
    for combined in map(_parts.loader_of, _loops_of(trainer)):
        if combined is not None:
            combined.flattened = [_original(loader) for loader in combined.flattened]


def _loops_of(trainer: Any) -> tuple[Any, ...]:
    fit_loop = trainer.fit_loop
    return fit_loop, fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop


def _original(loader: Any) -> Any:
    if not isinstance(loader, ShardedLoader):
        return loader
    loader.end()
    return loader.loader


def _next_share(loader: Any) -> Share | None:
    return loader.take_share() if isinstance(loader, ShardedLoader) else None


def _require_alike(shares: list[Share]) -> None:
    """Raise unless this rank has the same proportion of each loader's batch."""
    if len({share.local / share.total if share.total else None for share in shares}) > 1:
        parts = ", ".join(f"{share.local} of {share.total}" for share in shares)
        raise ConfigurationError(
            "the batches of several loaders in one step must be divided in equal proportions, as one number weighs "
            f"their loss, got {parts} samples for this process. Use batch sizes that are multiples of the number of "
            "processes, and drop_last=True. In an evaluation, give the loaders as a list: it takes one after another."
        )
