"""Compare the data sets of all ranks, as far as that is quick."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from ddp_callbacks.comm.agreement import require_agreement
from ddp_callbacks.comm.checksums import checksum_of, is_dense

_COMPARED_ROWS = 1 << 16


def require_same_data(dataset: Any, name: str, group: dist.ProcessGroup | None) -> None:
    """Compare the ranks' data sets by indices and integer labels, if they are torch's own. A collective.

    Raises:
        MismatchError: The indices or labels differ between the ranks.
    """
    if type(dataset).__module__ != "torch.utils.data.dataset":
        return
    require_agreement(
        {f"{name}: checksum of its indices and labels": checksum_of(_cheaply_described(dataset))},
        "the data",
        "Every process takes its part of the same data: seed what draws or splits it (torch.manual_seed), and read the "
        "same files.",
        group,
    )


def _cheaply_described(dataset: Any) -> Any:
    """Return the exact properties of torch's data sets that are quick to compare: subset indices, integer labels."""
    if isinstance(dataset, Subset):
        return [torch.as_tensor(dataset.indices), _cheaply_described(dataset.dataset)]
    if isinstance(dataset, ConcatDataset):
        return list(map(_cheaply_described, dataset.datasets))
    if isinstance(dataset, TensorDataset):
        return [(str(found.dtype), found.shape, _integers(found)) for found in dataset.tensors]
    return None


def _integers(tensor: torch.Tensor) -> torch.Tensor | None:
    is_exact = is_dense(tensor) and not (tensor.is_floating_point() or tensor.is_complex())
    return tensor[:_COMPARED_ROWS] if is_exact and tensor.dim() == 1 else None
