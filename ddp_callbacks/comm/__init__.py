"""Communication between the ranks. Nothing above this folder depends on the transport.

- :mod:`.topology`: which ranks share a host, and so how they send messages and sum; :mod:`.subgroups`: the process
  groups for this
- :mod:`.messages`: the all-gather of bytes that carries everything small, through the :mod:`.mailbox` of a host and
  between hosts
- :mod:`.collectives`: plain data, tensors and decisions to and from all ranks, in the format of :mod:`.codec`;
  :mod:`.agreement`: are settings equal on all ranks; :mod:`.differences` are named; :mod:`.checksums` of what is too
  large to send
- :mod:`.held`: which parameters are synchronized
- :mod:`.protocol`: the interface of every all-reduce, ``AllReduce.launch() -> Work``
- its implementations: :mod:`.group_sums` (gloo, NCCL), :mod:`.shared_memory` (in :mod:`.segments`),
  :mod:`.hierarchical`
"""

from ddp_callbacks.comm.agreement import require_agreement
from ddp_callbacks.comm.collectives import (
    all_gather_object,
    all_reduce,
    any_rank,
    barrier,
    broadcast,
    broadcast_object,
)

__all__ = [
    "all_gather_object",
    "all_reduce",
    "any_rank",
    "barrier",
    "broadcast",
    "broadcast_object",
    "require_agreement",
]
