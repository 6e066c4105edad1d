"""Sum gradients over the ranks: buckets, the metadata behind them, and sparse gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddp_callbacks.comm.collectives import all_gather_object
from ddp_callbacks.comm.protocol import allocate
from ddp_callbacks.comm.topology import choose_all_reduce
from ddp_callbacks.gradients.buckets import Bucket, check_bucket_cap_mb
from ddp_callbacks.gradients.comm_hooks import CommHook, FutureWork, GradBucket, check_comm_hook
from ddp_callbacks.gradients.compression import DTYPES, Compress, check_compress
from ddp_callbacks.process_group.failures import Launched, enter, launching, wait


@dataclass(frozen=True)
class EngineOptions:
    """How gradients are sent.

    Attributes:
        bucket_cap_mb: The size in MiB at which a bucket is launched.
        comm_hook, comm_state: The user's communication hook and its state, or ``None``.
        compress: How to send less between nodes.

    Raises:
        ConfigurationError: The hook needs DDP itself, or a setting is out of range.
    """

    bucket_cap_mb: float
    comm_hook: CommHook | None
    comm_state: Any
    compress: Compress

    def __post_init__(self) -> None:
        check_bucket_cap_mb(self.bucket_cap_mb)
        check_compress(self.compress, self.comm_hook)
        if self.comm_hook is not None:
            check_comm_hook(self.comm_hook)


class BucketSums:
    """Sums buckets by a communication hook, or by the fastest all-reduce; the constructor is a collective.

    Attributes:
        group, options: As passed.
        divisor: The number by which a hook divides the sum, as it averages; 1 without a hook.
        allocate: Allocates memory for buckets.

    Args:
        group: The ranks' process group.
        devices: The devices of the gradients.
        options: How to send them.
    """

    def __init__(self, group: dist.ProcessGroup, devices: list[torch.device], options: EngineOptions) -> None:
        self.group, self.options = group, options
        self.divisor = 1 if options.comm_hook is None else group.size()
        if options.comm_hook is None:
            self._all_reduce = choose_all_reduce(group, devices, DTYPES[options.compress])
            self.allocate = self._all_reduce.allocate
        else:
            self.allocate = getattr(options.comm_hook, "allocate", allocate)

    def can_carry_metadata(self, bucket: Bucket) -> bool:
        """Whether metadata can be summed with this bucket's gradients."""
        first = bucket.pool.parameters[0]
        is_plain = first.device.type == "cpu" and first.dtype in (torch.float32, torch.float64)
        return is_plain and self.options.comm_hook is None and self._all_reduce.exact

    def launch(self, bucket: Bucket, metadata: torch.Tensor | None = None, is_last: bool = False) -> None:
        """Start to sum a filled bucket, and ``metadata`` behind its gradients. Does not block."""
        assert bucket.memory is not None
        flat = bucket.memory.flat[: bucket.memory.numel]
        if self.options.comm_hook is not None:
            grad_bucket = GradBucket(bucket.index, flat, bucket.pool.parameters, is_last=is_last)
            enter(bucket.purpose)
            with launching(bucket.purpose, self.group):
                future = self.options.comm_hook(self.options.comm_state, grad_bucket)
                bucket.sum = FutureWork(future, flat, self.group, bucket.purpose)
            return
        if metadata is not None:
            flat = bucket.memory.flat
            flat[bucket.memory.numel :] = metadata.to(flat)
        bucket.sum = self._all_reduce.launch(flat, bucket.purpose)

    def finish_launch(self, bucket: Bucket) -> None:
        """Block until all collectives of a launched bucket are started.

        A hook may start more collectives from its futures (PowerSGD does), at a moment that differs between the ranks.
        Those of the next bucket must come after them. On a GPU, all are in a stream when this returns, in order.
        """
        if isinstance(bucket.sum, FutureWork):
            wait(Launched(bucket.sum.future), bucket.purpose, self.group)

    def sum_sparse(self, grad: torch.Tensor | None, factor: float, like: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``factor · grad`` over the ranks, sparse unless a rank's gradient is dense. A collective.

        Args:
            grad: This rank's gradient of an embedding, if it has one.
            like: The parameter.
        """
        parts = []
        is_dense = grad is not None and not grad.is_sparse  # a layer tied to the embedding
        if grad is not None:
            grad = (grad.to_sparse(1) if is_dense else grad).coalesce()
            rows = slice(None if factor else 0)
            parts = [grad.indices()[:, rows], grad.values()[rows] * factor]
        gathered = all_gather_object((is_dense, parts), "a sparse gradient", self.group)
        sent = [part for _, part in gathered if part]
        indices = torch.cat([part[0] for part in sent], dim=1).to(like.device)
        values = torch.cat([part[1] for part in sent]).to(like.device)
        with torch.sparse.check_sparse_tensor_invariants(False):  # torch 2.11 warns beside check_invariants=False
            summed = torch.sparse_coo_tensor(indices, values, like.shape).coalesce()
        return summed.to_dense() if any(is_dense for is_dense, _ in gathered) else summed
