"""How bytes move between the ranks. Nothing above this folder knows how.

- :mod:`.collectives`: small messages (JSON, tensors) to and from all ranks; :mod:`.codec` is their format,
  :mod:`.agreement` the consistency check that is built on them, :mod:`.scalars` the exchange of a few numbers per step
- :mod:`.protocol`: what every way to sum over the ranks offers, ``AllReduce.launch() -> Work``
- one module for each way: :mod:`.process_group` (gloo, NCCL), :mod:`.shared_memory`, :mod:`.hierarchical`
- :mod:`.topology`: which ranks share a node, and the choice of the way
- :mod:`.buckets`, :mod:`.flat_buffer`: which gradients travel together, and the memory they travel in
- :mod:`.hooks`, :mod:`.compression`: DDP's communication hooks, and the hooks that compress
- :mod:`.mpi`: a process group over MPI
"""

from ddp_callbacks.comm.collectives import (
    all_gather_json,
    all_gather_tensors,
    all_reduce,
    any_rank,
    broadcast,
    broadcast_tensors,
)

__all__ = [
    "all_gather_json",
    "all_gather_tensors",
    "all_reduce",
    "any_rank",
    "broadcast",
    "broadcast_tensors",
]
