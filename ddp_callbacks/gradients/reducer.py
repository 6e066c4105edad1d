"""Synchronize gradients: decide when to send each bucket, and write the sums back as gradients.

[Note: which parameters are trained]
Buckets of frozen parameters are not sent. A program may freeze other parameters during a run, by mistake on some ranks
only; the ranks would then sum different buckets. So a backward sends the buckets that all ranks predict alike from
earlier backwards, and the metadata has a checksum of the trained parameters: if it differs, all ranks raise. Otherwise,
buckets missing from the prediction follow; buckets predicted in vain contain zeros.

The checksum includes the number of batches that a rank has drawn since the last synchronization: a rank that leaves out
the backward of a batch would otherwise add its gradient of the next batch to the others' gradients of this one. It
includes the content of whole batches, of which each rank takes its part: a stream may depend on what the rank has done.

[Note: a gradient that comes twice]
With reentrant checkpointing, a parameter's hook can fire twice in a backward, the second time after its bucket was
launched (DDP raises "marked ready only once", https://github.com/pytorch/pytorch/issues/46166). All ranks then send the
late contributions to the bucket as well, and from then on launch this bucket at the end of backward.
"""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterable, Sequence
from functools import partial

import torch

from ddp_callbacks.comm.agreement import require_agreement
from ddp_callbacks.comm.collectives import all_reduce
from ddp_callbacks.comm.held import Parameters
from ddp_callbacks.errors import ConfigurationError, warn
from ddp_callbacks.gradients.bucket_sums import BucketSums
from ddp_callbacks.gradients.buckets import Bucket, Forecast, assign_buckets
from ddp_callbacks.gradients.flat_buffer import BufferPool
from ddp_callbacks.gradients.metadata import MetadataFormat
from ddp_callbacks.gradients.weighing import Weighing
from ddp_callbacks.process_group.presence import presence
from ddp_callbacks.replicas.step_times import StepTimes

_BACKWARD_FOR_ALL = (
    "Call backward for each batch on every rank, of loss * 0 if its part must not count: otherwise gradients of "
    "different batches are added up."
)
_SAME_BATCHES = (
    "Every process takes its part of the batches that a stream or an own loader yields. Let them depend neither on "
    "what the training step draws nor on this process's part or loss."
)
_UNEQUAL = (
    "the processes have unequal parts of batch {last} ({own} of {total} samples here), but their losses count alike: "
    "the gradient is not that of one process. Before each backward, call weigh(share.local, share.total) of the "
    "GradientSynchronizer, with the share of the batch: for batch, share in with_shares(loader). In a LightningModule, "
    "call self.manual_backward(loss) instead of loss.backward()."
)
_WEIGH_ON_ALL = (
    "Call weigh() of the GradientSynchronizer before each backward on every rank, with the same total, also where a "
    "rank has no samples: weigh(share.local, share.total). Without a call the total is that of the call before, or the "
    "number of ranks."
)
_SAME_PARAMETERS = "Freeze the same parameters on every rank (requires_grad), before the same backward."


class Reducer:
    """Synchronizes the gradients of parameters, once per :meth:`begin` and :meth:`finish`.

    Attributes:
        known: The parameters, as they were when this was made.
        parameters: The parameters with dense gradients, then those with sparse gradients.
        dense: The number of parameters with dense gradients.
        used: For each parameter, whether it has a gradient since the last synchronization.
        buckets: The buckets of the dense gradients.
        weighing: The weights of this rank's backwards.
        rounds: The number of complete synchronizations.
        skips: Whether this rank skips the step of the next synchronization.
        skipped_by: Whether each rank has skipped that of the last one.

    Args:
        known: The parameters.
        sums: Sums the gradients over the ranks.
        times: Where to note this rank's times between the waits for sums.
    """

    def __init__(self, known: Parameters, sums: BucketSums, times: StepTimes) -> None:
        self.known, dense = known, known.dense
        self.parameters, self.dense = [*dense, *known.sparse], len(dense)
        self.used = [False] * len(self.parameters)
        self._sums, self._group = sums, sums.group
        self.weighing = Weighing(self.parameters, self.used, self._group.size())
        self.rounds = 0
        self.skips, self.skipped_by = False, list[bool]()
        self._times, self._drawn, self._run = times, presence().drawn, presence().run
        self._noted = self._drawn.noted
        assigned = assign_buckets(dense, sums.options.bucket_cap_mb)
        self._format = MetadataFormat(len(assigned), len(self.used), self._group.rank(), self._group.size())
        self.buckets = [self._bucket(index, slots) for index, slots in enumerate(assigned)]
        self._forecast = Forecast([bucket.index for bucket in self.buckets if bucket.active])
        self._planned: list[Bucket] = []  # the buckets that this backward should fill, in launch order
        self._launched = 0  # how many planned buckets are launched
        self._carries_metadata = False  # whether the last planned bucket does
        self._scale = 1.0  # the factor for gradients before the sum
        self._is_finished = True  # False after an exception has ended a backward

    def _bucket(self, index: int, slots: list[int]) -> Bucket:
        parameters = [self.parameters[slot] for slot in slots]
        pool = BufferPool(parameters, self._format.numel, self._sums.allocate)
        return Bucket(index, slots, pool, [self.known.names[id(parameter)] for parameter in parameters], self._run)

    def note_used(self, names: Container[str]) -> None:
        """Note that the parameters with these names have a gradient that is not synchronized yet."""
        for slot, parameter in enumerate(self.parameters):
            self.used[slot] = self.used[slot] or self.known.names[id(parameter)] in names

    def continue_from(self, before: Reducer) -> None:
        """Continue in place of a reducer of other parameters. Local."""
        now, then = ([[each.shape for each in own.pool.parameters] for own in of.buckets] for of in (self, before))
        if self._sums.options.comm_hook is not None and now != then:
            raise ConfigurationError(
                "parameters were added or replaced, but a communication hook may keep state for each bucket, and the "
                "buckets are others now. Change the model before training, or leave out comm_hook."
            )
        self.rounds = before.rounds
        used = dict(zip(map(id, before.parameters), before.used, strict=True))
        self.used[:] = [used.get(id(parameter), False) for parameter in self.parameters]
        self.weighing.load_state_dict(before.weighing.state_dict())

    def end_forward(self) -> None:
        """Note that backward has begun. Local."""
        self._times.mark("in forward")

    def begin(self) -> None:
        """Begin a synchronization. A collective if the total weight is unknown, and there was no earlier total."""
        self.end_forward()
        if not self._is_finished:  # drop the sums and memory of the previous one
            for bucket in self.buckets:
                bucket.pool.abandon()
        self._is_finished = False
        for bucket in self.buckets:
            bucket.start()
        self._planned = [self.buckets[index] for index in self._forecast.guess]
        self._launched = 0
        self._carries_metadata = bool(self._planned) and self._sums.can_carry_metadata(self._planned[-1])
        self.weighing.agree(self._first_total)
        self._scale = self.weighing.unit * self._sums.divisor

    def _first_total(self, weight: float) -> float:
        own = torch.tensor([weight], dtype=torch.float64, device="cpu")
        return float(all_reduce(own, "the first weight", self._group))

    def mark(self, bucket: Bucket, position: int) -> None:
        """Mark a gradient as complete; launch full buckets in order, but not the one that carries the metadata."""
        bucket.mark(position)
        if bucket.missing:
            return
        for waiting in self._planned[self._launched : len(self._planned) - self._carries_metadata]:
            if waiting.missing or waiting.deferred:
                return
            self._launch(waiting)

    def finish(self) -> None:
        """Send the remaining buckets, and wait for all sums; set the gradients to these. A collective."""
        self._times.mark("in backward")
        self._require_known()
        self._require_weighed_losses()
        self._forget_lost_gradients()
        for bucket in self._planned[self._launched :]:
            self._launch(bucket)
        trained, dirty, used, numbers = self._format.decode(self._exchange_metadata())
        self.skips, self.skipped_by = False, [bool(skips) for _, skips in numbers]
        self._require_same_step(trained)
        filled = [bucket for bucket in self.buckets if bucket.active or any(used[slot] for slot in bucket.slots)]
        self._send_rest(filled, dirty)
        correction = self.weighing.correct(sum(weight for weight, *_ in numbers))
        for bucket in filled:
            if correction != 1:
                bucket.reduced().mul_(correction)
            bucket.write_back(used, keeps=not correction)
        for slot, parameter in enumerate(self.known.sparse, self.dense):
            if used[slot]:
                summed = self._sums.sum_sparse(parameter.grad, self.weighing.unit, parameter)
                if correction or parameter.grad is None:
                    parameter.grad = summed
        self._forecast.note([bucket.index for bucket in filled])
        self.weighing.accumulates = False
        self.used[:] = [False] * len(self.used)
        self._is_finished = True
        self._warn_of_parts()
        self._drawn.count, self._noted = 0, self._drawn.noted
        self.rounds += 1
        self._times.mark(None)

    def _warn_of_parts(self) -> None:
        """Warn on rank 0, once, if unequal parts of a batch have had no weight. Local."""
        (own, total), world_size = self._drawn.samples, self._group.size()
        has_drawn = self._noted != self._drawn.noted  # since the last synchronization here, not by another synchronizer
        if self.weighing.is_set or not has_drawn or self._group.rank() or total in (None, own * world_size):
            return
        self.weighing.is_set = True
        warn(_UNEQUAL.format(last=self._drawn.last, own=own, total=total))

    def require_synchronized(self, stepped: Iterable[torch.Tensor]) -> None:
        """Raise if an optimizer has stepped with gradients of ``no_sync``, which only this rank has. Local."""
        waiting = {id(each): each for each, used in zip(self.parameters, self.used, strict=True) if used}
        for parameter in stepped:
            if parameter.grad is not None and id(parameter) in waiting:
                raise ConfigurationError(
                    f"an optimizer has stepped with a gradient of parameter {self.known.names[id(parameter)]} that no "
                    "backward has synchronized: each process has stepped with its own. Leave no_sync (Fabric: "
                    "no_backward_sync) for the last backward before a step, also if the epoch ends before that, or "
                    "call synchronize() of the GradientSynchronizer before the step."
                )

    def _require_known(self) -> None:
        """Raise if a parameter has a gradient that no bucket sends, or has another dtype than its bucket."""
        for name, parameter in (self.known.changes() or {}).items():
            if parameter.requires_grad and parameter.grad is not None:
                raise ConfigurationError(
                    f"parameter {name} was added, replaced or moved since the forward pass began, so its gradient "
                    "would not be summed over the processes. Change the model between two steps, and call weigh(), or "
                    "follow(), of the GradientSynchronizer before the next forward pass."
                )

    def _require_weighed_losses(self) -> None:
        """Raise if this rank's gradients were weighted behind layers that had mixed the ranks' gradients."""
        layers = [layer for layer in self.known.batch_norms if getattr(layer, "is_synchronized", False)]
        for mixed in [layer.statistics.take_mixed() for layer in layers]:
            if mixed and not self.weighing.is_at_root:
                raise ConfigurationError(
                    f"{mixed} is a BatchNorm that mixes the gradients of all processes in backward, so weights of "
                    "unequal parts come too late after it. Call weigh_loss(loss, weight, total) of the "
                    "GradientSynchronizer before backward, not weigh(); in a Trial's closure call on_criterion."
                )

    def _launch(self, bucket: Bucket) -> None:
        if self._launched:
            self._sums.finish_launch(self._planned[self._launched - 1])
        self._launched += 1
        is_last = bucket is self._planned[-1]
        bucket.fill(self._scale, self.used)
        metadata = self._message() if is_last and self._carries_metadata else None
        self._times.launch(bucket.index)
        self._sums.launch(bucket, metadata, is_last)

    def _message(self) -> torch.Tensor:
        """Return this rank's metadata."""
        dirty = [bucket.is_dirty for bucket in self.buckets]
        return self._format.encode(self._trained(), dirty, self.used, [self.weighing.weight, self.skips])

    def _trained(self) -> float:
        """Return a checksum of what must be trained alike; float32 holds its sum over the ranks exactly."""
        dense = [is_frozen for bucket in self.buckets for is_frozen in bucket.frozen]
        sparse = [not parameter.requires_grad for parameter in self.parameters[self.dense :]]
        drawn = self._drawn.count ^ self._drawn.checksum
        alike = bytes(dense + sparse) + self._total_weight().encode()
        return float(zlib.crc32(alike, drawn) % ((1 << 24) // self._group.size()))

    def _total_weight(self) -> str:
        return f"{self.weighing.total:.6g}" if self.weighing.total is not None else "unknown here"

    def _exchange_metadata(self) -> torch.Tensor:
        """Wait for all launched buckets; return the sum of all ranks' metadata. A collective."""
        for bucket in self._planned:
            bucket.wait()
            self._times.finish(bucket.index)
        if self._carries_metadata:
            memory = self._planned[-1].memory
            assert memory is not None
            return memory.flat[memory.numel :]
        # Not before the waits: a hook may start more collectives from its futures, at different moments on the ranks.
        return all_reduce(self._message(), "the end of a backward", self._group)

    def _send_rest(self, filled: list[Bucket], dirty: Sequence[bool]) -> None:
        """Sum contributions to buckets launched before, and buckets that were not predicted. A collective."""
        for bucket in self.buckets:
            if dirty[bucket.index]:
                bucket.deferred = True
                before = bucket.reduced().clone()
                self._send(bucket)
                bucket.reduced().add_(before)
        for bucket in filled:
            if bucket.memory is None:
                self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        bucket.fill(self._scale, self.used)
        self._sums.launch(bucket)
        bucket.wait()

    def _forget_lost_gradients(self) -> None:
        for bucket in self.buckets:
            if bucket.memory is None:
                bucket.forget_lost(self.used)
        for slot in range(self.dense, len(self.parameters)):
            self.used[slot] = self.used[slot] and self.parameters[slot].grad is not None

    def _require_same_step(self, trained: float) -> None:
        """Raise on all ranks if they train on different batches, or train different parameters."""
        if trained == self._trained() * self._group.size():
            return
        agree, drawn = partial(require_agreement, group=self._group), self._drawn
        agree({"drawn since the last backward": str(drawn)}, "the batches of this backward", _BACKWARD_FOR_ALL)
        agree({f"checksum up to {drawn}": str(drawn.checksum)}, "the content of the batches", _SAME_BATCHES)
        agree({"total weight": self._total_weight()}, "the weights of this backward", _WEIGH_ON_ALL)
        settings = {self.known.names[id(p)]: "trained" if p.requires_grad else "frozen" for p in self.parameters}
        agree(settings, "what this backward trains", _SAME_PARAMETERS)
