"""Which part of a batch this rank has, while Lightning's loops draw, prefetch and combine batches.

Each loader that a Trainer processes becomes this rank's part of it (:mod:`ddp_callbacks.data.sharding`). A batch can
come from several loaders at once (``CombinedLoader``); then it has a share of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from ddp_callbacks.comm.agreement import require_agreement
from ddp_callbacks.comm.scalars import ScalarExchange
from ddp_callbacks.cross_entropy import CrossEntropyWeight
from ddp_callbacks.data.nested import length_of
from ddp_callbacks.data.resuming import resumable_loader
from ddp_callbacks.data.sharding import ShardedLoader, deal_out, shard_loader
from ddp_callbacks.data.shares import BatchSize, Share, common_size
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.gradients import GradientSynchronizer
from ddp_callbacks.lightning import _parts
from ddp_callbacks.process_group import get_world_size

Weight = Callable[[Any], float | torch.Tensor]

Reduction = Literal["mean", "sum"]

CROSS_ENTROPY: Literal["cross_entropy"] = "cross_entropy"


def check_weight(weight: Any, reduction: str) -> None:
    """Raise :class:`ConfigurationError` unless they can weigh a batch."""
    if reduction not in ("mean", "sum"):
        raise ConfigurationError(f'reduction must be "mean" or "sum", got {reduction!r}.')
    if weight is not None and reduction == "sum":
        raise ConfigurationError(
            'weight= defines what a loss is the mean over, but reduction="sum" makes it a sum. Use one of the two.'
        )
    if weight is not None and weight != CROSS_ENTROPY and not callable(weight):
        raise ConfigurationError(f'weight must be a function of a batch, or "{CROSS_ENTROPY}", got {weight!r}.')


def weight_function(weight: Literal["cross_entropy"] | Weight | None, module: torch.nn.Module) -> Weight | None:
    """The function that ``weight`` stands for, in a run of ``module``."""
    return CrossEntropyWeight.of(module) if isinstance(weight, str) else weight


def shard(loader: Any, batch_size: BatchSize, name: str, at_least: int = 1, *, is_resumable: bool = False) -> Any:
    """This rank's part of a loader; for predictions its whole batches. A collective.

    Args:
        at_least: See :func:`ddp_callbacks.shard_loader`.
        is_resumable: Whether a later run may go on in the middle of a pass.
    """
    if name == "predict":
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
    """What the loss of a part counts, and that of the whole batch; ``None`` where that is not known here. Local."""
    if reduction == "sum":
        return float(share.local > 0), 1.0
    if weight_of is None:
        return float(share.local), None if share.total is None else float(share.total)
    return float(weight_of(batch)) if share.local else 0.0, None


@contextmanager
def weighed_backward(
    synchronizer: GradientSynchronizer, loss: torch.Tensor, weight: float, total: float
) -> Iterator[None]:
    """Inside, the backward of ``loss`` counts ``weight`` of ``total``, and joins the others' in any case.

    A collective, except in ``no_sync``: also where the loss reaches none of the parameters.
    """
    rounds = synchronizer.rounds
    undo = synchronizer.weigh_loss(loss, weight, total)
    try:
        yield
        if synchronizer.rounds == rounds:
            synchronizer.synchronize()
    finally:
        undo()


def joint_loss(exchange: ScalarExchange, loss: torch.Tensor, weight: float, total: float) -> torch.Tensor:
    """The loss of the whole batch, from that of each part. A collective."""
    part = float(loss.detach()) * weight / total if weight else 0.0  # the mean over nothing is not a number
    joined = sum(row[0] for row in exchange.exchange([part], "the loss"))
    return torch.tensor(joined, dtype=loss.dtype, device=loss.device)


class Batches:
    """The batches of one Trainer on this rank.

    Args:
        weight: A function of a batch, this rank's part: the number that the loss of that part is a mean over (tokens
            that count, say). ``None``: the number of samples.
        reduction: ``"sum"``: the loss is a sum over the samples.
        sums_weights: Whether the total weight of a training batch is needed.

    Attributes:
        exchange: To the other ranks.
        share: Of the batch that is being computed.
        weight: What this rank's loss of that batch counts; 0 where the batch is a padding batch.
        total: The sum of the weights over the ranks; during training it is known where it is needed.
    """

    def __init__(self, weight: Weight | None, reduction: Reduction, sums_weights: bool) -> None:
        self.exchange = ScalarExchange()
        self._weight_of, self._reduction, self._sums_weights = weight, reduction, sums_weights
        self._set(Share(0, None), 0.0, None)

    @property
    def is_padding(self) -> bool:
        """Whether this rank has no sample of the batch, and computes another in its place."""
        return self.share.local == 0

    @property
    def weight_and_total(self) -> tuple[float, float]:
        """What this rank's loss counts, of how much; all ranks alike where the total is not known."""
        if self._reduction == "sum":
            return float(not self.is_padding), 1.0
        return (1.0, float(get_world_size())) if self.total is None else (self.weight, self.total)

    def take(self, batch: Any, loaders: list[Any], training: bool, has_loss: bool = True) -> None:
        """Note the share of a batch that comes from ``loaders``. A collective in training.

        Args:
            has_loss: Whether it is weighed; those of predictions are not.

        Raises:
            ConfigurationError: The loaders' batches are divided in different proportions.
        """
        shares = [share for share in map(_next_share, loaders) if share is not None]
        if shares:
            _require_alike(shares)
            share = shares[0]
        else:
            size = common_size(batch)
            share = Share(1 if size is None else size, None)
        weight = weigh(batch, share, self._weight_of, "mean")[0] if has_loss else float(share.local)
        self._set(share, weight, self._total(weight, share, training))

    def weigh(self, batch: Any, share: Share) -> tuple[float, float | None]:
        """What the loss of a part counts, and that of the whole, ``None`` where it is not known here. Local."""
        return weigh(batch, share, self._weight_of, self._reduction)

    def _set(self, share: Share, weight: float, total: float | None) -> None:
        self.share, self.weight, self.total = share, weight, total

    def _total(self, weight: float, share: Share, training: bool) -> float | None:
        """The sum of the ranks' weights, if it is wanted. A collective in training, if the loaders do not tell it."""
        if self._weight_of is None and share.total is not None:
            return float(share.total)
        if not training or not self._sums_weights:
            return None
        return sum(row[0] for row in self.exchange.exchange([weight], "the weight of the batch"))


def give_loaders_back(loops: Iterable[Any]) -> None:
    """Let Lightning's loops have the user's loaders; the workers of the last passes have ended."""
    for combined in map(_parts.loader_of, loops):
        if combined is not None:
            combined.flattened = [_original(loader) for loader in combined.flattened]


def _original(loader: Any) -> Any:
    if not isinstance(loader, ShardedLoader):
        return loader
    loader.end()
    return loader.loader


def _next_share(loader: Any) -> Share | None:
    return loader.shares.popleft() if isinstance(loader, ShardedLoader) and loader.shares else None


def _require_alike(shares: list[Share]) -> None:
    """Raise unless this rank has the same proportion of each loader's batch."""
    if len({share.local / share.total if share.total else None for share in shares}) > 1:
        parts = ", ".join(f"{share.local} of {share.total}" for share in shares)
        raise ConfigurationError(
            "the batches of several loaders in one step must be divided in equal proportions, as one number weighs "
            f"their loss, got {parts} samples for this process. Use batch sizes that are multiples of the number of "
            "processes, and drop_last=True."
        )
