"""Communication between the ranks. Nothing above this folder depends on the transport.

- :mod:`.collectives`: small messages (JSON, tensors) to and from all ranks, in the format of :mod:`.codec`;
  :mod:`.agreement`: consistency checks; :mod:`.scalars`: the exchange of a few numbers per step;
  :mod:`.device_scalars`: the same for numbers that are on GPUs, between these; :mod:`.cpu_group`: which process group
  carries CPU tensors
- :mod:`.protocol`: the interface of every all-reduce, ``AllReduce.launch() -> Work``
- its implementations: :mod:`.process_group` (gloo, NCCL), :mod:`.shared_memory`, :mod:`.hierarchical`
- :mod:`.topology`: which ranks share a node, and which all-reduce to use
- :mod:`.batch_statistics`: the exchanges of batch normalization
- :mod:`.buckets`, :mod:`.flat_buffer`: how gradients are grouped, and the memory that carries them
- :mod:`.hooks`, :mod:`.compression`: DDP's communication hooks, and the hooks that compress
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
