"""Communication between the ranks. Nothing above this folder depends on the transport.

- :mod:`.messages`: the all-gather of bytes that carries everything small, through the memory of a host
  (:mod:`.host_slots`) and between hosts; :mod:`.hosts`: which ranks share a host, and its memory; :mod:`.cpu_group`,
  :mod:`.subgroups`: the process groups that it uses
- :mod:`.collectives`: JSON, tensors and decisions to and from all ranks, in the format of :mod:`.codec`;
  :mod:`.agreement`: consistency checks; :mod:`.scalars`: a few numbers per step
- :mod:`.protocol`: the interface of every all-reduce, ``AllReduce.launch() -> Work``
- its implementations: :mod:`.group_sums` (gloo, NCCL), :mod:`.shared_memory`, :mod:`.hierarchical`
- :mod:`.topology`: which ranks share a node, and which all-reduce to use
- :mod:`.batch_statistics`: the exchanges of batch normalization
- :mod:`.buckets`, :mod:`.flat_buffer`: how gradients are grouped, and the memory that carries them;
  :mod:`.bucket_sums`, :mod:`.metadata`: their sums, and what travels behind them; :mod:`.segments`: shared memory
- :mod:`.hooks`, :mod:`.compression`: DDP's communication hooks, and what compresses
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
